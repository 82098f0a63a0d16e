"""One real ``Scheduler``, the workers' side of ``KVViewConnector``, and connectors of kvview.

:class:`~kvview_vllm.simulation.VLLMEngines` builds one for each run.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvview import (
    CacheGroup,
    Connector,
    ConnectorConfig,
    Mamba,
    OffloadKey,
    SchedulerConnector,
    WorkerConnector,
)
from kvview.testing.connector.scenario.scenario import NUM_LAYERS, PAGE_BYTES
from kvview_vllm.binding import walk_connectors
from kvview_vllm.geometry import read_geometry
from kvview_vllm.pool import NULL_BLOCK_ID
from kvview_vllm.releases.build import samples
from kvview_vllm.releases.compat.calls import (
    can_name_groups,
    child_connectors,
    idle_steps_report,
)
from kvview_vllm.simulation.engine_core import LaunchedStep, VLLMHarness
from kvview_vllm.simulation.kvview.published import PublishedEvents
from kvview_vllm.simulation.kvview.stream_order import Compute, Forward
from kvview_vllm.simulation.scheduler import capabilities, cpu_scheduler, model_runner
from kvview_vllm.simulation.scheduler.model_runner import ModelRunner, RunnerV1, RunnerV2
from kvview_vllm.simulation.scheduler.requests import Chunk, salt_of
from kvview_vllm.simulation.scheduler.vllm_scheduler import VLLMScheduler, named, reads_vllm

if TYPE_CHECKING:
    from kvview.testing.connector.run.compute_stream import StepStream
    from kvview.testing.connector.scenario.scenario import Scenario
    from kvview.testing.handoff.harness import EngineLife, PDHarness

_BARE = {"contain_faults": False, "leak_report_seconds": None}


class HandedConnector(Connector):
    """A connector whose halves are made by the object in the option ``connector``.

    Both sides of ``KVViewConnector`` therefore use the same object.
    """

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self._connector: Connector = config.options["connector"]

    @override
    def make_scheduler(self) -> SchedulerConnector:
        return self._connector.make_scheduler()

    @override
    def make_worker(self) -> WorkerConnector:
        return self._connector.make_worker()


class Configs:
    """vLLM's configuration for given KV-cache groups."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        transfer_config: dict[str, Any] | None = None,
        num_blocks: int = 8,
        hash_block_size: int | None = None,
        **sizes: Any,
    ) -> None:
        has_states = any(isinstance(group, Mamba) for group in groups)
        # vLLM copies states of Mamba blocks with several hashes, whose bytes the simulation does
        # not have.
        may_be_finer = len(groups) > 1 and not has_states
        self._groups, self._num_blocks = groups, num_blocks
        self.kv_cache = self.kv_cache_of(range(NUM_LAYERS))
        with tempfile.TemporaryDirectory(prefix="kvview-") as folder:
            self.vllm = cpu_scheduler.make_vllm_config(
                Path(folder),
                transfer_config,
                block_size=math.gcd(*(group.block_size for group in groups)),
                num_groups=len(groups),
                num_blocks=num_blocks,
                has_states=has_states,
                prefix_match_unit=hash_block_size if may_be_finer else None,
                **sizes,
            )
        self.geometry = read_geometry(self.vllm, self.kv_cache)

    def kv_cache_of(self, stage: range) -> Any:
        """Make the ``KVCacheConfig`` of a rank that has some of the layers of each group."""
        return cpu_scheduler.make_kv_cache_config(self._groups, self._num_blocks, NUM_LAYERS, stage)


def _stages(ranks: Sequence[int]) -> list[range]:
    """Return each rank's layers of a group: all layers, or a part, as in pipeline parallelism."""
    if sum(ranks) != NUM_LAYERS:
        return [range(NUM_LAYERS)] * max(1, len(ranks))
    ends = [*accumulate(ranks)]
    return [range(end - number, end) for number, end in zip(ranks, ends, strict=True)]


@dataclass(eq=False)
class _Launched(LaunchedStep):
    forward: Forward = field(default_factory=Forward)


