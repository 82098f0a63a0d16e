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
from tests.vllm.wrong_connectors import Flaky, FlakyWorker, Late, LateWorker, wrong

# --- order ---


@wrong
class ReportsLoadsEarly(Late):
    """Reports a load when it is told to run it, and runs it later."""

    class worker(LateWorker):
        def start_plan(self, plan: StepPlan) -> None:
            super().start_plan(plan)
            self.finished += [TransferResult(job.job_id, success=True) for job in plan.loads]

        def copy_now(self, plan: StepPlan) -> None:
            before = len(self.finished)
            super().copy_now(plan)
            if plan.loads:
                del self.finished[before:]


@wrong
class ReportsStoresEarly(Late):
    """Reports a store when it is told to run it, and runs it later."""

    class worker(LateWorker):
        def start_plan(self, plan: StepPlan) -> None:
            super().start_plan(plan)
            self.finished += [TransferResult(job.job_id, success=True) for job in plan.stores]

        def copy_now(self, plan: StepPlan) -> None:
            before = len(self.finished)
            super().copy_now(plan)
            if plan.stores:
                del self.finished[before:]


@wrong
class LoadableAtPlan(Late):
    """Takes a block for stored as soon as its store is planned; loads overtake stores.

    What is being stored is held, and so hit on the GPU.
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


@wrong
class UnorderedThread(Late):
    """Copies in a thread that does not wait for what is being computed.

    On the CPU, and from 0.29 on, a plan starts when its step is computed.
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


@wrong
class ThreadLosesReports(Late):
    """Its thread adds reports to a list that is being handed out."""

    class worker(HostCacheWorker):
        def start_plan(self, plan: StepPlan) -> None:
            self.thread = threading.Thread(target=super().start_plan, args=(plan,))
            self.thread.start()

        def wait(self, job_ids: Sequence[int]) -> None:
            self.thread.join()


# --- the connector's own pages ---


@wrong
class ReusesPagesBeingLoaded(Late):
    """Gives a host page to another key while a load reads it; stores do not wait for loads."""

    class scheduler(HostCacheScheduler):
        def take_slot(self) -> int | None:
            if self.free_slots:
                return self.free_slots.pop()
            return self.slots.popitem()[1] if self.slots else None

    class worker(LateWorker):
        def start_plan(self, plan: StepPlan) -> None:
            super().start_plan(plan)
            self.copy_if(lambda due, plan: bool(plan.stores))


@wrong
class KeepsEvictedKeys(Late):
    """Gives the page of a key to another, and still finds the old key."""

    class scheduler(HostCacheScheduler):
        def take_slot(self) -> int | None:
            kept = dict(self.slots)
            slot = super().take_slot()
            self.slots.update(kept)
            return slot


@wrong
class OnePageTwice(Late):
    """Stores every second block of a job into the page of the one before."""

    class scheduler(HostCacheScheduler):
        last: int | None = None

        def take_slot(self) -> int | None:
            again, self.last = self.last, None
            if again is None:
                self.last = again = super().take_slot()
            return again


@wrong
class ResetKeepsKeys(Late):
    """A reset gives the pages back and still finds their keys."""

    class scheduler(HostCacheScheduler):
        def reset_cache(self) -> bool:
            kept = dict(self.slots)
            done = super().reset_cache()
            self.slots.update(kept)
            return done


