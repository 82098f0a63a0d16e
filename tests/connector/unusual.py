"""Right connectors with unusual behaviour, which break no law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from typing_extensions import override

from examples.host_cache import HostCacheConnector, HostCacheScheduler, HostCacheWorker
from kvview import (
    Connector,
    ConnectorConfig,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferJob,
    TransferResult,
    WorkerConnector,
)
from kvview_reference.store_connector import StoreConnector
from tests.mutants import connector as connectors
from tests.mutants.connector import load_variants


class Host(HostCacheConnector):
    """The example, with places for other halves."""

    scheduler: ClassVar[type[HostCacheScheduler]] = HostCacheScheduler
    worker: ClassVar[type[Any]] = HostCacheWorker

    def make_scheduler(self) -> SchedulerConnector:
        return self.scheduler(self.config, self.cpu_blocks)

    def make_worker(self) -> WorkerConnector:
        worker: WorkerConnector = self.worker(self.cpu_blocks)
        return worker


class StoresTheThirdTime(StoreConnector):
    """Stores a block when it was computed three times."""

    defaults: ClassVar[Mapping[str, Any]] = {"store_threshold": 3}


class OneJobPerBlock(Host):
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


class OwnMedium(Host):
    """Stores by name, on a medium of its own."""

    class scheduler(HostCacheScheduler):
        @override
        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            loads = [replace(job, src=shelf(job.src)) for job in plan.loads]
            return StepPlan(loads, [replace(job, dst=shelf(job.dst)) for job in plan.stores])

    class worker(HostCacheWorker):
        @override
        def start_plan(self, plan: StepPlan) -> None:
            loads = [replace(job, src=pages_of(job.src)) for job in plan.loads]
            super().start_plan(
                StepPlan(loads, [replace(job, dst=pages_of(job.dst)) for job in plan.stores])
            )


def pages_of(spec: LoadStoreSpec) -> CPULoadStoreSpec:
    """The host pages of names."""
    assert isinstance(spec, ShelfSpec)
    return CPULoadStoreSpec([int(name.removeprefix("page ")) for name in spec.names])


def shelf(spec: LoadStoreSpec) -> ShelfSpec:
    """The names of host pages."""
    assert isinstance(spec, CPULoadStoreSpec)
    return ShelfSpec(tuple(f"page {page}" for page in spec.block_ids))


UNUSUAL: list[type[Connector]] = [
    *(variant.load() for variant in load_variants(connectors.UNUSUAL)),
    *(StoresTheThirdTime, OneJobPerBlock, OwnMedium),
]
