"""Threads that yield to other threads before each of their lines, so that races become visible.

The time between two lines of the code under test is a microsecond, so another thread interferes
there once in a million runs. Here it is as long as another thread needs.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_BREATH = 0.0002  # seconds before each line
breaths = [0]
"""How often a thread let others go on: one that breathes is no thread that sleeps."""

_NOT_TESTED = sys.stdlib_module_names | {"kvview", "numpy", "torch"}


def breathing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that yields to other threads before each line, except under a debugger."""

    def call(*args: Any) -> Any:
        if sys.gettrace() is not None:
            return function(*args)
        sys.settrace(_breathe)
        try:
            return function(*args)
        finally:
            sys.settrace(None)

    return call


@contextmanager
def new_threads_breathe() -> Iterator[None]:
    """Make threads that are started in the block yield at each line, unless under a debugger."""
    before = threading.gettrace()
    if before is None:
        threading.settrace(_breathe)
    try:
        yield
    finally:
        threading.settrace(before)


def go_on() -> None:
    """The calling thread breathes no more."""
    if sys.gettrace() is _breathe:
        sys.settrace(None)


def _breathe(frame: FrameType, event: str, arg: object) -> Any:
    if event == "line":
        breaths[0] += 1
        time.sleep(_BREATH)
    elif frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_TESTED:
        return None
    return _breathe
