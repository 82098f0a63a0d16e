"""A watchdog that ends calls which do not return because of an endless loop or a lock.

The watchdog watches hooks of a connector and all other calls of a check. A timer ticks once a
second and tests whether the same call is still running.

1. The limit is CPU time of the process, so that a slow machine does not cause a failure. A hook
   that waits without CPU time has four times the limit, counted in ticks, because a suspended
   machine does not tick.
2. A :class:`HookTimeout` that is raised inside the hook ends the hook. A C call that never returns
   cannot be ended, but its stack is written to stderr.
3. On a system without these timers (Windows), and outside the main thread, no call is watched.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FrameType

HOOK_SECONDS = 30.0
"""Default limit of CPU seconds for one call of a hook."""

MAX_TIMEOUTS = 2
"""Calls without a return after which a check ends, because each takes the whole time limit."""

_TICK = 1.0
_WAITS = 4  # factor of the limit for a hook that uses no CPU
_DEAF = 8  # factor of the limit after which the stack is written to stderr

_seconds: ContextVar[float] = ContextVar("kvview_hook_seconds", default=HOOK_SECONDS)


class HookTimeout(BaseException):
    """A hook did not return; a ``BaseException``, because hooks may catch ``Exception``."""


class _Call:
    """The number of the watched call; the same number at two ticks means the same call."""

    number = 0
    depth = 0
    is_watched = False
    is_ending = False  # a signal has asked for the end, and its exception may have been dropped
    dead_thread = ""  # the exception that ended a thread for which the call may be waiting
    may_arm = True  # False in a fork, which may inherit a taken lock of faulthandler


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Set the time limit of a hook call for the runs in the ``with`` block."""
    token = _seconds.set(seconds)
    try:
        yield
    finally:
        _seconds.reset(token)


class calling:  # an object, because a generator takes twice the time
    """Watch the hook that the ``with`` block calls."""

    def __enter__(self) -> None:
        if _Call.is_ending:
            _Call.is_ending = False
            raise KeyboardInterrupt
        _Call.number += 1
        _Call.depth += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _Call.depth -= 1
        _Call.number += 1


def end_soon() -> None:
    """End the check at its next call, because Python drops an exception inside a destructor."""
    _Call.is_ending = True


def is_ending() -> bool:
    """Whether a signal has asked for the end of the check."""
    return _Call.is_ending


def next_call() -> None:
    """Record that a call in the ``with`` block has returned, and that another one starts."""
    _Call.number += 1


def thread_died(error: str) -> None:
    """Record that an exception ended a thread, so that a call that waits for the thread ends.

    Args:
        error: The exception; empty when a new run starts.
    """
    _Call.dead_thread = error


@contextmanager
def watching() -> Iterator[None]:
    """Watch the hooks that are called in the ``with`` block."""
    is_main = threading.current_thread() is threading.main_thread()
    if not hasattr(signal, "setitimer") or not is_main or _Call.is_watched:
        yield
        return
    if signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0):  # another program has set a handler
        yield
        return
    watch = _Watch(_seconds.get())
    before = signal.signal(signal.SIGALRM, watch.tick)
    every = min(_TICK, watch.seconds / 4)
    signal.setitimer(signal.ITIMER_REAL, every, every)
    _Call.is_watched, _Call.depth = True, 0
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if watch.has_armed:
            faulthandler.cancel_dump_traceback_later()
        _Call.is_watched = False


@contextmanager
def watching_child() -> Iterator[None]:
    """Watch the calls of a forked child, which does not inherit its parent's timer."""
    _Call.is_watched, _Call.may_arm = False, False
    with watching():
        yield


class _Watch:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.has_armed = False
        self._tick_seconds = min(_TICK, seconds / 4)
        self._number = -1
        self._used = 0.0
        self._waited = 0.0
        self._cpu = time.process_time()

    def tick(self, signum: int, frame: FrameType | None) -> None:
        """Test once a second whether the same call is still running."""
        before, self._cpu = self._cpu, time.process_time()
        if not _Call.depth or _Call.number != self._number:
            self._number, self._used, self._waited = _Call.number, 0.0, 0.0
            if self.has_armed:
                faulthandler.cancel_dump_traceback_later()
                self.has_armed = False
            return
        self._arm()
        self._used += self._cpu - before
        self._waited += self._tick_seconds
        if _Call.dead_thread:
            raise HookTimeout(f"did not return, because {_Call.dead_thread}")
        if self._used >= self.seconds or self._waited >= _WAITS * self.seconds:
            told = f"did not return within {self.seconds:g} s of CPU time"
            if self._used < self.seconds:
                told = f"did not return: it waited for {self._waited:g} s"
            self._used = self._waited = 0.0
            raise HookTimeout(told)

    def _arm(self) -> None:
        """Write the stack after some time, unless a tick interrupts the thread before then."""
        if sys.__stderr__ is None or not _Call.may_arm:
            return
        with suppress(OSError, ValueError):  # stderr is not a file
            faulthandler.dump_traceback_later(_DEAF * self.seconds, file=sys.__stderr__)
            self.has_armed = True
