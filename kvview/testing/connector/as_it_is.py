"""The worker half as it is: whole plans, its own threads and order, copies held in the middle.

Where :class:`~kvview.testing.connector.faults.FaultyWorker` gives jobs one by one and orders
them itself, here the plan goes straight to the real worker half at the step where it is
planned. What can be late is the copying: the KV tensors have a gate before them
(:mod:`~kvview.testing.connector.gate`), which opens some steps later, or lets copies fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import torch
from typing_extensions import override

from kvview import CanonicalKVCaches, GPULoadStoreSpec, StepPlan, TransferResult
from kvview.testing.connector.faults import FaultyWorker, Flight, Unit, failed
from kvview.testing.connector.gate import CopyFailed, Gate, gate_tensor
from kvview.testing.connector.hook_calls import calling
from kvview.testing.connector.invariants import EndedLoudly, InvariantBroken
from kvview.testing.connector.scenario import Fate
from kvview.testing.connector.stream import StepStream
from kvview.testing.transfer.compute import GatedComputeEvent
from kvview.testing.yield_points import num_yields, stop_yielding, yielding_often

_HEAD_START = 0.001  # seconds that wait() has, in which it might return too early
_LAST_HEAD_START = 0.05  # and shutdown(), where jobs are in flight
_SETTLE = 0.002  # seconds for copies that nobody waits for, of a worker that is wrong already
_WHOLE_JOBS = 0.3  # of the times that a copy is let in early: all others of its thread too
_RACES = 0.3  # of the times that jobs end: reports are asked for meanwhile
_POLLS = 8  # how often at most
_LOOK = 0.1  # seconds between two looks at a call that does not return
_LOOKS = [10]  # in which nothing runs, until it never will; fewer once that was seen
_WHY_STUCK = {
    "start_plan": ("XFER-5", "copies go on while the engine steps, it must not wait for them"),
    "get_finished": ("CONN-3", "copies go on while the engine steps, it must not wait for them"),
    "wait": ("CONN-3", "all copies may go on, so a job has ended, or died, and nobody says so"),
    "shutdown": ("CONN-4", "all copies may go on, and nothing runs any more"),
}


class AsItIsWorker(FaultyWorker):
    """A worker half that gets its plans at once, and copies when it may.

    1. A job's fate says when the gate opens: then all jobs before it are waited for with
       the worker half's own ``wait``, so that a right one has no timing to show.
    2. When the outcome of the fate is a failure, copies fail from the first, or the second,
       on while the gate is open, or the second alone; who moves bytes in another way does not
       notice.
    3. What ended is reported to the engine when its fate says so, as in the base class.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._home = _HookThread()
        self._gate = Gate(self._home.is_current)
        self._draw = Random(0).random
        self._draw_order = Random(1).random  # as often as threads come to the gate
        self._early: list[Flight] = []  # ended while the gate was closed
        self._waiting: dict[int, Flight] = {}  # by job, until the gate was opened for it
        self._may_have_begun: set[Flight] = set()  # a copy was let in, if one was there
        self._lost: set[Flight] = set()  # start_plan raised, nobody may know them

    # --- the hooks ---

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[torch.Tensor]) -> None:
        self._group_refs = kv_caches.group_data_refs
        tensors = [
            replace(cache, tensor=gate_tensor(cache.tensor, self._gate))
            for cache in kv_caches.tensors
        ]
        self._look_at([cache.tensor for cache in kv_caches.tensors])
        stream = self._stream and _WorkerStream(self._stream, self._home)
        self._call("register_kv_caches", replace(kv_caches, tensors=tensors, compute_stream=stream))

    @override
    def shutdown(self) -> None:
        if self._stream is not None:
            self._stream.finish()
        try:
            if not self._home.is_stuck:
                self._call("shutdown", opens=True)
                if self._flights:
                    time.sleep(_SETTLE)
        finally:
            num_late = max(self._num_at_gate, self._gate.num_waiting)
            num_late += self._gate.num_after_the_end
            self._gate.end()
            self._home.stop()
        if num_late:
            raise InvariantBroken(
                "CONN-4",
                f"shutdown of the worker half returned, and {num_late} of its copies were still "
                f"to come: it must finish or drop what is in flight",
            )

    @override
    def _submit(self, plan: StepPlan, flights: list[Flight]) -> None:
        self._units += [Unit(plan, [flight], has_moved=True) for flight in flights]
        self._waiting.update({flight.job.job_id: flight for flight in flights})
        for flight in flights:
            if flight.is_load and flight.is_ready:  # by chance its bytes might be there
                self._spoil(flight.gpu_blocks)
                flight.source = [tensor[flight.gpu_blocks] for tensor in self._tensors]
        with self._watch_writes():
            self._fail_after(self._num_good(flights[:1], flights))
            try:
                self._call("start_plan", plan)
            except CopyFailed:  # loud enough; who began later than planned may have lost others
                self._lost = {f for f in self._flights.values() if f.result is None}
            self._poll()
            self._check_told(flights)
            self._gate.set_failing(None)
        self._move_due()

    @override
    def _call(self, name: str, *args: Any, opens: bool = False, races: bool = False) -> Any:
        function = getattr(self._inner, name)
        call = self._home.submit(yielding_often(function) if races else function, args)
        self._num_at_gate = 0
        if races:
            self._gate.open(self._draw_order)
        if opens:
            is_last = name == "shutdown"
            if call.has_ended.wait(_LAST_HEAD_START if is_last else _HEAD_START):
                self._num_at_gate = self._gate.num_waiting
            if name != "shutdown" or not call.has_ended.is_set():
                self._gate.open(self._draw_order)
        try:
            with calling(name):
                comes_back = self._comes_back(call)
        except InvariantBroken:  # the watchdog's
            self._home.is_stuck = True
            self._gate.end()
            raise
        if not comes_back:
            self._home.is_stuck = True
            self._gate.end()
            law, why = _WHY_STUCK.get(name, ("CONN-3", "nothing runs any more"))
            raise InvariantBroken(law, f"{name} of the worker half does not return: {why}")
        if name == "start_plan" and _is_simulated(call.error):
            raise CopyFailed from call.error
        if _is_simulated(call.error):
            raise EndedLoudly("CONN-3", f"{name} raised a copy that failed") from call.error
        with calling(name):
            if call.error is not None:
                raise call.error
        return call.result

    def _comes_back(self, call: _Call) -> bool:
        """Whether a call ends; False when every thread sleeps, and goes on sleeping."""
        num_looks, before = 0, num_yields[0]
        while not call.has_ended.wait(_LOOK):
            num_looks = num_looks + 1 if _all_sleep() and num_yields[0] == before else 0
            before = num_yields[0]
            if num_looks >= _LOOKS[0]:
                _LOOKS[0] = 3
                return False
        return True

    # --- the gate ---

    @override
    def _move_due(self) -> None:
        self._poll()
        # Whether a job has ended already is for its threads to say, and decides nothing here.
        moving = [flight for flight in self._waiting.values() if flight.is_ready]
        due = [flight for flight in moving if flight.age >= flight.fate.move_after]
        if not due:
            if self._draw() < 0.5 and self._num_good(moving, moving) is None:
                self._may_have_begun.update(self._waiting.values())
                with self._watch_writes():
                    self._gate.let_in(self._draw(), whole_job=self._draw() < _WHOLE_JOBS)
            return
        with self._watch_writes():
            num_good = self._num_good(due, moving)
            self._may_have_begun.difference_update(moving)
            for flight in moving:
                del self._waiting[flight.job.job_id]
                if not flight.is_load and flight.result is None:
                    self._check_source(flight)
            job_ids = [flight.job.job_id for flight in moving if flight.result is None]
            with self._scribbled() as has_scribbled:
                self._fail_after(num_good)
                if self._draw() < _RACES and self._gate.num_waiting:
                    self._race(moving)
                self._call("wait", job_ids, opens=True)
                if self._num_at_gate or has_scribbled:
                    time.sleep(_SETTLE)
                self._gate.close()
                is_early = self._num_at_gate > 0
                self._poll()
            if is_early or any(flight.result is None for flight in moving):
                self._check_ended(moving, job_ids)
            self._check_told(moving)
            self._gate.set_failing(None)
        self._early.clear()

    def _race(self, flights: Sequence[Flight]) -> None:
        """Ask for reports while threads end jobs: one that is lost now never comes."""
        for _ in range(_POLLS):
            self._take_in(self._call("get_finished", races=True))
            if all(flight.result for flight in flights):
                break

    def _num_good(self, due: Sequence[Flight], moving: Sequence[Flight]) -> int | None:
        """Copies that succeed before others fail; None when none fails.

        What fails is the same in every run: it is not left to threads how many copies of
        which job come before.
        """
        outcomes = {flight.fate.outcome for flight in due} - {"ok"}
        spares_loads = self._fate_of_load(Fate(outcome="none")).outcome == "ok"
        if not outcomes or (spares_loads and any(flight.is_load for flight in moving)):
            return None
        if not self._may_have_begun.isdisjoint(moving):
            return None
        return 0 if "none" in outcomes or len(moving) > 1 else 1

    def _fail_after(self, num_good: int | None) -> None:
        # A medium may fail once, and go on.
        self._gate.set_failing(num_good, 1 if num_good and self._draw() < 0.5 else None)

    @contextmanager
    def _watch_writes(self) -> Iterator[None]:
        self._note_writes()
        flights = list(self._flights.values())
        yield
        # A copy that was let in may go on, also one of a connector beside this one.
        self._check_writes(flights, self._pool.blocks_to_load())

    @contextmanager
    def _scribbled(self) -> Iterator[bool]:
        """What is reported as stored may be overwritten: who copies it yet copies junk."""
        busy = {b for f in self._flights.values() if f.result is None for b in f.gpu_blocks}
        stores = [f for f in self._early if not f.is_load and f.result and f.result.success]
        blocks = sorted({block for flight in stores for block in flight.gpu_blocks} - busy)
        if not self._gate.num_waiting:
            blocks = []
        before = [tensor[blocks] for tensor in self._tensors]
        self._spoil(blocks)
        yield bool(blocks)
        for tensor, rows in zip(self._tensors, before, strict=True):
            tensor[blocks] = rows

    @override
    def _is_over(self, flight: Flight) -> bool:
        return flight.job.job_id not in self._waiting

    @override
    def _note_source(self, flight: Flight) -> None:
        if not flight.source and flight.is_ready:
            flight.source = [tensor[flight.gpu_blocks] for tensor in self._tensors]

    # --- what is told ---

    @override
    def _judge(self, flight: Flight, result: TransferResult) -> TransferResult:
        self._early.append(flight)
        if result.success and not flight.is_ready:
            raise InvariantBroken(
                "XFER-6",
                f"job {flight.job.job_id} is reported as a success, and what was launched before "
                f"it is not computed yet: order the copies after compute_stream",
            )
        if flight.is_load and result.success and (missing := self._missing(flight)):
            raise InvariantBroken(
                "XFER-4",
                f"load job {flight.job.job_id} is reported as a success, and nothing was written "
                f"yet in blocks {missing}, or not all of it",
            )
        return result

    def _missing(self, flight: Flight) -> list[int]:
        """Blocks with words that are as they were: the engine overwrote them before the load."""
        if not isinstance(flight.job.dst, GPULoadStoreSpec):
            return []
        groups = [g for g, size in enumerate(flight.job.dst.group_sizes) for _ in range(size)]
        missing = {
            block
            for row, (block, group) in enumerate(zip(flight.gpu_blocks, groups, strict=True))
            for ref in self._group_refs[group]
            if _has_equal_word(
                self._tensors[ref.tensor_idx][block][: ref.page_size_bytes],
                flight.source[ref.tensor_idx][row][: ref.page_size_bytes],
            )
        }
        return sorted(missing)

    def _check_ended(self, flights: Sequence[Flight], job_ids: Sequence[int]) -> None:
        for flight in flights:
            if flight.result is None and flight in self._lost:
                flight.result = failed(flight)
        if waiting := [flight.job.job_id for flight in flights if flight.result is None]:
            raise InvariantBroken(
                "CONN-3",
                f"wait({job_ids}) returned, and get_finished does not report jobs {waiting}: wait "
                f"must block until they ended, and no report of a thread may be lost",
            )

    def _check_told(self, flights: Sequence[Flight]) -> None:
        results = [flight.result for flight in flights]
        if self._gate.has_recovered:
            return  # it may have been tried again: the bytes tell
        if self._gate.num_failed and all(result and result.success for result in results):
            raise InvariantBroken(
                "XFER-4",
                f"{self._gate.num_failed} copies of jobs "
                f"{[flight.job.job_id for flight in flights]} failed, and each job is reported as "
                f"a success",
            )


