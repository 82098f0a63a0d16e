"""The harness of a worker half: late, failed, lost and overlapping transfers.

A mock worker that completes each job at once hides most bugs (vLLM #46014). In this harness each
job has a fate: its bytes move some steps after its plan, and it is reported some steps later, out
of order, as a failure, or only when no other work is left. When bytes must move, the harness waits
for the worker half, so the timing of threads has no effect.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat, takewhile
from typing import Any

import torch
from typing_extensions import override

from kvview import (
    CanonicalKVCaches,
    StepPlan,
    TransferJob,
    TransferResult,
    WorkerConnector,
)
from kvview.testing.connector.gate import CopyFailed
from kvview.testing.connector.harness import ConnectorHarness
from kvview.testing.connector.held_copies import HeldCopies
from kvview.testing.connector.hook_calls import calling, hook, require_type
from kvview.testing.connector.invariants import InvariantBroken
from kvview.testing.connector.jobs import (
    PlannedJob,
    Start,
    blocks_of_loads,
    is_plain,
    starts_of,
)
from kvview.testing.connector.memory import GPUPages, check_computed
from kvview.testing.connector.plan_checks import check_held, check_load, check_store, gpu_blocks
from kvview.testing.connector.run_log import RunLog
from kvview.testing.connector.scenario import Fate, Scenario
from kvview.testing.connector.stream import StepStream
from kvview.testing.connector.watch import Record

_MUCH_LATER = 1_000  # steps
_POLLS = 8  # maximum of calls of get_finished while jobs end


@dataclass(frozen=True)
class Shared:
    """Objects of a run that the harnesses of all its connectors share.

    Args:
        scenario: The run.
        fates: Fates of the jobs by the order of their plans.
        engine: Returns the engine; called after the engine was built.
        blocks_to_load: Returns the blocks that loads in flight of all connectors write.
        stream: The compute stream of the engine, if it lags.
        log: Log of the last hooks and transfers.
    """

    scenario: Scenario
    fates: Iterator[Fate]
    engine: Callable[[], ConnectorHarness]
    blocks_to_load: Callable[[], set[int]]
    stream: StepStream | None
    log: RunLog


class WorkerHarness(WorkerConnector):
    """Passes jobs to the worker half, and reports them according to their fates.

    1. By default a job starts when it is due, which is after the steps that were launched before it
       (XFER-6), and after earlier jobs on one of its pages. All due jobs are started in the order
       of their plans before the harness waits for one of them. So the worker half must keep the
       order of jobs that share a page (XFER-3). A job with a simulated failure runs alone, and the
       harness corrupts its bytes. But a store by key receives the right bytes, because a key
       determines its bytes (KEY-2): the medium may keep them and refuse the bytes of a later store.
    2. With ``whole_plans`` a plan is started in its step, and the copies of the worker half's
       threads wait at a gate (:mod:`~kvview.testing.connector.held_copies`) until a job is due. In
       this mode a simulated failure is a copy that raises an exception.
    3. A plan of a subclass may contain more than its jobs, so it starts as a whole, when its first
       job is due and after all earlier plans.
    4. The engine's ``wait`` does nothing, because the engine must work with every delay. Lost jobs
       are reported after :meth:`release_lost`.

    Args:
        half: The worker half.
        shared: Shared objects of the run.
        record: The model of the connector's tier, and its counts.
    """

    def __init__(self, half: WorkerConnector, shared: Shared, record: Record) -> None:
        self._half = half
        self._scenario = shared.scenario
        self._engine = shared.engine
        self._all_blocks_to_load = shared.blocks_to_load
        self._stream = shared.stream
        self._fates = shared.fates
        self._record = record
        holds_copies = self._scenario.worker_half == "whole_plans"
        self._copies = HeldCopies(half) if holds_copies else None
        self._jobs: dict[int, PlannedJob] = {}
        self._queue: list[Start] = []
        self._num_blocks = 0
        self._on_rank = ""  # for messages
        self._is_lost_over = False
        self.num_reported = 0
        # With whole plans only:
        self._held: dict[int, PlannedJob] = {}  # jobs for which the gate has not been opened yet
        self._early: list[PlannedJob] = []  # jobs that ended while the gate was closed
        self._may_have_copied: set[PlannedJob] = (
            set()
        )  # jobs to which a copy that was let in may belong
        self._abandoned: set[PlannedJob] = set()  # jobs without a result when start_plan raised

    @property
    def num_in_flight(self) -> int:
        """Jobs that are not reported yet."""
        return len(self._jobs)

    def unreported(self) -> list[int]:
        """Jobs that the worker half has started but not reported."""
        return [job.job_id for job in self._jobs.values() if job.is_started and not job.result]

    def stores_in_flight(self) -> Iterator[PlannedJob]:
        """Stores that are not reported yet."""
        return (job for job in self._jobs.values() if not job.is_load)

    def blocks_to_load(self) -> set[int]:
        """Blocks that loads in flight write."""
        return blocks_of_loads(self._jobs.values())

    def release_lost(self) -> None:
        """Report lost jobs from now on, and give later jobs the default fate."""
        self._is_lost_over = True
        self._fates = iter(())

    def hold(self) -> None:
        """Delay later jobs until after the end of the engine."""
        self._fates = repeat(Fate(_MUCH_LATER, _MUCH_LATER))

    # --- the hooks ---

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[torch.Tensor]) -> None:
        tensors = [cache.tensor for cache in kv_caches.tensors]
        self._pages = GPUPages(tensors)
        self._num_blocks = tensors[0].shape[0]
        if len(self._scenario.ranks) > 1:
            self._on_rank = f" on rank {kv_caches.rank}"
        self._group_refs = kv_caches.group_data_refs
        if self._copies is not None:
            kv_caches = self._copies.gated(kv_caches, self._stream)
        self._call("register_kv_caches", kv_caches)

    @override
    def start_plan(self, plan: StepPlan) -> None:
        with hook("pickling the plan", "CONN-3"):
            plan = pickle.loads(pickle.dumps(plan))
        self._note_rows()
        jobs = [self._planned(job, plan, is_load=True) for job in plan.loads]
        jobs += [self._planned(job, plan, is_load=False) for job in plan.stores]
        for job in jobs:
            self._jobs[job.job_id] = job
            self._record.on_planned(job)
        if self._copies is not None:
            self._start_whole(self._copies, plan, jobs)
        else:
            self._queue += starts_of(plan, jobs)
        self._advance()

    @override
    def get_finished(self) -> list[TransferResult]:
        for job in self._jobs.values():
            job.age += 1
        self._note_rows()
        check_held(self.stores_in_flight(), self._engine(), self._record.freed_at)
        self._advance()
        self._poll()
        ended = [job for job in self._jobs.values() if self._may_report(job)]
        # Reports come from the last planned job to the first.
        return [self._report(job) for job in reversed(ended)]

    @override
    def wait(self, job_ids: Sequence[int]) -> None:
        pass

    @override
    def shutdown(self) -> None:
        if self._copies is None:
            self._call("shutdown")
            return
        if self._stream is not None:
            self._stream.finish()
        self._copies.shutdown(has_jobs=bool(self._jobs))

    def _call(self, name: str, *args: Any) -> Any:
        if self._copies is not None:
            return self._copies.call(name, *args)
        with calling(name):
            return getattr(self._half, name)(*args)

    def _advance(self) -> None:
        if self._copies is not None:
            self._poll()
            self._let_through(self._copies)
        else:
            self._start_due()

    # --- plans ---

    def _planned(self, transfer: TransferJob, plan: StepPlan, *, is_load: bool) -> PlannedJob:
        fate = next(self._fates, None) or Fate()
        if is_load:
            fate = self._scenario.fate_of_load(fate)
        gpu_side = transfer.dst if is_load else transfer.src
        job = PlannedJob(transfer, is_load, fate, gpu_blocks(gpu_side, self._num_blocks))
        if self._stream is not None:
            job.mark = self._stream.record_event()
        if is_load:
            expected = check_load(job, self._engine())
            # Jobs of other child connectors may name other pages by the same numbers.
            if is_plain(plan):
                job.expected = expected
        else:
            check_store(job, self._engine())
        self._note_rows_of(job)
        return job

    def _note_rows(self) -> None:
        """Copy the source blocks of jobs whose steps were computed since the last hook."""
        for job in self._jobs.values():
            self._note_rows_of(job)

    def _note_rows_of(self, job: PlannedJob) -> None:
        is_compared = not job.is_load or self._copies is not None
        if is_compared and not job.rows and job.is_computed:
            job.rows = self._pages.rows(job.gpu_blocks)

    # --- jobs that start when they are due ---

    def _start_due(self) -> None:
        """Start the due jobs; jobs without a simulated failure run at the same time."""
        last_prompt_load = self._last_prompt_load()
        waiting: list[Start] = []
        together: list[Start] = []
        for place, start in enumerate(self._queue):
            is_due = start.is_due and not any(map(start.must_follow, waiting))
            if not is_due and place > last_prompt_load:
                waiting.append(start)
            elif start.may_overlap:
                together.append(start)
            else:
                self._run(together)
                self._run([start])
                together = []
        self._run(together)
        self._queue = waiting

    def _last_prompt_load(self) -> int:
        """Return the index of the last queued load; -1 if loads may end in a later step."""
        if self._scenario.loads_may_be_late:
            return -1
        places = [i for i, start in enumerate(self._queue) if any(j.is_load for j in start.jobs)]
        return places[-1] if places else -1

    def _run(self, starts: Sequence[Start]) -> None:
        """Start jobs, and wait for all of them."""
        if not starts:
            return
        jobs = [job for start in starts for job in start.jobs]
        with (
            self._pages.only_loads_write(jobs, lambda: blocks_of_loads(jobs)),
            self._pages.corrupted(self._blocks_to_corrupt(jobs)),
        ):
            for start in starts:
                for job in start.jobs:
                    job.is_started = True
                self._call("start_plan", start.plan)
            for start in reversed(starts):
                self._call("wait", [job.job_id for job in start.jobs])
            self._poll()
        self._check_ended(jobs)
        for job in jobs:
            if job.is_load:
                self._pages.corrupt(job.failing_blocks)

    def _blocks_to_corrupt(self, jobs: Sequence[PlannedJob]) -> set[int]:
        """Return the source blocks of stores that must fail, unless another store needs them.

        This also counts the blocks of each store that arrive nevertheless.
        """
        stores = [job for job in jobs if not job.is_load]
        failing = {block for job in stores for block in job.failing_blocks}
        for job in stores:
            self._pages.check_source(job)
            if job.fate.outcome == "ok":
                failing.difference_update(job.gpu_blocks)
        for job in stores:
            job.num_moved = len(list(takewhile(lambda block: block not in failing, job.gpu_blocks)))
        return failing - {b for job in stores if job.keeps_by_key for b in job.gpu_blocks}

    # --- whole plans, with copies behind a gate ---

    def _start_whole(self, copies: HeldCopies, plan: StepPlan, jobs: Sequence[PlannedJob]) -> None:
        for job in jobs:
            job.is_started = True
            self._held[job.job_id] = job
            if job.is_load and job.is_computed:  # the block may have the right bytes by chance
                self._pages.corrupt(job.gpu_blocks)
                job.rows = self._pages.rows(job.gpu_blocks)
        in_flight = list(self._jobs.values())
        with self._pages.only_loads_write(in_flight, self._all_blocks_to_load):
            self._fail_copies(copies, jobs[:1], jobs)
            try:
                copies.call("start_plan", plan)
            except CopyFailed:  # after an exception, earlier jobs of the plan may be lost, too
                self._abandoned = {job for job in in_flight if job.result is None}
            self._poll()
            self._check_failures_reported(copies, jobs)

    def _let_through(self, copies: HeldCopies) -> None:
        """If a computed job is due, open the gate until all computed jobs have ended."""
        moving = [job for job in self._held.values() if job.is_computed]
        due = [job for job in moving if job.is_due]
        in_flight = list(self._jobs.values())
        if not due:
            if copies.may_let_in() and self._num_good_copies(moving, moving) is None:
                self._may_have_copied.update(self._held.values())
                with self._pages.only_loads_write(in_flight, self._all_blocks_to_load):
                    has_copied = copies.let_in()
                if has_copied and not moving:
                    check_computed([*self._held.values()])
            return
        with self._pages.only_loads_write(in_flight, self._all_blocks_to_load):
            self._fail_copies(copies, due, moving)
            self._may_have_copied.difference_update(moving)
            for job in moving:
                del self._held[job.job_id]
                if not job.is_load and job.result is None:
                    self._pages.check_source(job)
            self._end_together(copies, moving)
        self._early.clear()

    def _end_together(self, copies: HeldCopies, jobs: Sequence[PlannedJob]) -> None:
        too_early = self._reported_early() if copies.gate.num_waiting else set()
        with self._pages.corrupted(too_early):
            if copies.may_race():  # a report that is dropped now is never repeated
                for _ in range(_POLLS):
                    self._take_in(copies.race())
                    if all(job.result for job in jobs):
                        break
            copies.wait([job.job_id for job in jobs if job.result is None])
            if copies.num_early or too_early:
                copies.settle()
            copies.gate.close()
            self._poll()
        self._check_ended(jobs)
        self._check_failures_reported(copies, jobs)

    def _reported_early(self) -> set[int]:
        """Overwrite the source blocks of stores that were reported although the gate was closed."""
        stores = [
            job for job in self._early if not job.is_load and job.result and job.result.success
        ]
        busy = {b for job in self._jobs.values() if job.result is None for b in job.gpu_blocks}
        return {block for job in stores for block in job.gpu_blocks} - busy

    def _fail_copies(
        self, copies: HeldCopies, due: Sequence[PlannedJob], moving: Sequence[PlannedJob]
    ) -> None:
        """Let copies fail from now on, if a job that is due must fail."""
        num_good = self._num_good_copies(due, moving)
        copies.fail_after(num_good)
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
        if not outcomes or (spares_loads and any(job.is_load for job in moving)):
            return None
        if not self._may_have_copied.isdisjoint(moving):
            return None
        return 0 if "none" in outcomes or len(moving) > 1 else 1

    def _check_failures_reported(self, copies: HeldCopies, jobs: Sequence[PlannedJob]) -> None:
        gate = copies.gate
        is_silent = all(job.result and job.result.success for job in jobs)
        # After a recovery a worker may have repeated a copy, so the bytes are compared later.
        if gate.num_failed and is_silent and not gate.has_recovered:
            raise InvariantBroken(
                "XFER-4",
                f"{gate.num_failed} copies of jobs {[job.job_id for job in jobs]} failed, but "
                f"each job is reported as a success",
            )
        gate.set_failing(None)

    # --- results ---

    def _poll(self) -> None:
        self._take_in(self._call("get_finished"))

    def _take_in(self, results: Any) -> None:
        require_type("get_finished", results, "CONN-3")
        with hook("pickling the results", "CONN-3"):
            results = pickle.loads(pickle.dumps(results))
        for result in results:
            job = self._jobs.get(result.job_id)
            if job is None or not job.is_started or job.result is not None:
                raise InvariantBroken(
                    "CONN-3",
                    f"the worker half reports job {result.job_id}, which it never received or has "
                    "already reported",
                )
            if self._copies is not None:
                self._check_success(job, result)
                job.result = result
                self._early.append(job)
            else:
                job.result = self._with_fault(job, result)

    def _with_fault(self, job: PlannedJob, result: TransferResult) -> TransferResult:
        """Return the result of the worker half, or a failure if the job's fate is a failure."""
        if job.fate.outcome == "ok":
            return result
        if not job.num_moved or not result.success:
            return job.failed()
        return job.failed([number < job.num_moved for number in range(len(job.gpu_blocks))])

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

    def _check_ended(self, jobs: Sequence[PlannedJob]) -> None:
        for job in self._abandoned.intersection(jobs):
            job.result = job.result or job.failed()
        if waiting := [job.job_id for job in jobs if job.result is None]:
            raise InvariantBroken(
                "CONN-3",
                f"get_finished of the worker half does not report jobs {waiting}{self._on_rank} "
                "after wait has returned; report every job, also one that failed, and let wait "
                "block until its jobs have ended",
                hint="",
            )

    def _may_report(self, job: PlannedJob) -> bool:
        is_due = job.age >= job.fate.report_after and job.job_id not in self._held
        return is_due and job.result is not None and (not job.fate.is_lost or self._is_lost_over)

    def _report(self, job: PlannedJob) -> TransferResult:
        assert job.result is not None, "only ended jobs are reported"
        del self._jobs[job.job_id]
        self.num_reported += 1
        job.rows = []
        self._record.on_reported(job)
        return job.result
