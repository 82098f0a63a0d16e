"""Exceptions that end a thread of a connector.

After a thread dies, a job may never be reported, or a hook may wait forever. So the exception that
ended a thread is reported as the failure of the run, even if other laws were broken.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvview.errors import one_line
from kvview.testing import watchdog
from kvview.testing.connector.aging import failure_at_the_end
from kvview.testing.connector.invariants import InvariantBroken
from kvview.testing.connector.result import SimulationResult
from kvview.testing.source_lines import at_line

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
