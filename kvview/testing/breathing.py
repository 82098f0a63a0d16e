"""Threads that let the others go on before each of their lines: what a race needs to be seen.

What lies between two lines of the code under test takes a microsecond, and another thread hits
it once in a million times. Here it takes as long as another thread needs.
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
    """A function that lets other threads go on before each line; as it is under a debugger."""

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
    """Threads that are started in the block let others go on; as they are under a debugger."""
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
