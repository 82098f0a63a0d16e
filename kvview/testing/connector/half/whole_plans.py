"""The harness of a worker half that receives whole plans, whose copies wait at a gate.

The hooks run on a separate thread, so that a hook that hangs can be abandoned. The copies of all
other threads wait at the gate until the simulation lets them pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from random import Random
from typing import Any

from typing_extensions import override

from kvview import StepPlan, TransferResult, WorkerConnector
from kvview.testing.connector.half.gate import CopyFailed, Gate, gate_tensor
from kvview.testing.connector.half.hook_calls import calling
from kvview.testing.connector.half.scheduler import Record
from kvview.testing.connector.half.worker import KVCaches, Shared, WorkerHarness
from kvview.testing.connector.judge.invariants import EndedLoudly, InvariantBroken
from kvview.testing.connector.judge.jobs import PlannedJob
from kvview.testing.connector.judge.threads import hint_for, where_all_wait
from kvview.testing.connector.judge.tier_model import check_computed
from kvview.testing.connector.run.compute_stream import StepStream
from kvview.testing.supervision.yield_points import (
    all_sleep,
    num_yields,
    stop_yielding,
    wait_until_asleep,
    yielding_often,
)
from kvview.testing.transfer.compute import GatedComputeEvent

_POLLS = 8  # maximum of calls of get_finished while jobs end
_HEAD_START = 0.001  # seconds in which wait() may wrongly return
_LAST_HEAD_START = 0.05  # seconds in which shutdown() may wrongly return
_SETTLE = 0.002  # seconds to wait for copies that a wrong worker half forgets
_SHARE_WHOLE_JOBS = 0.3  # share of early copies whose thread may then finish its job
_SHARE_RACES = 0.3  # how often get_finished is called while jobs end
_LOOK = 0.1  # seconds between two checks of a call that does not return
_LOOKS = [10]  # checks without a running thread until a call counts as stuck; fewer after the first
_WHY_STUCK = {
    "start_plan": ("XFER-5", "copies continue while the engine steps, it must not wait for them"),
    "get_finished": ("CONN-3", "copies continue while the engine steps, it must not wait for them"),
    "wait": ("CONN-3", "all copies may continue, so a job has ended or died without a report"),
    "shutdown": ("CONN-4", "all copies may continue, and no thread runs any more"),
}


class WholePlans(WorkerHarness):
    """Starts each plan in its step, and delays the copies of the worker half's threads.

    1. The copies wait at a gate (:class:`GatedWorker`) until a job is due.
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
        self._num_calls = 0

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
        self._poll_first()
        self._check_failures_reported(jobs)
        self._pages.check_writes(in_flight, self._all_blocks_to_load)

    @override
    def _poll_first(self) -> None:
        self._num_calls += 1
        if self._num_calls % 2:  # otherwise the engine calls wait without a question before
            self._poll()

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
        # After an exception an engine does not wait, and the half may have lost the job.
        left = [job for job in jobs if job.result is None and job not in self._abandoned]
        self._copies.wait([job.job_id for job in left])
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


