"""Wrong connectors, continued: order, pages, failures, reports, processes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from examples.host_cache import HostCacheScheduler, HostCacheWorker
from kvview import (
    BlockIds,
    ConnectorConfig,
    CPULoadStoreSpec,
    FinishReason,
    OffloadKey,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferJob,
    TransferResult,
    WorkerConnector,
)
from tests.vllm.wrong_connectors import Flaky, FlakyWorker, Late, LateWorker, jobs_of

# --- order ---


class EarlyWorker(LateWorker):
    """Reports some jobs when their plan starts, and runs them later."""

    def is_early(self, plan: StepPlan) -> bool:
        raise NotImplementedError

    def start_plan(self, plan: StepPlan) -> None:
        super().start_plan(plan)
        parts = (StepPlan(loads=plan.loads), StepPlan(stores=plan.stores))
        for job in (job for part in parts if self.is_early(part) for job in jobs_of(part)):
            self.finished.append(TransferResult(job.job_id, success=True))

    def copy_now(self, plan: StepPlan) -> None:
        before = len(self.finished)
        super().copy_now(plan)
        if self.is_early(plan):
            del self.finished[before:]


class ReportsLoadsEarly(Late):
    """Reports a load when its plan starts, and runs it later."""

    class worker(EarlyWorker):
        def is_early(self, plan: StepPlan) -> bool:
            return bool(plan.loads)


class ReportsStoresEarly(Late):
    """Reports a store when its plan starts, and runs it later."""

    class worker(EarlyWorker):
        def is_early(self, plan: StepPlan) -> bool:
            return bool(plan.stores)


class LoadableAtPlan(Late):
    """Finds a block as soon as its store is planned, and runs loads before stores.

    A block that is being stored is held, and therefore hit on the GPU.
    """

    class scheduler(HostCacheScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            for job in self.planned_stores:
                self.slots.update(self.stores[job.job_id][0])
            return super().plan_step(step)

    class worker(LateWorker):
        def start_plan(self, plan: StepPlan) -> None:
            super().start_plan(plan)
            self.copy_if(lambda due, plan: bool(plan.loads))


class UnorderedThread(Late):
    """Copies in a thread that does not wait for the computation of the step.

    On the CPU, and from 0.29 on, a plan starts after its step was computed.
    """

    class worker(LateWorker):
        def __init__(self, cpu_blocks: int) -> None:
            super().__init__(cpu_blocks)
            self.threads: list[threading.Thread] = []

        def start_plan(self, plan: StepPlan) -> None:
            thread = threading.Thread(target=self.copy_now, args=(plan,))
            thread.start()
            self.threads.append(thread)

        def get_finished(self) -> list[TransferResult]:
            if any(thread.is_alive() for thread in self.threads):
                return []
            return super().get_finished()

        def wait(self, job_ids: Sequence[int]) -> None:
            while self.threads:
                self.threads.pop().join()


class ThreadLosesReports(Late):
    """Adds reports from a thread to a list that another thread takes."""

    class worker(HostCacheWorker):
        def start_plan(self, plan: StepPlan) -> None:
            self.thread = threading.Thread(target=super().start_plan, args=(plan,))
            self.thread.start()

        def wait(self, job_ids: Sequence[int]) -> None:
            self.thread.join()


# --- the connector's own pages ---


class ReusesPagesBeingLoaded(Late):
    """Reuses a host page while a load reads it, and runs stores before loads."""

    class scheduler(HostCacheScheduler):
        def take_slot(self) -> int | None:
            if self.free_slots:
                return self.free_slots.pop()
            return self.slots.popitem()[1] if self.slots else None

    class worker(LateWorker):
        def start_plan(self, plan: StepPlan) -> None:
            super().start_plan(plan)
            self.copy_if(lambda due, plan: bool(plan.stores))


class KeepsEvictedKeys(Late):
    """Reuses the page of a key, and still finds the old key."""

    class scheduler(HostCacheScheduler):
        def take_slot(self) -> int | None:
            kept = dict(self.slots)
            slot = super().take_slot()
            self.slots.update(kept)
            return slot


class OnePageTwice(Late):
    """Stores every second block of a job into the page of the block before."""

    class scheduler(HostCacheScheduler):
        last: int | None = None

        def take_slot(self) -> int | None:
            again, self.last = self.last, None
            if again is None:
                self.last = again = super().take_slot()
            return again


class ResetKeepsKeys(Late):
    """Frees the pages at a reset, and still finds their keys."""

    class scheduler(HostCacheScheduler):
        def reset_cache(self) -> bool:
            kept = dict(self.slots)
            done = super().reset_cache()
            self.slots.update(kept)
            return done


class PromisesOverAReset(Late):
    """Remembers the promise for a request, even over a reset."""

    class scheduler(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.answers: dict[tuple[str, int, int], int] = {}

        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
            asked = (request.request_id, request.num_tokens, num_computed_tokens)
            if not self.answers.get(asked):
                self.answers[asked] = super().match_prefix(request, num_computed_tokens)
            return self.answers[asked]


class LosesPagesOfFailedStores(Flaky):
    """Never reuses the pages of a failed store."""

    class scheduler(HostCacheScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            kept = list(self.free_slots)
            super().on_transfers_finished(results)
            self.free_slots = kept


class PinsPagesOfAborted(Late):
    """Protects the pages that an aborted request was loading forever.

    There were enough other pages.
    """

    class scheduler(HostCacheScheduler):
        def on_request_finished(self, request: RequestInfo, tables: BlockIds, reason: Any) -> None:
            super().on_request_finished(request, tables, reason)
            if reason is FinishReason.ABORTED:
                for keys in self.loads.values():
                    keys.clear()


# --- failures ---


class ReportsFailuresAsSuccess(Flaky):
    """Reports a failed copy as a success."""

    class worker(FlakyWorker):
        def failed(self, job_id: int) -> TransferResult:
            return TransferResult(job_id, success=True)


class KeepsFailedStores(Flaky):
    """Treats a failed store as a success."""

    class scheduler(HostCacheScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            super().on_transfers_finished([replace(result, success=True) for result in results])


class RaisesWhenACopyFails(Flaky):
    """Raises the error of a failed copy out of its worker half."""

    class worker(FlakyWorker):
        def failed(self, job_id: int) -> TransferResult:
            raise OSError(f"the copy of job {job_id} failed")


class ForgetsFailedCopies(Flaky):
    """Does not report a failed copy."""

    class worker(FlakyWorker):
        def get_finished(self) -> list[TransferResult]:
            return [result for result in super().get_finished() if result.success]


# --- requests, jobs, reports ---


class JobIdsByRequest(Late):
    """Numbers the jobs of each request from 0."""

    class scheduler(HostCacheScheduler):
        def on_blocks_allocated(
            self, request: RequestInfo, tables: BlockIds, *numbers: int
        ) -> None:
            self.job_ids = count()
            super().on_blocks_allocated(request, tables, *numbers)

        def store(self, request: RequestInfo, tables: BlockIds) -> None:
            self.job_ids = count(1)
            super().store(request, tables)


class HoldsByRequest(Late):
    """Keeps its holds by request id, so that a reused id replaces the first."""

    class scheduler(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.held: dict[str, list[int]] = {}
            self.request_of: dict[int, str] = {}

        def store(self, request: RequestInfo, tables: BlockIds) -> None:
            before = len(self.planned_stores)
            super().store(request, tables)
            for job in self.planned_stores[before:]:
                slots, gpu_blocks = self.stores[job.job_id]
                self.held[request.request_id] = gpu_blocks
                self.stores[job.job_id] = slots, []
                self.request_of[job.job_id] = request.request_id

        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            super().on_transfers_finished(results)
            for result in results:
                if result.job_id in self.request_of:
                    self.release(self.held.pop(self.request_of.pop(result.job_id), []))


class DropsJobsOfAborted(Late):
    """Forgets the load of an aborted request, and raises at its report."""

    class scheduler(HostCacheScheduler):
        def on_request_finished(self, request: RequestInfo, tables: BlockIds, reason: Any) -> None:
            super().on_request_finished(request, tables, reason)
            if reason is FinishReason.ABORTED:
                self.loading.clear()
                self.loads.clear()


class RaisesForUnknownRequests(Late):
    """Raises when a request ends that never had blocks."""

    class scheduler(HostCacheScheduler):
        def on_request_finished(self, request: RequestInfo, tables: BlockIds, reason: Any) -> None:
            self.num_reused[request.request_id] += 0
            super().on_request_finished(request, tables, reason)


class NeverAnswers(Late):
    """Waits forever for a prefix that it once had and has evicted."""

    class scheduler(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.seen: set[OffloadKey] = set()

        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> Any:
            self.seen.update(self.slots)
            answer = super().match_prefix(request, num_computed_tokens)
            size = self.geometry.groups[0].block_size
            if not answer and num_computed_tokens < size < request.num_tokens:
                first = self.key(request, 0, 0)
                if first in self.seen and first not in self.slots:
                    return None
            return answer


class NothingPending(Late):
    """Reports no pending work while copies are in flight.

    The adapter keeps the engine stepping while jobs are in flight.
    """

    class scheduler(HostCacheScheduler):
        def has_pending_work(self) -> bool:
            return False


class LosesAReport(Late):
    """Loses every fifth report."""

    class worker(LateWorker):
        numbers: Iterator[int]

        def __init__(self, cpu_blocks: int) -> None:
            super().__init__(cpu_blocks)
            self.numbers = count(1)

        def get_finished(self) -> list[TransferResult]:
            return [result for result in super().get_finished() if next(self.numbers) % 5]


class ReportsTwice(Late):
    """Reports every job a second time in the next step.

    The adapter drops the second report and warns.
    """

    class worker(LateWorker):
        def __init__(self, cpu_blocks: int) -> None:
            super().__init__(cpu_blocks)
            self.last: list[TransferResult] = []

        def get_finished(self) -> list[TransferResult]:
            again, self.last = self.last, super().get_finished()
            return [*again, *self.last]


class PlansTwice(Late):
    """Plans the loads of a step again in the next step."""

    class scheduler(HostCacheScheduler):
        last: Sequence[TransferJob] = ()

        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            again, self.last = self.last, plan.loads
            return replace(plan, loads=[*again, *plan.loads])


class DropsLoadsWithoutCompute(Late):
    """Plans loads only in steps that schedule a request, and forgets the other loads."""

    class scheduler(HostCacheScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            return plan if step.scheduled else replace(plan, loads=[])


# --- processes ---

_PLANS: list[StepPlan] = []


class SharedGlobal(Late):
    """Passes plans to the worker half in a global of the module."""

    needs = "processes"

    class scheduler(HostCacheScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            _PLANS.append(plan)
            return plan

    class worker(HostCacheWorker):
        def get_finished(self) -> list[TransferResult]:
            while _PLANS:
                super().start_plan(_PLANS.pop(0))
            return super().get_finished()

        def start_plan(self, plan: StepPlan) -> None:
            pass


class SharedSelf(Late):
    """Shares a table of the connector between its halves."""

    def make_scheduler(self) -> SchedulerConnector:
        half = super().make_scheduler()
        assert isinstance(half, HostCacheScheduler)
        self.pages = half.slots
        return half

    def make_worker(self) -> WorkerConnector:
        worker = SharedSelf.Counting(self.cpu_blocks)
        worker.owner = self
        return worker

    class Counting(LateWorker):
        owner: SharedSelf

        def copy_now(self, plan: StepPlan) -> None:
            known = Counter(self.owner.pages.values())
            for job in plan.loads:
                assert isinstance(job.src, CPULoadStoreSpec)
                assert all(known[page] for page in job.src.block_ids), "an unknown page"
            super().copy_now(plan)
