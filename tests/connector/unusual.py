"""Right connectors with unusual behaviour, which break no law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from typing_extensions import override

from examples.host_cache import HostCacheScheduler, HostCacheWorker
from kvview import (
    BlockHash,
    BlockIds,
    CanonicalKVCaches,
    ComputeEvent,
    Connector,
    ConnectorConfig,
    CPULoadStoreSpec,
    FinishReason,
    GPULoadStoreSpec,
    Lease,
    LoadStoreSpec,
    RequestInfo,
    StepInfo,
    StepPlan,
    SupportsLeases,
    SupportsPinBudget,
    TransferJob,
    TransferResult,
    WorkerConnector,
)
from kvview_reference.connector import OffloadConnector
from kvview_reference.connector.offload import OffloadOptions
from tests.mutants.example import Host


class Unusual(Host):
    """A right connector over the example."""


class HoldsForSixtySteps(Unusual):
    """Blocks of two stores stay held for sixty steps after their end."""

    class scheduler(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.num_steps = 0
            self.kept: list[tuple[int, list[int]]] = []

        @override
        def release(self, gpu_blocks: list[int]) -> None:
            if len(self.kept) < 2:
                self.kept.append((self.num_steps, gpu_blocks))
            else:
                super().release(gpu_blocks)

        def release_since(self, step: int) -> None:
            while self.kept and self.kept[0][0] <= step:
                super().release(self.kept.pop(0)[1])

        @override
        def plan_step(self, step: StepInfo) -> StepPlan:
            self.num_steps += 1
            self.release_since(self.num_steps - 60)
            return super().plan_step(step)

        @override
        def has_pending_work(self) -> bool:
            return super().has_pending_work() or bool(self.kept)

        @override
        def reset_cache(self) -> bool:
            self.release_since(self.num_steps)
            return super().reset_cache()

        @override
        def shutdown(self) -> None:
            super().shutdown()
            self.release_since(self.num_steps)


class LoadsOnlyMuch(Unusual):
    """Loads only five scheduler blocks or more."""

    class scheduler(HostCacheScheduler):
        @override
        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
            promised = super().match_prefix(request, num_computed_tokens)
            return promised if promised >= 5 * self.geometry.scheduler_block_size else 0


class LoadsTheSecondTime(Unusual):
    """Computes a prompt the first time, and loads it the second time."""

    class scheduler(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.asked: Counter[BlockHash] = Counter()

        @override
        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
            promised = super().match_prefix(request, num_computed_tokens)
            if promised:
                last = request.block_hashes[promised // self.geometry.hash_block_size - 1]
                self.asked[last] += 1
                if self.asked[last] == 1:
                    return 0
            return promised


class AnswersLater(Unusual):
    """Returns None once for each request, so the engine calls again in a later step."""

    class scheduler(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.asked: set[str] = set()

        @override
        def match_prefix(  # type: ignore[override]
            self, request: RequestInfo, num_computed_tokens: int
        ) -> int | None:
            if request.request_id not in self.asked:
                self.asked.add(request.request_id)
                return None
            self.asked.discard(request.request_id)
            return super().match_prefix(request, num_computed_tokens)

        @override
        def on_request_finished(
            self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
        ) -> None:
            self.asked.discard(request.request_id)
            super().on_request_finished(request, block_ids, reason)


class PromisesLess(Unusual):
    """Promises one scheduler block, although it has more."""

    class scheduler(HostCacheScheduler):
        @override
        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
            geometry = self.geometry
            num_tokens = num_computed_tokens + geometry.scheduler_block_size
            return super().match_prefix(
                replace(request, num_tokens=min(request.num_tokens, num_tokens + 1)),
                num_computed_tokens,
            )


class StoresTheThirdTime(OffloadConnector):
    """Stores a block when it was computed three times."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        options: OffloadOptions = self.options
        self.options = options.model_copy(update={"store_threshold": 3})


class DropsAll(Unusual):
    """Drops its tier when the engine preempts."""

    class scheduler(HostCacheScheduler):
        @override
        def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
            self.num_reused.pop(request.request_id, None)
            for key in [key for key in self.slots if key not in self.loading]:
                self.free_slots.append(self.slots.pop(key))