class _Call:
    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self._function = function
        self._args = args
        self.has_ended = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._function(*self._args)
        except BaseException as error:  # told to whoever called
            self.error = error
        self.has_ended.set()


class _HookThread:
    """The thread that calls the worker half: one that can be left behind when it hangs."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_stuck = False

    @property
    def ident(self) -> int:
        """Of the thread, 0 when it does not run."""
        return (self._thread and self._thread.ident) or 0

    def is_current(self) -> bool:
        """Whether this is the thread that runs."""
        return threading.get_ident() == self.ident

    def submit(self, function: Callable[..., Any], args: Sequence[Any]) -> _Call:
        """Start a call."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()
        call = _Call(function, args)
        self._calls.put(call)
        return call

    def stop(self) -> None:
        """End the thread; the next call starts another."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread = None

    def _run(self) -> None:
        stop_yielding()  # it is the engine's: who is slower than it is late
        while (call := self._calls.get()) is not None:
            call.run()


class _WorkerStream:
    """The compute stream, for which the thread that calls the worker half runs the model."""

    def __init__(self, stream: StepStream, home: _HookThread) -> None:
        self._stream = stream
        self._home = home

    def record_event(self) -> GatedComputeEvent:
        return GatedComputeEvent(self._stream.record_event()._gate, self._home.ident)


def _is_simulated(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, CopyFailed):
        error = error.__cause__ or error.__context__
    return error is not None


def _has_equal_word(one: torch.Tensor, other: torch.Tensor) -> bool:
    size = len(one) - len(one) % 8
    return bool((one[:size].view(torch.int64) == other[:size].view(torch.int64)).any())


def _all_sleep() -> bool:
    """Whether no other thread of this process runs; where nobody can say, they do not."""
    own = threading.get_native_id()
    for stat in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):
            text = stat.read_text()
            if int(text.split(" ", 1)[0]) != own and text.rpartition(") ")[2][:1] in "RD":
                return False
    return True
