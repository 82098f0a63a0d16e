"""Calls of a worker half whose own threads copy, with these copies behind a gate.

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

import torch

from kvview import CanonicalKVCaches, WorkerConnector
from kvview.testing.connector.half.gate import CopyFailed, Gate, gate_tensor
from kvview.testing.connector.half.hook_calls import calling
from kvview.testing.connector.judge.invariants import EndedLoudly, InvariantBroken
from kvview.testing.connector.judge.threads import hint_for, where_all_wait
from kvview.testing.connector.run.compute_stream import StepStream
from kvview.testing.supervision.yield_points import (
    all_sleep,
    num_yields,
    stop_yielding,
    wait_until_asleep,
    yielding_often,
)
from kvview.testing.transfer.compute import GatedComputeEvent

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

    def gated(
        self, kv_caches: CanonicalKVCaches[torch.Tensor], stream: StepStream | None
    ) -> CanonicalKVCaches[torch.Tensor]:
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