@reads_vllm
class KVViewHarness(VLLMHarness):
    """One scheduler, its workers' side, and the KV bytes.

    Args:
        scenario: Sizes, as fitted.
        connectors: The connectors; vLLM's ``MultiConnector`` runs several.
        stream: The compute stream; None unless compute lags.
        life: Identity and wire of an engine that hands KV to others.
    """

    def __init__(
        self,
        scenario: Scenario,
        connectors: Sequence[Connector],
        stream: StepStream | None = None,
        life: EngineLife | None = None,
    ) -> None:
        geometry, stages = scenario.geometry, _stages(scenario.ranks)
        configs = self._make_configs(scenario, connectors, life)
        parallel = configs.vllm.parallel_config
        parallel.world_size = len(stages)
        if len({*stages}) > 1:
            parallel.pipeline_parallel_size = len(stages)
        else:
            parallel.tensor_parallel_size = len(stages)
        caches = [configs.kv_cache_of(stage) for stage in stages]
        is_v2 = capabilities.runs_v2(scenario)
        scheduler = VLLMScheduler(configs.vllm, configs.kv_cache, geometry, is_v2=is_v2)
        super().__init__(scenario, scheduler, plays_handoffs=life is not None)
        with named("building the scheduler"), model_runner.chosen(is_v2=is_v2):
            self._workers = [
                cpu_scheduler.make_worker_connector(configs.vllm, cache, rank)
                for rank, cache in enumerate(caches)
            ]
        self._aggregator = model_runner.make_aggregator(scheduler.real, len(stages))
        self._published: PublishedEvents | None = None
        if can_name_groups():
            halves = [connector._scheduler_side.half for connector in self._connectors()]
            self._published = PublishedEvents(scheduler.real, halves, geometry)
        self._compute = Compute(
            geometry, scenario.num_gpu_blocks, PAGE_BYTES, num_layers=sum(map(len, stages))
        )
        with named("register_kv_caches"):
            self._runners = [*self._make_runners(configs.vllm, caches, stages, is_v2=is_v2)]
        self._stream = stream
        self._loads_between_steps = capabilities.can_load_between_steps()
        self._loading: set[str] = set()
        self._uncomputed: set[int] = set()  # blocks that the step will fill

    @staticmethod
    def _make_configs(
        scenario: Scenario, connectors: Sequence[Connector], life: EngineLife | None
    ) -> Configs:
        target = f"{__name__}:{HandedConnector.__name__}"
        children = [cpu_scheduler.connector_config(target, connector=c) for c in connectors]
        extra: dict[str, Any] = _BARE | {"pin_budget": scenario.pin_budget}
        if life is not None:
            from kvview_vllm.simulation.kvview.simulated_handoffs import (
                SimulatedHandoffs,  # imports vLLM
            )

            extra["handoffs"] = SimulatedHandoffs.of(life)
        for child in children:  # because the kit looks for faults itself
            child["kv_connector_extra_config"] |= extra
        return Configs(
            scenario.geometry.groups,
            children[0] if len(children) == 1 else cpu_scheduler.multi_config(*children),
            hash_block_size=scenario.geometry.hash_block_size,
            publishes_events=can_name_groups(),
            **cpu_scheduler.sizes_of(scenario),
        )

    def _make_runners(
        self, config: Any, caches: Sequence[Any], stages: Sequence[range], *, is_v2: bool
    ) -> Iterator[ModelRunner]:
        """Yield the model runner of each rank, and register the rank's tensors."""
        pages = iter(self._compute.pages)
        for stage, cache, worker in zip(stages, caches, self._workers, strict=True):
            own = [*islice(pages, len(stage))]
            tensors = {
                name: tensor
                for group in cache.kv_cache_groups
                for name, tensor in zip(group.layer_names, own, strict=True)
            }
            if is_v2:
                yield RunnerV2(config, worker, tensors)
            else:
                worker.register_kv_caches(tensors)
                yield RunnerV1(config, worker)

    def shutdown(self) -> Mapping[int, int]:
        """Stop both sides; return the references that neither requests nor the scenario own."""
        while self._launched:
            self._run(self._launched.popleft())
        with named("shutdown"):
            self.scheduler.real.shutdown()
            for worker in self._workers:
                worker.shutdown()
        return self.scheduler.foreign_refs(self.engine_refs())

    # --- queries ---

    @property
    def mismatch(self) -> str:
        """Describe the latest block with wrong bytes: the first difference and the KV's key."""
        return self._compute.kv_bytes.mismatch

    @property
    def wrong_block(self) -> tuple[int, OffloadKey] | None:
        """The block that ``mismatch`` describes, and its key; None if it is not known."""
        return self._compute.kv_bytes.wrong_block

    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        """Return the key whose KV a load must write into each block of a request."""
        scheduler = self.scheduler
        request = scheduler.real.requests.get(request_id)
        if request is None:
            return {}
        is_running = scheduler.status(request) == "running"
        if is_running is self._loads_between_steps:  # an aborted request may still load
            return {}
        groups = scheduler.geometry.groups
        num_hashed = len(request.block_hashes) * scheduler.geometry.hash_block_size
        return {
            block_id: self._compute.key(scheduler.planned[request_id], index, number)
            for index, table in enumerate(scheduler.table(request_id))
            for number, block_id in enumerate(table)
            if block_id != NULL_BLOCK_ID and (number + 1) * groups[index].block_size <= num_hashed
        }

    @override
    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """Return the keys that each block holds once every launched step has run.

        A computed block may be missing from vLLM's cache, because vLLM only caches whole scheduler
        blocks. vLLM caches a block when it schedules the step, but the bytes do not exist yet when
        the transfers of the step start.
        """
        computed = self._compute.computed
        return [
            ()
            if block_id in self._uncomputed
            else tuple(dict.fromkeys([*cached, *filter(None, [computed.get(block_id)])]))
            for block_id, cached in zip(block_ids, super().block_keys(block_ids), strict=True)
        ]

    def free_block_ids(self) -> Sequence[int]:
        """Return the free queue, next victim first."""
        queue = self.scheduler.pool.free_block_queue
        return [block.block_id for block in queue.get_all_free_blocks()]

    @override
    def held_blocks(self) -> Mapping[int, int]:
        """Return the references of all views."""
        held: Counter[int] = Counter()
        for connector in self._connectors():
            held.update(connector.block_pool_view.held_blocks())
        return held

    def num_wrong_blocks(self) -> int:
        """Count the cached and squeezed blocks whose bytes their owner has not written."""
        blocks = range(1, self.num_blocks)
        keys = zip(blocks, self.scheduler.cached_keys(blocks), strict=True)
        cached = {block: of_block[0] for block, of_block in keys if of_block}
        kv_bytes = self._compute.kv_bytes
        num_wrong = kv_bytes.count_mismatches([*cached], [*cached.values()])
        return num_wrong + kv_bytes.count_not_poisoned(self.scheduler.squeezed)

    def _connectors(self) -> Iterator[Any]:
        """Return the ``KVViewConnector`` of each child."""
        for connector in walk_connectors(self.scheduler.real.connector):
            if not child_connectors(connector):
                yield connector

    # --- one step ---

    @override
    def _overwrite(self, block_ids: Sequence[int]) -> None:
        self._compute.overwrite(block_ids)

    @override
    def _salt_of(self, prompt: Sequence[int]) -> str | None:
        return None if self._published is None else salt_of(prompt)

    @override
    def _has_pending_work(self) -> bool:
        return any(connector.has_pending_push_work() for connector in self._connectors())

    @override
    def _launch_step(self, output: Any, chunks: Mapping[str, Chunk]) -> _Launched:
        """Launch a step; the worker's report becomes a part of the step's output."""
        forward = self._compute.plan(chunks, self.scheduler.tables(output))
        self._uncomputed = forward.written
        self._poison()
        with ExitStack() as calls:
            # 0.11.0 drops the report of a step without tokens until the next request computes.
            has_forward = bool(chunks) or not idle_steps_report()
            if has_forward:
                with named("the worker's side"):
                    for runner in self._runners:
                        calls.enter_context(runner.forward(output))
            self._compute.launch(forward)
            if self._stream is None:
                self._compute.run(forward)
            else:
                self._stream.launch()
            with named("the worker's side"):
                calls.close()
                ends = [one.end_step if has_forward else one.no_forward for one in self._runners]
                transfers = [end(output) for end in ends]
        self._uncomputed = set()
        sampled = {request_id: chunk.sampled for request_id, chunk in chunks.items()}
        answers = [samples.make_model_output(output, sampled, one) for one in transfers]
        answer, *others = answers
        if others:
            with named("merging the outputs of the ranks"):
                answer = self._aggregator.aggregate(answers)
        invalid = model_runner.invalid_blocks(answer.kv_connector_output)
        if self._stream is None:
            self._stats.mismatches += forward.mismatches(invalid)
        return _Launched(output, chunks, answer, invalid, forward)

    @override
    def _run(self, step: LaunchedStep) -> None:
        assert isinstance(step, _Launched), "this engine launches no other steps"
        if self._stream is not None:
            self._compute.run(step.forward)
            self._stream.take()
            self._stats.mismatches += step.forward.mismatches(step.invalid)

    @override
    def _on_outputs(self, outputs: Mapping[int, Any]) -> None:
        if self._published is not None:
            self._published.check()
        super()._on_outputs(outputs)

    @override
    def _sleep(self) -> None:
        with named("unregister_kv_caches"):
            for worker in self._workers * 2:  # vLLM may discard the KV cache while it sleeps
                worker.unregister_kv_caches()
        self._compute.overwrite(range(1, self.num_blocks))
        with named("restore_kv_caches"):
            for worker in self._workers:
                worker.restore_kv_caches()

    def _poison(self) -> None:
        """Overwrite blocks that were allocated for a load, which must then write every byte."""
        loading = {name for name, status in self.unfinished().items() if status == "loading"}
        for request_id in loading - self._loading:
            for table in self.scheduler.table(request_id):
                keys = zip(table, self.scheduler.cached_keys(table), strict=True)
                self._compute.overwrite(block for block, of_block in keys if block and not of_block)
        self._loading = loading

    @override
    def _take_load(self, request_id: str) -> tuple[Collection[int], Callable[[], int]]:
        loaded = self.expected_keys(request_id)
        count = self._compute.kv_bytes.count_mismatches
        return loaded, lambda: count([*loaded], [*loaded.values()])


if TYPE_CHECKING:
    _: type[PDHarness] = KVViewHarness
