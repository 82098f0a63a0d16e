"""One real ``Scheduler``, the worker's side of vLLM, and an unmodified connector.

The release's own ``KVConnectorModelRunnerMixin`` drives the worker in vLLM's own forward context,
layer by layer. Each role is built from a separate configuration, in one process or in two
processes. With two processes, the scheduler may be some steps ahead of the worker.

- VSIM-3 A connector **must** only receive calls that vLLM makes, and a step **must** only write the
  slots that it computes. A connector may rely on vLLM to reuse blocks only through the scheduler.

Source: :mod:`kvview_vllm.simulation.engine`, :mod:`kvview_vllm.simulation.raw.worker`.
"""

from __future__ import annotations

import copy
import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvview import CacheGeometry, Mamba, OffloadKey
from kvview.testing.connector.hook_calls import hook
from kvview.testing.connector.invariants import InvariantBroken
from kvview_vllm.geometry import read_geometry
from kvview_vllm.releases.calls import aborted_loads_keep_blocks, num_preemptions
from kvview_vllm.releases.process_groups import join
from kvview_vllm.releases.worker_caches import (
    CacheKind,
    config_of_scheduler,
    has_pending_work,
    make_config,
    make_layers,
    supports_several_groups,
)
from kvview_vllm.simulation import scheduler as cpu_scheduler
from kvview_vllm.simulation.engine import (
    LaunchedStep,
    VLLMConnectorHarness,
    named,
    reads_vllm,
)
from kvview_vllm.simulation.raw.ranks import RawRanks
from kvview_vllm.simulation.raw.target import registered
from kvview_vllm.simulation.raw.token_bytes import RequestInStep, TokenWords, Wrong
from kvview_vllm.simulation.raw.watched import Watch, free_queue, make_watched
from kvview_vllm.simulation.raw.worker import RawStep, RawWorker, RemoteRawWorker
from kvview_vllm.simulation.requests import Chunk
from kvview_vllm.simulation.stream_order import Forward

if TYPE_CHECKING:
    from kvview.testing.connector.harness import ConnectorHarness
    from kvview.testing.connector.scenario import Scenario
    from kvview_vllm.simulation.raw.stand_ins import StandIns


_REJECTED = 0x2DEAD  # the word of each rejected draft


