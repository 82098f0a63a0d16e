"""One real ``Scheduler``, the worker's side of vLLM, and an unmodified connector.

A model runner of the release, V1 or V2, drives the worker, layer by layer
(:mod:`kvview_vllm.simulation.scheduler.model_runner`). Each role is built from a separate
configuration, in one process or in two processes. With two processes, the scheduler may be some
steps ahead of the worker.

- VSIM-3 A connector **must** only receive calls that vLLM makes, and a step **must** only write the
  slots that it computes. A connector may rely on vLLM to reuse blocks only through the scheduler.

Source: :mod:`kvview_vllm.simulation.engine_core`, :mod:`kvview_vllm.simulation.raw.worker.role`.
"""

from __future__ import annotations

import copy
import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from typing_extensions import override

from kvview import BlockIds, CacheGeometry, ConfigError, FullAttention, Mamba, OffloadKey
from kvview.errors import line_of
from kvview.testing.connector.half.hook_calls import hook
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview_vllm.geometry import read_geometry
from kvview_vllm.releases.build import samples
from kvview_vllm.releases.compat.calls import (
    aborted_loads_keep_blocks,
    can_name_groups,
    num_preemptions,
)
from kvview_vllm.releases.cpu.process_groups import join
from kvview_vllm.releases.cpu.worker_caches import (
    CacheKind,
    config_of_scheduler,
    has_pending_work,
    make_configs,
    make_layers,
    overridden,
    supports_several_groups,
)
from kvview_vllm.simulation.engine_core import LaunchedStep, VLLMHarness
from kvview_vllm.simulation.raw.call_recorder import CallRecorder, free_queue, make_recorded
from kvview_vllm.simulation.raw.reported_events import ReportedEvents
from kvview_vllm.simulation.raw.transfer_config import registered
from kvview_vllm.simulation.raw.worker.ranks import RawRanks, sizes_of_ranks
from kvview_vllm.simulation.raw.worker.role import RawStep, RawWorker, RemoteRawWorker
from kvview_vllm.simulation.raw.worker.token_bytes import RequestInStep, TokenWords, Wrong
from kvview_vllm.simulation.scheduler import capabilities, cpu_scheduler, model_runner
from kvview_vllm.simulation.scheduler.requests import Chunk
from kvview_vllm.simulation.scheduler.vllm_scheduler import VLLMScheduler, named, reads_vllm

if TYPE_CHECKING:
    from kvview.testing.connector.scenario.scenario import Scenario
    from kvview.testing.handoff.harness import PDHarness
    from kvview_vllm.simulation.raw.stand_ins import StandIns

_REJECTED = 0x2DEAD  # the word of each rejected draft
_GARBAGE = 0x1BAD


@dataclass(frozen=True)
class RawSettings:
    """The parts of an engine that a seeded run leaves at their defaults.

    Args:
        ranks: Tensor-parallel and pipeline-parallel size; the caches are those of one rank.
        rank: Rank of the worker.
        kind: Kinds of the model's layers; by default those of the scenario's groups.
        is_plain: Whether the scheduler is vLLM's own class.
        adjust: Changes the ``VllmConfig`` of both roles.
        clock: Clock in seconds.
        steps_after_work: Seconds for which the engine steps after its work has ended.
        plays_handoffs: Whether the engine hands KV to others, so that another owner overwrites
            squeezed blocks, and reads of wrong bytes are counted instead of raised.
    """

    ranks: tuple[int, int] = (1, 1)
    rank: int = 0
    kind: CacheKind | None = None
    is_plain: bool = True
    adjust: Callable[[Any], None] = lambda config: None
    clock: Callable[[], float] = lambda: 0.0
    steps_after_work: float = 0.0
    plays_handoffs: bool = False


@dataclass(eq=False)
class _Launched(LaunchedStep):
    step: Any = None  # a RawStep, or a pickled one


