"""Threads that yield to other threads before each line of code, so that races occur often.

The time between two lines of the code under test is a microsecond, so another thread runs in
between once in a million runs. With these functions a thread yields between two lines, so other
threads can run between any two lines.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_SECONDS_PER_YIELD = 0.0002
_TASKS = "/proc/self/task"
_PATIENCE = 0.02  # seconds
_BETWEEN_LOOKS = 0.00005  # seconds
_LINES_PER_YIELD = 3  # as all threads count together, each line has its turns
num_yields = [0]
"""Number of lines so far, in a list of one item; a thread that yields is not asleep."""

_NOT_TESTED = sys.stdlib_module_names | {"kvview", "numpy", "torch"}


def yielding_often(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that yields to other threads before each line, except under a debugger."""

    def call(*args: Any) -> Any:
        if sys.gettrace() is not None:
            return function(*args)
        sys.settrace(_yield_often)
        try:
            return function(*args)
        finally:
            sys.settrace(None)

    return call


@contextmanager
def new_threads_yield_often() -> Iterator[None]:
    """Let threads that the ``with`` block starts yield at each line, except under a debugger."""
    before = threading.gettrace()
    if before is None:
        threading.settrace(_yield_often)
    try:
        yield
    finally:
        threading.settrace(before)


def stop_yielding() -> None:
    """Stop the yields of the calling thread."""
    if sys.gettrace() is _yield_often:
        sys.settrace(None)


def wait_until_asleep() -> None:
    """Wait until each other thread waits for something, so that a loaded machine decides nothing.

    A thread that never sleeps is left alone after a short time.
    """
    before, deadline = None, time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        time.sleep(_BETWEEN_LOOKS)  # a thread that waits for the interpreter gets it
        frames = sys._current_frames()
        now = num_yields[0], [(ident, frame.f_lasti) for ident, frame in frames.items()]
        if now == before and all_sleep():
            return
        before = now


def all_sleep() -> bool:
    """Whether the operating system reports that no other thread of this process runs."""
    others = set(os.listdir(_TASKS)) - {str(threading.get_native_id())}
    for thread in others:
        with suppress(OSError), open(f"{_TASKS}/{thread}/stat", "rb") as stat:
            if stat.read().rpartition(b") ")[2][:1] in b"RD":
                return False
    return True


def _yield_often(frame: FrameType, event: str, arg: object) -> Any:
    if event == "line":
        num_yields[0] += 1
        if num_yields[0] % _LINES_PER_YIELD == 0:
            time.sleep(_SECONDS_PER_YIELD)
    elif frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_TESTED:
        return None
    return _yield_often