@wrong
class PromiseOverAReset(Late):
    """Remembers what it has answered a request, over a reset too."""

    class scheduler(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.answers: dict[tuple[str, int, int], int] = {}

        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
            asked = (request.request_id, request.num_tokens, num_computed_tokens)
            if not self.answers.get(asked):
                self.answers[asked] = super().match_prefix(request, num_computed_tokens)
            return self.answers[asked]


@wrong
class LosesPagesOfFailedStores(Flaky):
    """The pages of a failed store are never used again."""

    class scheduler(HostCacheScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            kept = list(self.free_slots)
            super().on_transfers_finished(results)
            self.free_slots = kept


@wrong
class PinsPagesOfAborted(Late):
    """Pages that an aborted request was loading are protected for ever.

    There were pages enough.
    """

    class scheduler(HostCacheScheduler):
        def on_request_finished(
            self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
        ) -> None:
            super().on_request_finished(request, block_ids, reason)
            if reason is FinishReason.ABORTED:
                for keys in self.loads.values():
                    keys.clear()


# --- failures ---


@wrong
class CallsFailedCopiesGood(Flaky):
    """Reports a copy that failed as done."""

    class worker(FlakyWorker):
        def failed(self, job_id: int) -> TransferResult:
            return TransferResult(job_id, success=True)


@wrong
class KeepsFailedStores(Flaky):
    """Takes a failed store for a good one."""

    class scheduler(HostCacheScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            super().on_transfers_finished([replace(result, success=True) for result in results])


@wrong
class RaisesWhenACopyFails(Flaky):
    """Lets the error of a copy out of its worker half."""

    class worker(FlakyWorker):
        def failed(self, job_id: int) -> TransferResult:
            raise OSError(f"the copy of job {job_id} failed")


@wrong
class ForgetsFailedCopies(Flaky):
    """Says nothing of a copy that failed."""

    class worker(FlakyWorker):
        def get_finished(self) -> list[TransferResult]:
            return [result for result in super().get_finished() if result.success]


# --- requests, jobs, reports ---


@wrong
class JobIdsByRequest(Late):
    """Counts the jobs of each request for itself, from 0."""

    class scheduler(HostCacheScheduler):
        def on_blocks_allocated(
            self,
            request: RequestInfo,
            block_ids: BlockIds,
            num_computed_tokens: int,
            num_external_tokens: int,
        ) -> None:
            self.job_ids = count()
            super().on_blocks_allocated(
                request, block_ids, num_computed_tokens, num_external_tokens
            )

        def store(self, request: RequestInfo, block_ids: BlockIds) -> None:
            self.job_ids = count(1)
            super().store(request, block_ids)


@wrong
class HoldsByRequest(Late):
    """Keeps what it holds by request id: a second life takes the place of the first."""

    class scheduler(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.held: dict[str, list[int]] = {}
            self.request_of: dict[int, str] = {}

        def store(self, request: RequestInfo, block_ids: BlockIds) -> None:
            before = len(self.planned_stores)
            super().store(request, block_ids)
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


@wrong
class DropsJobsOfAborted(Late):
    """Forgets the load of a request that is aborted, and raises at its report."""

    class scheduler(HostCacheScheduler):
        def on_request_finished(
            self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
        ) -> None:
            super().on_request_finished(request, block_ids, reason)
            if reason is FinishReason.ABORTED:
                self.loading.clear()
                self.loads.clear()


@wrong
class RaisesForTheUnknown(Late):
    """Raises when a request ends that never got blocks."""

    class scheduler(HostCacheScheduler):
        def on_request_finished(
            self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
        ) -> None:
            self.num_reused[request.request_id] += 0
            super().on_request_finished(request, block_ids, reason)


@wrong
class NeverAnswers(Late):
    """Waits for a prefix that once was there, and does not come back."""

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


@wrong
class NothingPending(Late):
    """Says that nothing is pending while copies are in flight.

    The adapter keeps the engine stepping while jobs are in flight.
    """

    class scheduler(HostCacheScheduler):
        def has_pending_work(self) -> bool:
            return False


@wrong
class LosesAReport(Late):
    """Loses every fifth report."""

    class worker(LateWorker):
        numbers: Iterator[int]

        def __init__(self, cpu_blocks: int) -> None:
            super().__init__(cpu_blocks)
            self.numbers = count(1)

        def get_finished(self) -> list[TransferResult]:
            return [result for result in super().get_finished() if next(self.numbers) % 5]


@wrong
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


@wrong
class PlansTwice(Late):
    """Plans the loads of a step in the next one once more."""

    class scheduler(HostCacheScheduler):
        last: Sequence[TransferJob] = ()

        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            again, self.last = self.last, plan.loads
            return replace(plan, loads=[*again, *plan.loads])


@wrong
class DropsLoadsWithoutCompute(Late):
    """Plans loads only in steps that compute something, and forgets the others."""

    class scheduler(HostCacheScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            plan = super().plan_step(step)
            return plan if step.scheduled else replace(plan, loads=[])


# --- processes ---

_PLANS: list[StepPlan] = []


@wrong
class SharedGlobal(Late):
    """The worker half takes its plans from a global of the module."""

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


@wrong
class SharedSelf(Late):
    """The halves share a table of the connector that built them."""

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
