"""Locks on files, which a stopped process may keep."""

from __future__ import annotations

import fcntl
import os
import time

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.001


def lock_file(file: int, kind: int, patience: float, watched: int | None = None) -> None:
    """Lock an open file; wait at most ``patience`` seconds for a process that does nothing.

    Args:
        file: Descriptor.
        kind: ``fcntl.LOCK_EX`` (exclusive) or ``fcntl.LOCK_SH`` (shared).
        patience: Seconds to wait, counted from the last change of the time of ``watched``.
        watched: Descriptor of a file that the holder of the lock touches while it works; None
            without such a file.

    Raises:
        TimeoutError: Another process keeps the lock.
        OSError: The file system has no locks.
    """
    last_sign = _time_of(watched)
    end, pause = time.monotonic() + patience, _FIRST_PAUSE
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if time.monotonic() >= end:
            sign, last_sign = last_sign, _time_of(watched)
            if sign == last_sign:
                raise TimeoutError(f"another process did not release its lock for {patience:g} s")
            end = time.monotonic() + patience
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _time_of(file: int | None) -> int:
    return 0 if file is None else os.fstat(file).st_mtime_ns
