"""Threads of a connector: where they wait, the errors that end them, and those that it leaves.

1. If a call does not return, the message has the lines of the author's code at which threads and
   tasks wait.
2. After a thread dies, a job may never be reported, or a hook may wait forever. So the exception
   that ended a thread is reported as the failure of the run, even if other laws were broken.
3. A thread pool that all instances share is not a leak, although its threads keep running. So a run
   that leaves threads is repeated more often than such a pool has threads, and CONN-12 is broken
   only if each repetition leaves new threads.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from traceback import walk_stack
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from kvview.connector.hook_errors import place_in
from kvview.errors import one_line
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.connector.result import SimulationResult, failure_at_the_end
from kvview.testing.supervision import watchdog
from kvview.testing.supervision.source_lines import at_line, with_source

_MOST = 5

SHUTDOWN_RETURNS = (
    "End or cancel the transfers in flight in shutdown, and wait for a thread, a queue or a "
    "service with a short timeout."
)
HOOK_RETURNS = (
    "Wait for a lock, a queue, a thread or a service with a short timeout, and report a job that "
    "cannot end as failed."
)


def hint_for(hook: str) -> str:
    """Return the remedy for a hook that does not return."""
    return SHUTDOWN_RETURNS if hook == "shutdown" else HOOK_RETURNS


def where_all_wait(hook_thread: int) -> str:
    """Return the line of the author's code at which each thread and each task waits.

    Args:
        hook_thread: Identifier of the thread that calls the hook.

    Returns:
        ``"; the hook waits at a.py:7: ..., thread 'copies' waits at a.py:31: ..."``; empty if no
        thread is in the author's code.
    """
    found = dict.fromkeys(_waiting(hook_thread))
    return f"; {', '.join([*found][:_MOST])}" if found else ""


def _waiting(hook_thread: int) -> Iterator[str]:
    names = {thread.ident: f"thread {thread.name!r}" for thread in threading.enumerate()}
    names[hook_thread] = "the hook"
    for ident, innermost in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        frames = [frame for frame, _ in walk_stack(innermost)][::-1]
        if place := place_in((frame, frame.f_lineno) for frame in frames):
            yield f"{names.get(ident, 'a thread')} waits at {with_source(place)}"
        for frame in frames:
            if isinstance(loop := frame.f_locals.get("self"), asyncio.AbstractEventLoop):
                yield from _tasks(loop)
                break


def _tasks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    """Yield the lines at which the tasks of an event loop wait."""
    tasks: set[asyncio.Task[Any]] = set()
    with suppress(RuntimeError):  # the set of tasks changed during the iteration
        tasks = asyncio.all_tasks(loop)
    for task in tasks:
        frames: list[FrameType] = []
        awaited: Any = task.get_coro()
        while (frame := getattr(awaited, "cr_frame", None)) is not None:
            frames.append(frame)
            awaited = awaited.cr_await
        if place := place_in((frame, frame.f_lineno) for frame in frames):
            yield f"a task waits at {with_source(place)}"


_noted: list[str] = []


@contextmanager
def noting_thread_errors() -> Iterator[None]:
    """Record exceptions that end threads in the ``with`` block, instead of a print to stderr."""

    def note(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or isinstance(args.exc_value, SystemExit):
            return
        name = args.thread.name if args.thread else "?"
        error = f"{one_line(args.exc_value)}{at_line(args.exc_value)}"
        _noted.append(f"thread {name!r} died of {error}")
        watchdog.thread_died(_noted[-1])

    before, threading.excepthook = threading.excepthook, note
    _noted.clear()
    watchdog.thread_died("")
    try:
        yield
    finally:
        threading.excepthook = before


def with_thread_error(result: SimulationResult) -> SimulationResult:
    """Replace the failure of a result by the exception that ended a thread, if a thread died."""
    if not _noted:
        return result
    failure = result.failure or failure_at_the_end(result, "CONN-3", "")
    failure = replace(failure, law="CONN-3", message=_noted[0], is_hook_error=True, hint=None)
    return replace(result, failure=failure)


def raise_thread_error() -> None:
    """Raise the exception that ended a thread of this process.

    Raises:
        InvariantBroken: CONN-3 is broken; the message has the exception and its place.
    """
    if _noted:
        raise InvariantBroken("CONN-3", _noted[0], is_hook_error=True)


_PATIENCE = 0.2  # seconds in which the threads of a half that was shut down may end
_DEFAULT_POOL = min(32, (os.cpu_count() or 1) + 4)  # threads of a concurrent.futures pool
_TIMES = _DEFAULT_POOL + 4

_leaks: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


class ThreadWatch:
    """Finds the threads that were started after this object was made."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def left(self) -> list[str]:
        """Wait for these threads to end; returns the names of threads that do not end."""
        deadline = time.monotonic() + _PATIENCE
        new = [thread for thread in threading.enumerate() if thread not in self._before]
        for thread in new:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return sorted(thread.name for thread in new if thread.is_alive())


def leaves_threads(connector_class: type, play_again: Callable[[], list[str]]) -> bool:
    """Whether every run of a class leaves threads; called after a run that has left threads.

    Args:
        connector_class: The connector; the run is repeated only at the first call for this class.
        play_again: Repeats the run, and returns the names of the new threads that it leaves.
    """
    if connector_class not in _leaks:
        _leaks[connector_class] = all(play_again() for _ in range(_TIMES))
    return _leaks[connector_class]