@reads_vllm
class RawHarness(VLLMHarness):
    """A scheduler and a worker with a connector, or without one.

    Args:
        scenario: Sizes, as fitted.
        connector_class: A ``KVConnectorBase_V1``.
        transfer_config: Arguments of ``KVTransferConfig`` besides its class.
        recorder: Records the connector's calls.
        stand_ins: Replace CUDA copies.
        settings: The other parts of the engine.
        is_connected: Whether the connector runs; a run without it has the same KV-cache groups.
    """

    def __init__(
        self,
        scenario: Scenario,
        connector_class: type,
        transfer_config: Mapping[str, Any],
        recorder: CallRecorder,
        stand_ins: StandIns,
        settings: RawSettings = RawSettings(),
        *,
        is_connected: bool = True,
    ) -> None:
        self._recorder = recorder
        self._settings = settings
        self._words = TokenWords()
        self._has_process = scenario.worker_half == "in_a_process"
        self._lags = self._has_process and scenario.compute_lags
        self._loses_a_rank = scenario.ends_abruptly
        self._load_of: dict[str, RequestInStep] = {}
        self._loaded: set[str] = set()  # requests whose load was right
        self._num_wrong_reads = 0
        self._wrong_reports: list[tuple[str, str]] = []  # laws and messages of a step
        self._steps_until = 0.0
        ranks = sizes_of_ranks(scenario.ranks) if scenario.ranks else settings.ranks
        recorded = make_recorded(connector_class, recorder)
        setattr(sys.modules[__name__], recorded.__name__, recorded)
        transfer_config = {
            "kv_role": "kv_both",
            **transfer_config,
            "kv_connector": recorded.__name__,
            "kv_connector_module_path": __name__,
        }
        config, cache_configs, stages = self._configure(
            scenario, recorded, transfer_config, ranks, is_connected=is_connected
        )
        geometry = read_geometry(config, cache_configs[0])
        is_v2 = capabilities.runs_v2(scenario)

        def make_worker(rank: int = 0) -> RawWorker:
            stage = 0
            if scenario.ranks:
                join(ranks, rank)
                stage = rank // ranks[0]
                stand_ins.delay_from(rank)

            def connect() -> Any:
                with registered(recorded):
                    return cpu_scheduler.make_worker_connector(
                        config, cache_configs[stage], rank if scenario.ranks else settings.rank
                    )

            return RawWorker(
                config,
                cache_configs[stage],
                stages[stage],
                geometry.groups,
                connect if is_connected else None,
                recorder,
                stand_ins,
                rank,
                is_v2=is_v2,
            )

        own = copy.deepcopy(config), config_of_scheduler(cache_configs)
        # The process is started first, so that it does not get changes to modules by the
        # scheduler's side.
        workers: list[Any] = []
        try:
            for number in range(len(scenario.ranks) or 1):
                make = partial(make_worker, number)
                workers.append(RemoteRawWorker(make) if self._has_process else make())
            with registered(recorded):
                scheduler = VLLMScheduler(*own, geometry, is_v2=is_v2, plain=settings.is_plain)
            self.worker: Any = workers[0]
            if scenario.ranks:
                delays = [fate.move_after for fate in scenario.fates]
                self.worker = RawRanks(workers, scheduler.real, ranks[0], delays)
        except BaseException:
            for worker in workers:
                worker.close()
            raise
        longest = config.model_config.max_model_len
        super().__init__(scenario, scheduler, longest, plays_handoffs=settings.plays_handoffs)
        recorder.record_pool(scheduler.pool)
        if can_name_groups() and "take_events" in overridden(connector_class):
            recorder.events = ReportedEvents(scheduler.real, geometry.hash_block_size)

    def _configure(
        self,
        scenario: Scenario,
        recorded: type,
        transfer_config: dict[str, Any],
        ranks: tuple[int, int],
        *,
        is_connected: bool,
    ) -> tuple[Any, list[Any], list[CacheKind]]:
        """Make the configurations and the layers of all stages, in groups that it takes."""
        geometry = scenario.geometry
        make = partial(self._make_config, scenario, ranks)
        config = make(geometry, transfer_config)
        with registered(recorded):
            takes_groups = supports_several_groups(recorded, config)
        # vLLM merges full attention and one other kind into one group, but no Mamba.
        others = {one for one in geometry.groups if not isinstance(one, FullAttention)}
        has_states = any(isinstance(one, Mamba) for one in others)
        is_reduced = not takes_groups and (has_states or len(others) > 1)
        if is_reduced:
            which = "a Mamba group" if has_states else "windows of several sizes"
            self._recorder.left_out.add(f"{which}: the connector takes one group")
            geometry = CacheGeometry.single(geometry.groups[0].block_size)
        if is_reduced or not is_connected:
            config = make(geometry, transfer_config if is_connected else None)
        if not takes_groups:
            config.scheduler_config.disable_hybrid_kv_cache_manager = True
        number = ranks[1] if scenario.ranks else 1
        is_one = len(geometry.groups) == 1 or not takes_groups
        num_draft_layers = int(
            is_one and scenario.lookahead_tokens > 0 and capabilities.saves_after_drafts(scenario)
        )
        stages = [
            self._settings.kind or make_layers(geometry.groups, stage, num_draft_layers)
            for stage in range(number)
        ]
        self._recorder.coverage["with layers of a draft model"] = num_draft_layers
        cache_configs = make_configs(config, stages, scenario.num_gpu_blocks)
        num_groups = len(cache_configs[0].kv_cache_groups)
        if num_groups < len(scenario.geometry.groups):
            self._recorder.left_out.add("several KV-cache groups: the connector takes one")
        self._recorder.coverage["with several groups"] = num_groups > 1
        return config, cache_configs, stages

    def _make_config(
        self,
        scenario: Scenario,
        ranks: tuple[int, int],
        geometry: CacheGeometry,
        transfer_config: dict[str, Any] | None,
    ) -> Any:
        with tempfile.TemporaryDirectory(prefix="kvview-") as folder, _refusal_named():
            config = cpu_scheduler.make_vllm_config(
                Path(folder),
                transfer_config,
                block_size=geometry.hash_block_size,
                num_groups=len(geometry.groups),
                has_states=any(isinstance(group, Mamba) for group in geometry.groups),
                ranks=ranks,
                publishes_events=can_name_groups(),
                **cpu_scheduler.sizes_of(scenario),
            )
        self._settings.adjust(config)
        return config

    @override
    def _finish(self, request_ids: Sequence[str]) -> None:
        if not aborted_loads_keep_blocks():
            loading = {name for name, status in self.unfinished().items() if status == "loading"}
            loading -= self.scheduler.loaded
            if loading.intersection(request_ids):
                self._recorder.left_out.add(
                    "aborts while loading: vLLM frees the blocks of the load"
                )
            request_ids = [name for name in request_ids if name not in loading]
        super()._finish(request_ids)

    # --- queries ---

    @property
    def mismatch(self) -> str:
        """Return an empty text, because the step that reads wrong bytes reports them itself."""
        return ""

    @property
    def wrong_block(self) -> None:
        """Return None, as for :attr:`mismatch`."""

    def finished_requests(self) -> list[str]:
        """Return ended requests whose blocks the connector has promised to free later."""
        requests = self.scheduler.real.requests
        return [name for name, request in requests.items() if request.is_finished()]

    def preempted_again_and_again(self) -> list[str]:
        """Return unfinished requests with more preemptions than scarce blocks can explain."""
        requests = self.scheduler.real.requests
        return [name for name, request in requests.items() if num_preemptions(request) > 10]

    @override
    def has_work(self) -> bool:
        """Whether the engine must step; in a handoff also for a while after its work has ended."""
        now = self._settings.clock()
        has_work = (
            bool(self._launched or self.scheduler.real.requests)
            or self._has_pending_work()
            or bool(self.held_blocks())
        )
        if has_work or (self._plays_handoffs and self._has_requests()):
            self._steps_until = now + self._settings.steps_after_work
            return True
        return now < self._steps_until

    @override
    def _has_pending_work(self) -> bool:
        return has_pending_work(self.scheduler.real.connector)

    @override
    def held_blocks(self) -> Mapping[int, int]:
        """Return the references that belong neither to requests nor to the scenario."""
        return self.scheduler.foreign_refs(self.engine_refs())

    @override
    def engine_refs(self) -> Counter[int]:
        """Return the references except those of finished prompts, which the connector holds."""
        refs = super().engine_refs()
        for name in self._prefills.intersection(self.finished_requests()):
            for table in self.scheduler.table(name):
                refs.subtract(block for block in table if block)
        return +refs

    def free_block_ids(self) -> Sequence[int]:
        """Return the free queue, read from its links, which a connector may have broken."""
        return free_queue(self.scheduler.pool)

    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        """Return nothing, because the harness compares the loads itself."""
        return {}

    def num_wrong_blocks(self) -> int:
        """Count the reads of wrong bytes by requests without a successful load."""
        return self._num_wrong_reads

    @override
    def take_offered(self) -> Mapping[str, tuple[Mapping[str, Any], BlockIds]]:
        """Return the offers, with only the blocks that their requests still have."""
        offered = super().take_offered()
        return {name: (params, self.scheduler.table(name)) for name, (params, _) in offered.items()}

    @override
    def reset(self, *, after_reports: bool = False) -> bool:
        """Reset the caches; if vLLM and the connector accept the reset, the weights change too.

        Up to 0.12 a reset does not reach the connector, so the weights stay.
        """
        has_reset = super().reset(after_reports=after_reports)
        if has_reset and capabilities.can_reset_connectors():
            self._words.change_weights()
        return has_reset

    def shutdown(self) -> Mapping[int, int]:
        """Shut both roles down; the blocks of open offers do not count as leaked."""
        if self._loses_a_rank:
            self.worker.kill_last()
        while self._launched and not self._loses_a_rank:
            self._run(self._launched.popleft())
        with named("shutdown"):
            self.scheduler.real.shutdown()
        self._recorder.seen.update(self.worker.shutdown())
        # Without a rank the engine ends, and its pool with it.
        return {} if self._loses_a_rank else self.scheduler.foreign_refs(super().engine_refs())

    @override
    def _sleep(self) -> None:
        self.worker.sleep()

    @override
    def alias(self) -> bool:
        return False

    @override
    def _overwrite(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks in a handoff; otherwise only requests write into blocks (VSIM-3)."""
        if self._plays_handoffs:
            for slots in self.worker.caches.slots:
                slots[list(block_ids)] = _GARBAGE

    # --- one step ---

    @override
    def _launch_step(self, output: Any, chunks: Mapping[str, Chunk]) -> _Launched:
        if self._recorder.events is not None:
            self._recorder.events.note_requests()
        step: RawStep | bytes = RawStep(output, self._batch(output, chunks), self._loads())
        if self._has_process:  # so that the message keeps its contents until it is read
            with hook("pickling what build_connector_meta returned", "CONN-3"):
                step = pickle.dumps(step)
        launched = _Launched(output, chunks, step=step)
        if not self._lags:
            self._execute(launched)
        elif isinstance(self.worker, RawRanks) and isinstance(step, bytes):
            self.worker.launch(step)
        return launched

    @override
    def _run(self, step: LaunchedStep) -> None:
        assert isinstance(step, _Launched), "this engine launches no other steps"
        if step.answer is None:
            self._execute(step)
        self._wrong_reports = [*self._find_wrong_reports(step.answer.kv_connector_output)]

    def _find_wrong_reports(self, transfers: Any) -> Iterator[tuple[str, str]]:
        """Yield the laws that reports of a step break, with messages; vLLM refuses the reports."""
        sent = {*((transfers and transfers.finished_sending) or ())}
        received = {*((transfers and transfers.finished_recving) or ())}
        unfinished, known = self.unfinished(), self.scheduler.real.requests
        twice = (
            "; a rank reported a transfer twice, or get_finished_count returns fewer ranks than "
            "report it"
        )
        for name in sorted(received):
            state = unfinished.get(name, "loading" if name in known else "over")
            if state != "loading":
                yield (
                    "CONN-3",
                    f"get_finished named a load of {name!r} that is not in flight, because the "
                    f"request is {state}{twice}",
                )
        for name in sorted(sent):
            if name in unfinished or name not in known:
                owner = "running, with its blocks" if name in unfinished else "over, without blocks"
                yield (
                    "CONN-4",
                    f"get_finished named a store of {name!r}, but the request is {owner}{twice}",
                )

    @override
    def _take_in(self) -> None:
        """Process an output; blame the connector if vLLM refuses one of its reports."""
        try:
            super()._take_in()
        except InvariantBroken as error:
            if error.law != "ENGINE" or not self._wrong_reports:
                raise
            raise InvariantBroken(*self._wrong_reports[0]) from error

    def _execute(self, launched: _Launched) -> None:
        """Run a step in the worker, and process its result."""
        answer = self.worker.execute(launched.step)
        transfers = answer.transfers
        sampled = {request_id: chunk.sampled for request_id, chunk in launched.chunks.items()}
        launched.answer = samples.make_model_output(launched.output, sampled, transfers)
        launched.invalid = model_runner.invalid_blocks(transfers)
        self._recorder.seen.update(answer.seen)
        # A loaded byte must have been saved before, because a connector's store is empty at the
        # start.
        self._recorder.coverage.update(dict.fromkeys(("loads", "stores"), answer.num_loads))
        # The next step may be running when the scheduler is notified of failed loads.
        invalid = {b for step in (*self._launched, launched) for b in step.invalid}
        for one in answer.wrong:
            if one.block_id not in invalid:
                self._on_wrong(one)

    def _batch(self, output: Any, chunks: Mapping[str, Chunk]) -> list[RequestInStep]:
        """Return the tokens that a step computes, with the current block tables."""
        tables = self.scheduler.tables(output)
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
        words = (
            self._words.words(self.scheduler.planned[request_id], end) + [_REJECTED] * num_rejected
        )
        return RequestInStep(request_id, [*map(list, tables)], start, end + num_rejected, words)

    def _loads(self) -> list[RequestInStep]:
        """Return the loads that the connector must start with this step."""
        to_load, self._recorder.to_load = self._recorder.to_load, {}
        loads: list[RequestInStep] = []
        for name, (start, end) in to_load.items():
            if name not in self.scheduler.real.requests:
                continue
            tables = self.scheduler.table(name)
            for group, table in zip(self.scheduler.geometry.groups, tables, strict=True):
                if len(table) * group.block_size < end:
                    raise InvariantBroken(
                        "CONN-2",
                        f"get_num_new_matched_tokens promised tokens {start} to {end} of "
                        f"{name!r}, which only has {len(table)} blocks of {group.block_size} "
                        f"tokens",
                    )
            loads.append(self._tokens_of(name, tables, start, end))
        if self._plays_handoffs:
            self._load_of |= {load.request_id: load for load in loads}
        return loads

    @override
    def _take_load(self, request_id: str) -> tuple[Collection[int], Callable[[], int]]:
        load = self._load_of.pop(request_id)

        def count_wrong() -> int:
            self._loaded.add(request_id)
            return not self.worker.holds(load)

        return {block for table in load.tables for block in table}, count_wrong

    def _on_wrong(self, wrong: Wrong) -> None:
        """Raise an error for wrong bytes; in a handoff, count them."""
        if self._plays_handoffs:
            # A request whose load was right reads a block that the load does not have.
            is_loaded = wrong.request_id in self._loaded
            self._stats.mismatches += is_loaded
            self._num_wrong_reads += not is_loaded
            return
        self._stats.mismatches += 1
        start, number, _ = self._recorder.laws.promised.get(wrong.request_id, (0, 0, False))
        source = "a block that was hit or computed"
        if start <= wrong.position < start + number:
            source = f"get_num_new_matched_tokens promised tokens {start} to {start + number} of it"
        raise InvariantBroken(
            "XFER-1",
            f"request {wrong.request_id!r} reads wrong bytes at token {wrong.position}, in block "
            f"{wrong.block_id}, layer {wrong.layer}, head {wrong.head}: it holds "
            f"{self._words.name(wrong.word)} "
            f"({source})",
        )


@contextmanager
def _refusal_named() -> Iterator[None]:
    """Report that vLLM refuses the configuration, in which only the connector is the user's."""
    try:
        yield
    except ValidationError as error:
        reason = line_of(error.errors()[0]["msg"])
        raise ConfigError(f"vLLM does not accept this connector: {reason}") from error


if TYPE_CHECKING:
    _: type[PDHarness] = RawHarness