class GatedWorker:
    """Calls the hooks of a worker half, and lets its copies through a gate.

    Args:
        half: The worker half.
    """

    def __init__(self, half: WorkerConnector) -> None:
        self._half = half
        self._thread = _HookThread()
        self.gate = Gate(self._thread.is_current)
        self._draw = Random(0).random
        self._draw_order = Random(1).random  # counts depend on how often threads reach the gate
        self.num_early = 0
        """Number of copies that still waited at the gate when the last hook returned."""

    def gated(self, kv_caches: KVCaches, stream: StepStream | None) -> KVCaches:
        """Return the KV caches behind the gate, with the compute stream if there is one."""
        tensors = [
            replace(cache, tensor=gate_tensor(cache.tensor, self.gate))
            for cache in kv_caches.tensors
        ]
        compute_stream = stream and _WorkerStream(stream, self._thread)
        return replace(kv_caches, tensors=tensors, compute_stream=compute_stream)

    def call(self, name: str, *args: Any) -> Any:
        """Call a hook without opening the gate.

        Raises:
            InvariantBroken: The hook raised, or does not return.
            CopyFailed: ``start_plan`` raised a simulated failure.
        """
        self.num_early = 0
        return self._result_of(self._thread.submit(name, getattr(self._half, name), args))

    def wait(self, job_ids: Sequence[int]) -> None:
        """Call ``wait``, and open the gate for all copies shortly after its start."""
        call = self._thread.submit("wait", self._half.wait, (job_ids,))
        self.num_early = self.gate.num_waiting if call.ends_within(_HEAD_START) else 0
        self.gate.open(self._draw_order)
        self._result_of(call)

    def race(self) -> Any:
        """Call ``get_finished`` with the gate open, while other threads run."""
        call = self._thread.submit("get_finished", yielding_often(self._half.get_finished), ())
        self.gate.open(self._draw_order)
        return self._result_of(call)

    def may_race(self) -> bool:
        """Draw whether ``get_finished`` is called while jobs end."""
        return self._draw() < _SHARE_RACES and bool(self.gate.num_waiting)

    def may_let_in(self) -> bool:
        """Draw whether a copy may pass the gate early."""
        return self._draw() < 0.5

    def let_in(self, *, has_jobs: bool) -> bool:
        """Let a random copy pass, perhaps with the other copies of the job of its thread.

        Args:
            has_jobs: Whether threads may be on their way to the gate.

        Returns:
            Whether bytes were moved.
        """
        if has_jobs:
            wait_until_asleep()
        return self.gate.let_in(self._draw(), whole_job=self._draw() < _SHARE_WHOLE_JOBS)

    def fail_after(self, num_good: int | None) -> None:
        """Let copies fail after some successes, and perhaps succeed again; None for no failure."""
        self.gate.set_failing(num_good, 1 if num_good and self._draw() < 0.5 else None)

    def settle(self) -> None:
        """Wait for the remaining copies, because a wrong worker half may not wait for them."""
        time.sleep(_SETTLE)

    def shutdown(self, has_jobs: bool) -> None:
        """Shut the worker half down.

        Raises:
            InvariantBroken: CONN-4 is broken, because copies of the worker half run after the
                shutdown.
        """
        num_early = 0
        try:
            if not self._thread.is_stuck:
                call = self._thread.submit("shutdown", self._half.shutdown, ())
                if call.ends_within(_LAST_HEAD_START):
                    num_early = self.gate.num_waiting
                else:
                    self.gate.open(self._draw_order)
                self._result_of(call)
                if has_jobs:
                    self.settle()
        finally:
            num_late = max(num_early, self.gate.num_waiting) + self.gate.num_after_the_end
            self.gate.end()
            self._thread.stop()
        if num_late:
            raise InvariantBroken(
                "CONN-4",
                f"shutdown of the worker half returned although {num_late} of its copies were "
                "still pending; it must finish or drop its transfers in flight",
                hint="In shutdown, join the threads that copy.",
            )

    def _result_of(self, call: _Call) -> Any:
        """Wait for the end of a call, unless all threads sleep forever."""
        name = call.name
        try:
            with calling(name):
                if not call.returns():
                    places = where_all_wait(self._thread.ident)
                    law, why = _WHY_STUCK.get(name, ("CONN-3", "no thread runs any more"))
                    message = f"{name} of the worker half does not return: {why}{places}"
                    raise InvariantBroken(law, message, hint=hint_for(name))
                if call.error is not None and not _is_simulated(call.error):
                    raise call.error
        except InvariantBroken:
            if not call.ends_within(0):  # otherwise the hook itself has raised
                self._thread.is_stuck = True
                self.gate.end()
            raise
        if call.error is None:
            return call.result
        if name == "start_plan":
            raise CopyFailed from call.error
        raise EndedLoudly(
            "CONN-3", f"{name} raised the error of a failed copy; report a failed job instead"
        ) from call.error


class _Call:
    """A call of a hook on another thread.

    Args:
        name: Name of the hook.
        function: The hook.
        args: Its arguments.
    """

    def __init__(self, name: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self.name = name
        self.result: Any = None
        self.error: BaseException | None = None
        self._function = function
        self._args = args
        self._running = threading.Lock()  # faster than an event
        self._running.acquire()

    def run(self) -> None:
        """Make the call."""
        try:
            self.result = self._function(*self._args)
        except BaseException as error:  # raised again on the thread of the caller
            self.error = error
        self._running.release()

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of the call."""
        has_ended = self._running.acquire(timeout=seconds)
        if has_ended:
            self._running.release()
        return has_ended

    def returns(self) -> bool:
        """Wait for the end of the call; returns False if all threads sleep forever."""
        num_looks, before = 0, num_yields[0]
        while not self.ends_within(_LOOK):
            num_looks = num_looks + 1 if all_sleep() and num_yields[0] == before else 0
            before = num_yields[0]
            if num_looks >= _LOOKS[0]:
                _LOOKS[0] = 3
                return False
        return True


class _HookThread:
    """The thread that calls the hooks of the worker half."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_stuck = False

    @property
    def ident(self) -> int:
        """Identifier of the thread; 0 while it does not run."""
        return (self._thread and self._thread.ident) or 0

    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.get_ident() == self.ident

    def submit(self, name: str, function: Callable[..., Any], args: Sequence[Any]) -> _Call:
        """Start a call."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()
        call = _Call(name, function, args)
        self._calls.put(call)
        return call

    def stop(self) -> None:
        """End the thread; the next call starts a new thread."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread = None

    def _run(self) -> None:
        stop_yielding()  # a slow engine thread would only make every job late
        while (call := self._calls.get()) is not None:
            call.run()


class _WorkerStream:
    """The compute stream of a worker half; the thread that calls the hooks runs the model."""

    def __init__(self, stream: StepStream, thread: _HookThread) -> None:
        self._stream = stream
        self._thread = thread

    def record_event(self) -> GatedComputeEvent:
        return GatedComputeEvent(self._stream.record_event()._gate, self._thread.ident)


def _is_simulated(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, CopyFailed):
        error = error.__cause__ or error.__context__
    return error is not None
