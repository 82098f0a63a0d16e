"""Threads that a connector's halves leave behind when they are shut down (CONN-12).

A pool of threads that all instances share is no leak: what stays after one run may be it. So
a run that leaves threads is played again and again, and each time must leave new ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

_PATIENCE = 0.2  # seconds in which threads that were told to end may do so
_TIMES = 36  # in a row; the threads that Python gives a pool by default are fewer

_leaks: WeakKeyDictionary[type, bool] = WeakKeyDictionary()  # classes that were looked at


class ThreadWatch:
    """The threads that begin after it was made."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def left(self) -> list[str]:
        """Names of those that do not end."""
        deadline = time.monotonic() + _PATIENCE
        new = [thread for thread in threading.enumerate() if thread not in self._before]
        for thread in new:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return sorted(thread.name for thread in new if thread.is_alive())


def leaves_threads(connector_class: type, play_again: Callable[[], list[str]]) -> bool:
    """Whether each run of a class leaves threads, after one has.

    Args:
        connector_class: Looked at once; what is found is remembered.
        play_again: Plays the run once more; names of the new threads that it leaves.
    """
    if connector_class not in _leaks:
        _leaks[connector_class] = all(play_again() for _ in range(_TIMES))
    return _leaks[connector_class]
