"""Threads that a connector's halves leave running after their shutdown (CONN-12).

A thread pool that all instances share is not a leak, although its threads keep running. So a run
that leaves threads is repeated more often than such a pool has threads, and the law is broken only
if each repetition leaves new threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

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
