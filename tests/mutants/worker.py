"""Wrong worker halves: threads, groups, processes, as a novice writes them.

All live over one right one below, :class:`Threaded`, whose pages move on a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any

import torch
from typing_extensions import override

from examples.host_cache import HostCacheScheduler
from kvview import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    StepInfo,
    StepPlan,
    TransferJob,
    TransferResult,
    WorkerConnector,
)
from kvview.testing import Mutant

from .connector import breaker
from .example import Host

MUTANTS: list[Mutant] = []
breaks = breaker(MUTANTS)


class ThreadedWorker(WorkerConnector):
    """The right one: jobs one after the other, on a thread that waits for compute."""

    num_threads = 1

    def __init__(self, cpu_blocks: int) -> None:
        self.cpu_blocks = cpu_blocks
        self.pool = ThreadPoolExecutor(self.num_threads)
        self.futures: dict[int, Future[None]] = {}
        self.results: list[TransferResult] = []

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[torch.Tensor]) -> None:
        self.gpu = [cache.tensor for cache in kv_caches.tensors]
        self.refs = kv_caches.group_data_refs
        self.stream = kv_caches.compute_stream
        self.host = [
            torch.zeros((self.cpu_blocks, cache.page_size_bytes), dtype=torch.int8)
            for cache in kv_caches.tensors
        ]

    @override
    def start_plan(self, plan: StepPlan) -> None:
        mark = self.stream.record_event() if self.stream else None
        for job in (*plan.loads, *plan.stores):
            self.futures[job.job_id] = self.pool.submit(self.run, job, mark)

    def run(self, job: TransferJob, mark: Any) -> None:
        try:
            if mark is not None:
                mark.synchronize()
            self.copy(job)
        except Exception as error:
            self.results.append(TransferResult(job.job_id, False, error=str(error)))
        else:
            self.results.append(TransferResult(job.job_id, True))

    def copy(self, job: TransferJob) -> None:
        is_load = isinstance(job.dst, GPULoadStoreSpec)
        gpu, host = (job.dst, job.src) if is_load else (job.src, job.dst)
        assert isinstance(gpu, GPULoadStoreSpec)
        assert isinstance(host, CPULoadStoreSpec)
        ends = [0]
        for size in gpu.group_sizes:
            ends.append(ends[-1] + size)
        for group, (start, end) in enumerate(pairwise(ends)):
            blocks, pages = list(gpu.block_ids[start:end]), list(host.block_ids[start:end])
            for ref in self.group_refs(group):
                size, gpu_pages = ref.page_size_bytes, self.gpu[ref.tensor_idx]
                if is_load:
                    gpu_pages[blocks, :size] = self.host[ref.tensor_idx][pages, :size]
                else:
                    self.host[ref.tensor_idx][pages, :size] = gpu_pages[blocks, :size]

    def group_refs(self, group: int) -> Sequence[CanonicalKVCacheRef]:
        return self.refs[group]

    @override
    def get_finished(self) -> list[TransferResult]:
        finished = []
        while self.results:
            finished.append(self.results.pop(0))
            self.futures.pop(finished[-1].job_id, None)
        return finished

    @override
    def wait(self, job_ids: Sequence[int]) -> None:
        wait([self.futures[job_id] for job_id in job_ids if job_id in self.futures])

    @override
    def shutdown(self) -> None:
        self.pool.shutdown()


class Threaded(Host):
    """The right one: the example, with a worker half that has a thread."""

    worker = ThreadedWorker


# --- threads ---


class FourThreads(ThreadedWorker):
    num_threads = 4


class WaitsForEnds(ThreadedWorker):
    """Waits for events, which whoever overrides ``run`` sets."""

    def __init__(self, cpu_blocks: int) -> None:
        super().__init__(cpu_blocks)
        self.has_ended: dict[int, threading.Event] = {}

    @override
    def start_plan(self, plan: StepPlan) -> None:
        for job in (*plan.loads, *plan.stores):
            self.has_ended[job.job_id] = threading.Event()
        super().start_plan(plan)

    @override
    def wait(self, job_ids: Sequence[int]) -> None:
        for job_id in job_ids:
            self.has_ended[job_id].wait()


class InAnyOrder(Threaded):
    """Right all the same: the example never has two jobs on one page in flight."""

    worker = FourThreads


@breaks("XFER-4", "reports a job as done when it is queued")
class DoneWhenQueued(Threaded):
    class worker(ThreadedWorker):
        @override
        def start_plan(self, plan: StepPlan) -> None:
            super().start_plan(plan)
            self.results += [TransferResult(j.job_id, True) for j in (*plan.loads, *plan.stores)]

        @override
        def run(self, job: TransferJob, mark: Any) -> None:
            self.copy(job)


@breaks("XFER-6", "does not order its copies after the compute stream")
class IgnoresTheStream(Threaded):
    class worker(ThreadedWorker):
        @override
        def register_kv_caches(self, kv_caches: CanonicalKVCaches[torch.Tensor]) -> None:
            super().register_kv_caches(kv_caches)
            self.stream = None


@breaks("XFER-4", "continues after a block that could not be copied")
class ForgetsAFailedCopy(Threaded):
    class worker(ThreadedWorker):
        @override
        def run(self, job: TransferJob, mark: Any) -> None:
            super().run(job, mark)
            self.results[-1] = TransferResult(job.job_id, True)


@breaks("XFER-5", "start_plan waits for the jobs before")
class WaitsInStartPlan(Threaded):
    class worker(ThreadedWorker):
        @override
        def start_plan(self, plan: StepPlan) -> None:
            wait(self.futures.values())
            super().start_plan(plan)


@breaks("CONN-3", "ends a job before its report is there")
class EndsBeforeItsReport(Threaded):
    class worker(WaitsForEnds):
        @override
        def run(self, job: TransferJob, mark: Any) -> None:
            if mark is not None:
                mark.synchronize()
            error = None
            try:
                self.copy(job)
            except Exception as failure:
                error = str(failure)
            self.has_ended[job.job_id].set()
            self.results.append(TransferResult(job.job_id, error is None, error=error))


@breaks("CONN-4", "shutdown leaves copies running")
class CopiesAfterShutdown(Threaded):
    class worker(ThreadedWorker):
        @override
        def shutdown(self) -> None:
            self.pool.shutdown(wait=False)


# --- groups and sizes ---


@breaks("XFER-1", "one list of references for all groups")
class OneListOfReferences(Threaded):
    class worker(ThreadedWorker):
        @override
        def group_refs(self, group: int) -> Sequence[CanonicalKVCacheRef]:
            return self.refs[0]


# --- shared by the halves ---

_JOBS: dict[int, TransferJob] = {}


@breaks("CONN-3", "the jobs stay in a module, and only their numbers are sent")
class ModuleGlobal(Threaded):
    class scheduler(HostCacheScheduler):
        @override
        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            _JOBS.update((job.job_id, job) for job in (*plan.loads, *plan.stores))
            return plan

    class worker(ThreadedWorker):
        @override
        def run(self, job: TransferJob, mark: Any) -> None:
            super().run(_JOBS.pop(job.job_id), mark)
