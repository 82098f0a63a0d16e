"""How much a folder may hold, counted for all processes that write there (TIER-8).

1. Bytes are reserved before they are written, in a counter that processes share. A process
   that is killed leaves a count too high, never one too low.
2. Whoever opens a folder that nobody else has open removes what was half-written, and counts
   anew.
3. What was used longest ago is evicted first: each process knows its own uses, and the times
   of files that others wrote.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_COUNT = struct.Struct("<Q")
_SPARE_SHARE = 100  # of the budget is made free at once


class FileBudget:
    """The files of one namespace, and what they may take.

    Args:
        folder: Of the namespace.
        max_bytes: Of all files in it together, None for no limit.
    """

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.used_bytes: int | None = None
        """What was counted last, by this process; None without a limit."""
        self._folder = str(folder)
        self._mutex = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # used longest ago first
        self._alive = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._counter = os.open(folder / "budget", os.O_RDWR | os.O_CREAT, 0o600)
        self._is_open = True
        is_alone = self._is_alone()
        if is_alone:
            for half in os.scandir(folder / "half"):
                os.unlink(half.path)
        if max_bytes is not None:
            with self._counted() as used:
                found = self._scan()
                total = sum(size for _, size in found.values()) + _bytes_of_files(self._folder)
                for path, (_, size) in sorted(found.items(), key=_use):
                    self._sizes[path] = size
                self._set(self._evict(total if is_alone else max(used, total), 0))
        fcntl.flock(self._alive, fcntl.LOCK_SH)

    def reserve(self, num_bytes: int) -> bool:
        """Make room for a file that is about to be written; False if there can be none."""
        if self.max_bytes is None:
            return True
        with self._mutex, self._counted() as used:
            used = self._evict(used, num_bytes)
            if used + num_bytes > self.max_bytes:
                for path, (_, size) in sorted(self._scan().items(), key=_use):
                    self._sizes.setdefault(path, size)  # of other processes
                used = self._evict(used, num_bytes)
            has_room = used + num_bytes <= self.max_bytes
            self._set(used + num_bytes if has_room else used)
            return has_room

    def commit(self, half: str, path: str, num_bytes: int) -> None:
        """Give a file that is whole its name, unless somebody else was faster."""
        with self._mutex, self._counted() as used:
            if self.max_bytes is not None and os.path.exists(path):
                os.unlink(half)
                self._set(max(0, used - num_bytes))
                return
            try:
                os.rename(half, path)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.rename(half, path)
            if self.max_bytes is not None:
                self._sizes[path] = num_bytes

    def give_up(self, half: str, num_bytes: int) -> None:
        """A file will not be written."""
        with suppress(OSError):
            os.unlink(half)
        if self.max_bytes is not None:
            with self._mutex, self._counted() as used:
                self._set(max(0, used - num_bytes))

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        with self._mutex, self._counted() as used:
            self._set(max(0, used - self._unlink(path)))

    def used(self, path: str) -> None:
        """A file was read or asked for again."""
        if self.max_bytes is not None:
            with suppress(OSError):
                os.utime(path)  # for who opens the folder next
            with self._mutex:
                if path in self._sizes:
                    self._sizes.move_to_end(path)

    def close(self) -> None:
        """Let go of the folder; callable twice."""
        with self._mutex:
            if self._is_open:
                self._is_open = False
                os.close(self._alive)
                os.close(self._counter)

    def _is_alone(self) -> bool:
        try:
            fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    @contextmanager
    def _counted(self) -> Iterator[int]:
        """The count, while no other process may change it."""
        if self.max_bytes is None:
            yield 0
            return
        fcntl.flock(self._counter, fcntl.LOCK_EX)
        try:
            found = os.pread(self._counter, _COUNT.size, 0)
            yield _COUNT.unpack(found)[0] if len(found) == _COUNT.size else 0
        finally:
            fcntl.flock(self._counter, fcntl.LOCK_UN)

    def _set(self, used: int) -> None:
        if self.max_bytes is not None:
            self.used_bytes = used
            os.pwrite(self._counter, _COUNT.pack(used), 0)

    def _evict(self, used: int, num_bytes: int) -> int:
        assert self.max_bytes is not None, "else nothing is evicted"
        if used + num_bytes <= self.max_bytes:
            return used
        goal = self.max_bytes - num_bytes - self.max_bytes // _SPARE_SHARE
        while used > goal and self._sizes:
            used -= self._unlink(next(iter(self._sizes)))
        return max(0, used)

    def _unlink(self, path: str) -> int:
        """Remove a file; returns its size, 0 if it was gone."""
        known = self._sizes.pop(path, None)
        try:
            size = os.stat(path).st_size if known is None else known
            os.unlink(path)
        except OSError:
            return 0
        return size

    def _scan(self) -> dict[str, tuple[int, int]]:
        """Path of each entry to when it was used, and its size."""
        found = {}
        for shard in os.scandir(self._folder):
            if not shard.is_dir() or shard.name == "half":
                continue
            for entry in os.scandir(shard.path):
                with suppress(OSError):
                    status = entry.stat()
                    found[entry.path] = status.st_mtime_ns, status.st_size
        return found


def _use(item: tuple[str, tuple[int, int]]) -> int:
    return item[1][0]


def _bytes_of_files(folder: str) -> int:
    return (
        sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()) + _COUNT.size
    )
