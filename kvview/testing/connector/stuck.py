"""The lines of the author's code at which threads and tasks wait if a call does not return."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from traceback import walk_stack
from types import FrameType
from typing import Any

from kvview.connector.hook_errors import place_in
from kvview.testing.source_lines import with_source

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