class OneJobPerBlock(Unusual):
    """Plans one job per block, and joins their results."""

    class scheduler(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.part_of: dict[int, int] = {}
            self.results: dict[int, list[bool]] = {}

        @override
        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            return StepPlan(self.split(plan.loads), self.split(plan.stores))

        def split(self, jobs: Sequence[TransferJob]) -> list[TransferJob]:
            parts = []
            for job in jobs:
                gpu = job.dst if isinstance(job.dst, GPULoadStoreSpec) else job.src
                host = job.src if gpu is job.dst else job.dst
                assert isinstance(gpu, GPULoadStoreSpec)
                assert isinstance(host, CPULoadStoreSpec)
                groups = [g for g, size in enumerate(gpu.group_sizes) for _ in range(size)]
                for block, page, group in zip(gpu.block_ids, host.block_ids, groups, strict=True):
                    sizes = [int(g == group) for g in range(len(gpu.group_sizes))]
                    one = GPULoadStoreSpec([block], sizes, [0] * len(sizes))
                    there = CPULoadStoreSpec([page])
                    part = TransferJob(next(self.job_ids), one, there, job.request_id)
                    if gpu is job.dst:
                        part = replace(part, src=there, dst=one)
                    self.part_of[part.job_id] = job.job_id
                    parts.append(part)
            return parts

        @override
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            for result in results:
                whole = self.part_of.pop(result.job_id)
                self.results.setdefault(whole, []).append(result.success)
                if whole not in self.part_of.values():
                    success = all(self.results.pop(whole))
                    super().on_transfers_finished([TransferResult(whole, success)])


@dataclass(frozen=True)
class ShelfSpec:
    """Names on a shelf, without numbered pages."""

    medium: ClassVar[str] = "SHELF"
    names: tuple[str, ...]


class OwnMedium(Unusual):
    """Stores by name, on a medium of its own."""

    class scheduler(HostCacheScheduler):
        @override
        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            loads = [replace(job, src=shelf(job.src)) for job in plan.loads]
            return StepPlan(loads, [replace(job, dst=shelf(job.dst)) for job in plan.stores])

    class worker(WorkerConnector):
        def __init__(self, cpu_blocks: int) -> None:
            self.shelf: dict[str, list[torch.Tensor]] = {}
            self.started: list[tuple[ComputeEvent | None, StepPlan]] = []
            self.finished: list[TransferResult] = []

        @override
        def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
            self.compute = kv_caches.compute_stream
            self.gpu: list[torch.Tensor] = [tensor.tensor for tensor in kv_caches.tensors]

        @override
        def start_plan(self, plan: StepPlan) -> None:
            self.started.append((self.compute.record_event() if self.compute else None, plan))
            self.copy_started()

        def copy_started(self) -> None:
            while self.started and ((mark := self.started[0][0]) is None or mark.query()):
                self.copy(self.started.pop(0)[1])

        def copy(self, plan: StepPlan) -> None:
            for job in plan.loads:
                source: Any = job.src
                target: Any = job.dst
                for name, block in zip(source.names, target.block_ids, strict=True):
                    for tensor, row in zip(self.gpu, self.shelf[name], strict=True):
                        tensor[block] = row
                self.finished.append(TransferResult(job.job_id, True))
            for job in plan.stores:
                source, target = job.src, job.dst
                for name, block in zip(target.names, source.block_ids, strict=True):
                    self.shelf[name] = [tensor[block].clone() for tensor in self.gpu]
                self.finished.append(TransferResult(job.job_id, True))

        @override
        def get_finished(self) -> list[TransferResult]:
            self.copy_started()
            finished, self.finished = self.finished, []
            return finished


def shelf(spec: LoadStoreSpec) -> ShelfSpec:
    """The names of host pages."""
    assert isinstance(spec, CPULoadStoreSpec)
    return ShelfSpec(tuple(f"page {page}" for page in spec.block_ids))


@dataclass(frozen=True)
class PlanWithNotes(StepPlan):
    """A plan with notes besides its jobs."""

    notes: tuple[str, ...] = ()


class OwnPlan(Unusual):
    """A plan of a class of its own, with more in it."""

    class scheduler(HostCacheScheduler):
        num_plans = 0

        @override
        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            self.num_plans += 1
            return PlanWithNotes(plan.loads, plan.stores, (f"plan {self.num_plans}",))

    class worker(HostCacheWorker):
        num_plans = 0

        @override
        def start_plan(self, plan: StepPlan) -> None:
            assert isinstance(plan, PlanWithNotes)
            self.num_plans += 1
            assert plan.notes == (f"plan {self.num_plans}",), "a plan did not arrive"
            super().start_plan(plan)


class LeasingScheduler(HostCacheScheduler):
    """Stores, and leases the first block of finished requests to a later reader."""

    ttl = 3.0

    def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
        super().__init__(config, cpu_blocks)
        self.leases: list[Lease] = []

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        super().on_request_finished(request, block_ids, reason)
        assert isinstance(self.view, SupportsLeases)
        if isinstance(self.view, SupportsPinBudget) and not self.view.num_pinnable_blocks():
            return
        self.leases = [lease for lease in self.leases if lease.is_active]
        for block in [block for table in block_ids for block in table if block][:1]:
            self.leases.append(self.view.lease([block], job=request.request_id, ttl=self.ttl))

    @override
    def shutdown(self) -> None:
        super().shutdown()
        for lease in self.leases:
            lease.release()


class Produces(Unusual):
    """Stores, holds blocks of finished requests for a later reader, and never loads."""

    class scheduler(LeasingScheduler):
        @override
        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
            return 0


class HoldsForLong(Unusual):
    """Keeps blocks of finished requests on the GPU for a minute."""

    class scheduler(LeasingScheduler):
        ttl = 60.0


class KeepsWhatMoved(Unusual):
    """Keeps the blocks of a failed store that were moved nevertheless."""

    class scheduler(HostCacheScheduler):
        @override
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            for result in results:
                if result.moved is not None:
                    slots, _ = self.stores[result.job_id]
                    for key, is_moved in zip(list(slots), result.moved, strict=True):
                        if is_moved:
                            self.slots[key] = slots.pop(key)
            super().on_transfers_finished(results)


UNUSUAL: list[type[Connector]] = [
    *(LoadsOnlyMuch, LoadsTheSecondTime, AnswersLater, PromisesLess, StoresTheThirdTime),
    *(DropsAll, OneJobPerBlock, OwnMedium, OwnPlan, Produces, HoldsForLong),
    HoldsForSixtySteps,
    KeepsWhatMoved,
]
