"""The harness of a worker half that receives whole plans, whose copies wait at a gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from kvview import StepPlan, TransferResult, WorkerConnector
from kvview.testing.connector.half.gate import CopyFailed
from kvview.testing.connector.half.gated_worker import GatedWorker
from kvview.testing.connector.half.scheduler import Record
from kvview.testing.connector.half.worker import KVCaches, Shared, WorkerHarness
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.connector.judge.jobs import PlannedJob
from kvview.testing.connector.judge.tier_model import check_computed

_POLLS = 8  # maximum of calls of get_finished while jobs end


class WholePlans(WorkerHarness):
    """Starts each plan in its step, and delays the copies of the worker half's threads.

    1. The copies wait at a gate (:mod:`~kvview.testing.connector.half.gated_worker`) until a job is
       due.
    2. A simulated failure is a copy that raises an exception.
    """

    _compares_loads = True

    def __init__(self, half: WorkerConnector, shared: Shared, record: Record) -> None:
        super().__init__(half, shared, record)
        self._copies = GatedWorker(half)
        self._held: dict[int, PlannedJob] = {}  # jobs for which the gate has not been opened yet
        self._early: list[PlannedJob] = []  # jobs that ended while the gate was closed
        # Jobs to which a copy that was let in may belong.
        self._may_have_copied: set[PlannedJob] = set()
        self._abandoned: set[PlannedJob] = set()  # jobs without a result when start_plan raised

    @override
    def shutdown(self) -> None:
        if self._stream is not None:
            self._stream.finish()
        self._copies.shutdown(has_jobs=bool(self._jobs))

    @override
    def _call(self, name: str, *args: Any) -> Any:
        return self._copies.call(name, *args)

    @override
    def _shown(self, kv_caches: KVCaches) -> KVCaches:
        return self._copies.gated(kv_caches, self._stream)

    @override
    def _is_held(self, job: PlannedJob) -> bool:
        return job.job_id in self._held

    @override
    def _take_result(self, job: PlannedJob, result: TransferResult) -> None:
        self._check_success(job, result)
        job.result = result
        self._early.append(job)

    @override
    def _check_ended(self, jobs: Sequence[PlannedJob]) -> None:
        for job in self._abandoned.intersection(jobs):
            job.result = job.result or job.failed()
        super()._check_ended(jobs)

    @override
    def _start(self, plan: StepPlan, jobs: Sequence[PlannedJob]) -> None:
        for job in jobs:
            job.is_started = True
            self._held[job.job_id] = job
            if job.is_load and job.is_computed:  # the block may have the right bytes by chance
                self._pages.corrupt(job.gpu_blocks)
                job.rows = self._pages.rows(job.gpu_blocks)
        in_flight = list(self._jobs.values())
        self._pages.note()
        self._fail_copies(jobs[:1], jobs)
        try:
            self._copies.call("start_plan", plan)
        except CopyFailed:  # after an exception, earlier jobs of the plan may be lost, too
            self._abandoned = {job for job in in_flight if job.result is None}
        self._poll()
        self._check_failures_reported(jobs)
        self._pages.check_writes(in_flight, self._all_blocks_to_load)

    @override
    def _advance(self) -> None:
        """If a computed job is due, open the gate until all computed jobs have ended."""
        moving = [job for job in self._held.values() if job.is_computed]
        due = [job for job in moving if job.is_due]
        in_flight = list(self._jobs.values())
        if not due:
            if self._copies.may_let_in() and self._num_good_copies(moving, moving) is None:
                self._may_have_copied.update(self._held.values())
                self._pages.note()
                has_copied = self._copies.let_in(has_jobs=bool(self._held))
                self._pages.check_writes(in_flight, self._all_blocks_to_load)
                if has_copied and not moving:
                    check_computed([*self._held.values()])
            return
        self._pages.note()
        self._fail_copies(due, moving)
        self._may_have_copied.difference_update(moving)
        for job in moving:
            del self._held[job.job_id]
            if not job.is_load and job.result is None:
                self._pages.check_source(job)
        self._end_together(moving)
        self._pages.check_writes(in_flight, self._all_blocks_to_load)
        self._early.clear()

    def _end_together(self, jobs: Sequence[PlannedJob]) -> None:
        too_early = self._reported_early() if self._copies.gate.num_waiting else set()
        rows = self._pages.rows(too_early)
        self._pages.corrupt(too_early)
        if self._copies.may_race():  # a report that is dropped now is never repeated
            for _ in range(_POLLS):
                self._take_in(self._copies.race())
                if all(job.result for job in jobs):
                    break
        self._copies.wait([job.job_id for job in jobs if job.result is None])
        if self._copies.num_early or too_early:
            self._copies.settle()
        self._copies.gate.close()
        self._poll()
        self._pages.restore(too_early, rows)
        self._check_ended(jobs)
        self._check_failures_reported(jobs)

    def _reported_early(self) -> set[int]:
        """Overwrite the source blocks of stores that were reported although the gate was closed."""
        stores = [
            job for job in self._early if not job.is_load and job.result and job.result.success
        ]
        busy = {b for job in self._jobs.values() if job.result is None for b in job.gpu_blocks}
        return {block for job in stores for block in job.gpu_blocks} - busy

    def _fail_copies(self, due: Sequence[PlannedJob], moving: Sequence[PlannedJob]) -> None:
        """Let copies fail from now on, if a job that is due must fail."""
        num_good = self._num_good_copies(due, moving)
        self._copies.fail_after(num_good)
        if num_good is not None:
            for job in self._jobs.values():
                job.may_fail = True

    def _num_good_copies(
        self, due: Sequence[PlannedJob], moving: Sequence[PlannedJob]
    ) -> int | None:
        """Return the number of copies that succeed before a failure; None without a failure.

        Failures must not depend on the timing of threads. So the failures start at the first copy
        or, if no other job moves, at the second copy, and never after a copy that passed the gate
        early.
        """
        outcomes = {job.fate.outcome for job in due} - {"ok"}
        spares_loads = not self._scenario.loads_may_fail
        # An exception of start_plan also loses the jobs of earlier plans.
        if not outcomes or (spares_loads and any(job.is_load for job in self._jobs.values())):
            return None
        if not self._may_have_copied.isdisjoint(moving):
            return None
        return 0 if "none" in outcomes or len(moving) > 1 else 1

    def _check_failures_reported(self, jobs: Sequence[PlannedJob]) -> None:
        gate = self._copies.gate
        is_silent = all(job.result and job.result.success for job in jobs)
        # After a recovery a worker may have repeated a copy, so the bytes are compared later.
        if gate.num_failed and is_silent and not gate.has_recovered:
            raise InvariantBroken(
                "XFER-4",
                f"{gate.num_failed} copies of jobs {[job.job_id for job in jobs]} failed, but "
                f"each job is reported as a success",
            )
        gate.set_failing(None)

    def _check_success(self, job: PlannedJob, result: TransferResult) -> None:
        """Check that a successful job ran after the compute, and compare the bytes of a load."""
        if not result.success:
            return
        if not job.is_computed:
            raise InvariantBroken(
                "XFER-6",
                f"job {job.job_id} is reported as a success, although the steps that were "
                f"launched before it are not computed yet; order the copies after compute_stream",
            )
        if job.is_load:
            self._pages.check_arrived(job, self._group_refs, self._on_rank)
