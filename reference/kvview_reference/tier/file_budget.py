"""How much a folder may hold, counted for all processes that write there (TIER-8).

1. The count is in a file that processes share. It grows before a file gets its name, and
   shrinks after one has gone: a process that is killed leaves it too high, never too low.
2. Whoever opens a folder that nobody else has open removes what was half-written. The files are
   counted anew only when the count cannot be believed: it is damaged, or the machine was started
   again and nobody had closed the folder. So a folder of any size opens at once.
3. What was used longest ago is evicted first, as the times of the files say, which every process
   sets. Of many files only those of a few shards are looked at, and the oldest of them go: there
   is no index, on the medium or in memory.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SHARDS = [f"{number:02x}" for number in range(256)]
"""Folders that the files of a namespace are spread over."""

_COUNT = struct.Struct("<qq16s")  # bytes of files, bytes reserved, boot of the machine
_SUM = struct.Struct("<I")
_CLOSED, _UNKNOWN = b"closed".ljust(16), b"unknown".ljust(16)
MODE = 0o600  # what is in them are prompts of users
_LOOKED_AT = 4096  # files, to find the oldest
_OLDEST_SHARE = 8  # of those that were looked at go, if there are others


@dataclass(slots=True)
class _Count:
    stored: int
    reserved: int
    boot: bytes

    @property
    def used(self) -> int:
        return self.stored + self.reserved


class FileBudget:
    """The files of one namespace, and what they may take.

    Args:
        folder: Of the namespace.
        max_bytes: Of all files in it together, None for no limit.
    """

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.used_bytes: int
        """What was counted last, by this process."""
        self.on_evicted: Callable[[str], object] = lambda path: None
        """Called with the path of each file that went to make room."""
        self._folder = str(folder)
        self._mutex = threading.Lock()
        self._oldest_first: deque[tuple[int, str]] = deque()  # time of use and path
        self._next_shard = os.getpid()
        self._alive = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, MODE)
        self._counter = os.open(folder / "budget", os.O_RDWR | os.O_CREAT, MODE)
        self._is_open = True
        is_alone = self._is_alone()
        if is_alone:
            for half in os.scandir(folder / "half"):
                os.unlink(half.path)
        with self._counted() as count:
            if is_alone:
                boot = _boot_of_machine()
                if count.boot not in (boot, _CLOSED) or boot == _UNKNOWN:
                    count.stored = self._count_anew().stored
                count.reserved, count.boot = 0, boot
            self._evict(count, 0)
        if is_alone:
            os.fsync(self._counter)  # else it may be found closed after a power cut
        fcntl.flock(self._alive, fcntl.LOCK_SH)

    def reserve(self, num_bytes: int) -> bool:
        """Make room for a file that is about to be written; False if there can be none."""
        with self._mutex, self._counted() as count:
            if self.max_bytes is not None:
                if num_bytes > self.max_bytes:
                    return False
                self._evict(count, num_bytes)
                if count.used + num_bytes > self.max_bytes:
                    return False
            count.reserved += num_bytes
            return True

    def commit(self, half: str, path: str, num_bytes: int) -> None:
        """Give a file that is whole its name; what is there already is kept.

        Raises:
            OSError: It cannot get its name; give it up.
        """
        with self._mutex, self._counted() as count:
            if os.path.exists(path):
                os.unlink(half)
                count.reserved -= num_bytes
                return
            count.stored += num_bytes
            count.reserved -= num_bytes
            self._write(count)  # before: who is killed in between leaves it too high
            _rename(half, path)

    def give_up(self, half: str, num_bytes: int) -> None:
        """A file will not be written."""
        with self._mutex, self._counted() as count:
            count.reserved -= num_bytes
            with suppress(OSError):
                os.unlink(half)

    def remove(self, path: str) -> None:
        """Remove a file, if it is there.

        Raises:
            OSError: It cannot be removed.
        """
        with self._mutex, self._counted() as count, suppress(FileNotFoundError):
            count.stored -= _unlinked(path)

    def used(self, path: str) -> None:
        """A file was written, read or asked for again."""
        if self.max_bytes is None:
            return
        now = time.time_ns()  # finer than what the system would set
        with suppress(OSError):
            os.utime(path, ns=(now, now))

    def close(self) -> None:
        """Let go of the folder; callable twice."""
        with self._mutex:
            if self._is_open:
                self._is_open = False
                if self._is_alone():
                    with suppress(OSError):
                        with self._counted() as count:
                            count.boot = _CLOSED
                        os.fsync(self._counter)
                os.close(self._alive)
                os.close(self._counter)

    def _is_alone(self) -> bool:
        try:
            fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    @contextmanager
    def _counted(self) -> Iterator[_Count]:
        """The count, while no other process may change it; it is written at the end."""
        fcntl.flock(self._counter, fcntl.LOCK_EX)
        try:
            count = self._read() or self._count_anew()
            try:
                yield count
            finally:
                self.used_bytes = count.used
                self._write(count)
        finally:
            fcntl.flock(self._counter, fcntl.LOCK_UN)

    def _read(self) -> _Count | None:
        found = os.pread(self._counter, _COUNT.size + _SUM.size, 0)
        head, check = found[: _COUNT.size], found[_COUNT.size :]
        if len(check) != _SUM.size or _SUM.unpack(check)[0] != zlib.crc32(head):
            return None
        return _Count(*_COUNT.unpack(head))

    def _write(self, count: _Count) -> None:
        head = _COUNT.pack(count.stored, count.reserved, count.boot)
        os.pwrite(self._counter, head + _SUM.pack(zlib.crc32(head)), 0)

    def _count_anew(self) -> _Count:
        """Of what is there now; the store's own notes count too."""
        os.ftruncate(self._counter, _COUNT.size + _SUM.size)
        found = _Count(0, 0, _UNKNOWN)
        for shard in (".", *SHARDS):
            for entry in _entries(f"{self._folder}/{shard}"):
                found.stored += entry.stat().st_size if entry.is_file() else 0
        for entry in _entries(f"{self._folder}/half"):
            found.reserved += entry.stat().st_size
        return found

    def _evict(self, count: _Count, num_bytes: int) -> None:
        """Make room for so many bytes, as far as there is something to evict."""
        while self.max_bytes is not None and count.used + num_bytes > self.max_bytes:
            path = self._oldest()
            if path is None:  # nothing is left: what is counted too high is known now
                count.stored = min(count.stored, self._count_anew().stored)
                return
            with suppress(OSError):
                count.stored -= _unlinked(path)
                self.on_evicted(path)

    def _oldest(self) -> str | None:
        """A file to evict, None if there is none."""
        while True:
            if not self._oldest_first:
                self._oldest_first.extend(self._look_for_old())
                if not self._oldest_first:
                    return None
            use, path = self._oldest_first.popleft()
            with suppress(OSError):
                if os.stat(path).st_mtime_ns == use:  # else somebody has used it since
                    return path

    def _look_for_old(self) -> list[tuple[int, str]]:
        """Those that were used longest ago, in their order: of all, or of the next shards."""
        found: list[tuple[int, str]] = []
        for _ in SHARDS:
            shard = SHARDS[self._next_shard % len(SHARDS)]
            self._next_shard += 1
            for entry in _entries(f"{self._folder}/{shard}"):
                with suppress(OSError):
                    found.append((entry.stat().st_mtime_ns, entry.path))
            if len(found) >= _LOOKED_AT:
                return sorted(found)[: len(found) // _OLDEST_SHARE]
        return sorted(found)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    with suppress(FileNotFoundError):
        yield from os.scandir(folder)


def _unlinked(path: str) -> int:
    """Remove a file; returns its size."""
    size = os.stat(path).st_size
    os.unlink(path)
    return size


def _rename(half: str, path: str) -> None:
    try:
        os.rename(half, path)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.rename(half, path)


def _boot_of_machine() -> bytes:
    """Another after each start of the machine, where that can be told."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return _UNKNOWN