@reads_vllm
class RawHarness(VLLMConnectorHarness):
    """A scheduler and a worker with a connector, or without one.

    Args:
        scenario: Sizes, as fitted.
        connector_class: A ``KVConnectorBase_V1``.
        transfer_config: Arguments of ``KVTransferConfig`` besides its class.
        watch: Records the connector's calls.
        stand_ins: Replace CUDA copies.
        is_connected: Whether the connector runs; a run without it has the same KV-cache groups.
    """

    _is_plain = True
    """Whether the scheduler is vLLM's own class."""

    _ranks = (1, 1)
    """Tensor-parallel and pipeline-parallel size; the caches are those of one rank."""

    _rank = 0
    """Rank of the worker."""

    def __init__(
        self,
        scenario: Scenario,
        connector_class: type,
        transfer_config: Mapping[str, Any],
        watch: Watch,
        stand_ins: StandIns,
        *,
        is_connected: bool = True,
    ) -> None:
        self._connector_class = connector_class
        self._is_connected = is_connected
        self._transfer_config = transfer_config
        self._watch = watch
        self._stand_ins = stand_ins
        self._words = TokenWords()
        self._has_process = scenario.worker_half == "in_a_process"
        self._lags = self._has_process and scenario.compute_lags
        self._loses_a_rank = scenario.ends_abruptly
        if scenario.ranks:
            self._ranks = len(scenario.ranks), 1
        super().__init__(scenario, (), lambda: 0.0)
        watch.watch_pool(self._pool)

    @override
    def _build(self, scenario: Scenario, connectors: object, clock: object) -> None:
        watched = make_watched(self._connector_class, self._watch)
        setattr(sys.modules[__name__], watched.__name__, watched)
        transfer_config = {
            "kv_role": "kv_both",
            **self._transfer_config,
            "kv_connector": watched.__name__,
            "kv_connector_module_path": __name__,
        }
        groups = scenario.geometry.groups
        config = self._make_config(scenario, transfer_config)
        with registered(watched):
            takes_groups = supports_several_groups(watched, config)
        if not takes_groups and any(isinstance(group, Mamba) for group in groups):
            self._watch.left_out.add("a Mamba group: the connector takes one group")
            scenario = replace(scenario, geometry=CacheGeometry.single(groups[0].block_size))
            self._geometry = scenario.geometry
            config = self._make_config(scenario, transfer_config)
        if not self._is_connected:
            config = self._make_config(scenario, None)
        if not takes_groups:
            config.scheduler_config.disable_hybrid_kv_cache_manager = True
        kind = self._cache_kind(scenario)
        cache_config = make_config(config, kind, scenario.num_gpu_blocks)
        self._longest = config.model_config.max_model_len
        self._geometry = read_geometry(config, cache_config)
        if len(self._geometry.groups) < len(groups):
            self._watch.left_out.add("several KV-cache groups: the connector takes one")
        self._watch.coverage["with several groups"] = len(self._geometry.groups) > 1

        def connect(rank: int) -> Any:
            with registered(watched):
                return cpu_scheduler.make_worker_connector(config, cache_config, rank)

        def make_worker(rank: int = 0) -> RawWorker:
            if scenario.ranks:
                join(self._ranks, rank)
            return RawWorker(
                config,
                cache_config,
                kind,
                self._geometry.groups,
                partial(connect, rank if scenario.ranks else self._rank)
                if self._is_connected
                else None,
                self._watch,
                self._stand_ins,
                rank,
            )

        own = copy.deepcopy(config), config_of_scheduler(cache_config)
        # The process is started first, so that it does not get changes to modules by the
        # scheduler's side.
        self.worker: Any
        if scenario.ranks:
            numbers = range(len(scenario.ranks))
            self.worker = RawRanks([RemoteRawWorker(partial(make_worker, n)) for n in numbers])
        else:
            self.worker = RemoteRawWorker(make_worker) if self._has_process else make_worker()
        try:
            with named("building the scheduler"), registered(watched):
                self._scheduler = cpu_scheduler.make_scheduler(
                    *own, self._geometry, plain=self._is_plain
                )
        except BaseException:
            self.worker.close()
            raise

    def _cache_kind(self, scenario: Scenario) -> CacheKind:
        """Return the kinds of the model's layers."""
        return make_layers(scenario.geometry.groups)

    def _make_config(self, scenario: Scenario, transfer_config: dict[str, Any] | None) -> Any:
        with tempfile.TemporaryDirectory(prefix="kvview-") as folder:
            return cpu_scheduler.make_vllm_config(
                Path(folder),
                transfer_config,
                block_size=self._geometry.hash_block_size,
                num_groups=len(self._geometry.groups),
                has_states=any(isinstance(group, Mamba) for group in self._geometry.groups),
                ranks=self._ranks,
                **cpu_scheduler.sizes_of(scenario),
            )

    @override
    def _finish(self, request_ids: Sequence[str]) -> None:
        if not aborted_loads_keep_blocks():
            loading = {name for name, status in self.unfinished().items() if status == "loading"}
            loading -= set(self._scheduler.finished_recving_kv_req_ids)
            if loading.intersection(request_ids):
                self._watch.left_out.add("aborts while loading: vLLM frees the blocks of the load")
            request_ids = [name for name in request_ids if name not in loading]
        super()._finish(request_ids)

    # --- queries ---

    @property
    @override
    def mismatch(self) -> str:
        """Return an empty text, because the step that reads wrong bytes reports them itself."""
        return ""

    @property
    @override
    def wrong_block(self) -> None:
        """Return None, as for :attr:`mismatch`."""

    def finished_requests(self) -> list[str]:
        """Return ended requests whose blocks the connector has promised to free later."""
        requests = self._scheduler.requests
        return [name for name, request in requests.items() if request.is_finished()]

    def preempted_again_and_again(self) -> list[str]:
        """Return unfinished requests with more preemptions than scarce blocks can explain."""
        requests = self._scheduler.requests
        return [name for name, request in requests.items() if num_preemptions(request) > 10]

    @override
    def has_work(self) -> bool:
        return (
            bool(self._launched or self._scheduler.requests)
            or self._has_pending_work()
            or bool(self.held_blocks())
        )

    @override
    def _has_pending_work(self) -> bool:
        return has_pending_work(self._scheduler.connector)

    @override
    def held_blocks(self) -> Mapping[int, int]:
        """Return the references that belong neither to requests nor to the scenario."""
        refs = {block.block_id: block.ref_cnt for block in self._pool.blocks if block.ref_cnt > 0}
        refs.pop(0, None)
        return +(Counter(refs) - self.engine_refs())

    @override
    def free_block_ids(self) -> Sequence[int]:
        """Return the free queue, read from its links, which a connector may have broken."""
        return free_queue(self._pool)

    @override
    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        return {}

    @override
    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        return [tuple(keys) for keys in self._look.block_keys(block_ids)]

    @override
    def reset(self, *, after_reports: bool = False) -> bool:
        """Reset the caches; if vLLM and the connector accept the reset, the weights change too.

        Up to 0.12 a reset does not reach the connector, so the weights stay.
        """
        has_reset = super().reset(after_reports=after_reports)
        if has_reset and cpu_scheduler.can_reset_connectors():
            self._words.change_weights()
        return has_reset

    @override
    def shutdown(self) -> Mapping[int, int]:
        if self._loses_a_rank:
            self.worker.kill_last()
        while self._launched and not self._loses_a_rank:
            self._run(self._launched.popleft())
        with named("shutdown"):
            self._scheduler.shutdown()
        self._watch.seen.update(self.worker.shutdown())
        # Without a rank the engine ends, and its pool with it.
        return {} if self._loses_a_rank else self.held_blocks()

    @override
    def alias(self) -> bool:
        return False

    @override
    def _overwrite(self, block_ids: Sequence[int]) -> None:
        """Do nothing, because only requests may write into blocks (VSIM-3)."""

    # --- one step ---

    @override
    def _launch(self) -> Any:
        output = self._schedule()
        chunks = self._chunks(output)
        step: RawStep | bytes = RawStep(output, self._batch(output, chunks), self._loads())
        if self._has_process:  # so that the message keeps its contents until it is read
            with hook("pickling what build_connector_meta returned", "CONN-3"):
                step = pickle.dumps(step)
        launched = _RawLaunched(output, None, Forward(), (), chunks, step)
        self._launched.append(launched)
        if not self._lags:
            self._execute(launched)
        self.stats.most_in_flight = max(self.stats.most_in_flight, len(self._launched))
        return output

    @override
    def _run(self, step: LaunchedStep) -> None:
        assert isinstance(step, _RawLaunched), "this engine launches no other steps"
        if step.answer is None:
            self._execute(step)

    def _execute(self, launched: _RawLaunched) -> None:
        """Run a step in the worker, and process its result."""
        answer = self.worker.execute(launched.step)
        transfers = answer.transfers
        sampled = {request_id: chunk.sampled for request_id, chunk in launched.chunks.items()}
        launched.answer = cpu_scheduler.make_model_output(launched.output, sampled, transfers)
        launched.invalid = cpu_scheduler.invalid_blocks(transfers)
        self._watch.seen.update(answer.seen)
        # A loaded byte must have been saved before, because a connector's store is empty at the
        # start.
        self._watch.coverage.update(dict.fromkeys(("loads", "stores"), answer.num_loads))
        # The next step may be running when the scheduler is notified of failed loads.
        invalid = {b for step in (*self._launched, launched) for b in step.invalid}
        for one in answer.wrong:
            if one.block_id not in invalid:
                self._raise_wrong(one)

    def _batch(self, output: Any, chunks: Mapping[str, Chunk]) -> list[RequestInStep]:
        """Return the tokens that a step computes, with the current block tables."""
        tables = self._tables(output)
        return [
            self._tokens_of(name, tables[name], chunk.start, chunk.kept, chunk.num_rejected)
            for name, chunk in chunks.items()
        ]

    def _tokens_of(
        self,
        request_id: str,
        tables: Sequence[Sequence[int]],
        start: int,
        end: int,
        num_rejected: int = 0,
    ) -> RequestInStep:
        words = self._words.words(self._added[request_id], end) + [_REJECTED] * num_rejected
        return RequestInStep(request_id, [*map(list, tables)], start, end + num_rejected, words)

    def _loads(self) -> list[RequestInStep]:
        """Return the loads that the connector must start with this step."""
        to_load, self._watch.to_load = self._watch.to_load, {}
        loads: list[RequestInStep] = []
        for name, (start, end) in to_load.items():
            if name not in self._scheduler.requests:
                continue
            tables = self._manager.get_block_ids(name)
            for group, table in zip(self._geometry.groups, tables, strict=True):
                if len(table) * group.block_size < end:
                    raise InvariantBroken(
                        "CONN-2",
                        f"get_num_new_matched_tokens promised tokens {start} to {end} of "
                        f"{name!r}, which only has {len(table)} blocks of {group.block_size} "
                        f"tokens",
                    )
            loads.append(self._tokens_of(name, tables, start, end))
        return loads

    def _raise_wrong(self, wrong: Wrong) -> None:
        self.stats.mismatches += 1
        start, number, _ = self._watch.promised.get(wrong.request_id, (0, 0, False))
        source = "a block that was hit or computed"
        if start <= wrong.position < start + number:
            source = f"get_num_new_matched_tokens promised tokens {start} to {start + number} of it"
        raise InvariantBroken(
            "XFER-1",
            f"request {wrong.request_id!r} reads wrong bytes at token {wrong.position}, in block "
            f"{wrong.block_id}, layer {wrong.layer}, head {wrong.head}: there is "
            f"{self._words.name(wrong.word)} "
            f"({source})",
        )


@dataclass(eq=False)
class _RawLaunched(LaunchedStep):
    step: Any  # a RawStep, or a pickled one


if TYPE_CHECKING:
    _: type[ConnectorHarness] = RawHarness
