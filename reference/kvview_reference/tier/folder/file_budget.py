"""The budget of a folder, counted for all processes that write there (TIER-8).

1. The count of bytes is in a file that all processes share. The count grows before a file is
   renamed to its final name, and shrinks after a file was removed. So if a process is killed, the
   count may be too high, but never too low.
2. A process that opens a folder removes the half-written files whose locks are free, because the
   processes that wrote them are gone. If no other process has the folder open, it counts the files
   again, but only if the count is not reliable, because it is damaged, or because the machine was
   restarted before a process had closed the folder. So a folder of any size opens without delay.
3. The files that were used longest ago are removed to make room; see ``eviction``.
4. If another process keeps a lock and does nothing, the call fails, and later calls fail
   immediately until the lock is released. Processes take turns through a second lock, because a
   process that tries a lock at intervals would lose it to the process that has just released it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvview_reference.tier.folder.eviction import OldestFiles
from kvview_reference.tier.folder.file_lock import lock_file
from kvview_reference.tier.folder.store_folder import NOTE, SHARDS, StoreFolder

_COUNT = struct.Struct("<qq16s")  # bytes of files, bytes reserved, boot of the machine
_SUM = struct.Struct("<I")
_PATIENCE = 10.0  # seconds to wait for a process that has a lock and does nothing
_CLOSED, _UNKNOWN = b"closed".ljust(16), b"unknown".ljust(16)


@dataclass(slots=True)
class _Count:
    stored: int
    reserved: int
    boot: bytes

    @property
    def used(self) -> int:
        return self.stored + self.reserved


class FileBudget:
    """The files of one namespace, and the bytes that they may take.

    Args:
        folder: Folder of the namespace, which has a folder ``half``.
        max_bytes: Maximum number of bytes of all files of the store together; None for no limit.

    Raises:
        OSError: The files of the folder cannot be opened, locked or written.
    """

    def __init__(self, folder: StoreFolder, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._last_used = 0
        self.oldest = OldestFiles(folder, self._show_life)
        """The files that can be removed to make room."""
        self._folder = folder
        self._mutex = threading.Lock()
        self._patience = _PATIENCE
        with ExitStack() as on_error:
            flags = os.O_RDWR | os.O_CREAT
            self._alive = folder.open("lock", flags)
            on_error.callback(os.close, self._alive)
            self._turn = folder.open("turn", flags)
            on_error.callback(os.close, self._turn)
            is_alone = self._is_alone()
            if is_alone and folder.has("budget") and folder.stat("budget").st_nlink > 1:
                folder.unlink("budget")  # it may be a file outside the folder too
            self._counter = folder.open("budget", flags)
            on_error.callback(os.close, self._counter)
            self._begin(is_alone)
            on_error.pop_all()
        self._is_open = True

    def _begin(self, is_alone: bool) -> None:
        with self._counted() as count:
            removed, kept = self._remove_half_files(is_alone)
            count.reserved = kept if is_alone else max(0, count.reserved - removed)
            if is_alone:
                boot = _boot_of_machine()
                if count.boot not in (boot, _CLOSED) or boot == _UNKNOWN:
                    count.stored = self._count_again().stored
                count.boot = boot
            self._evict(count, 0)
        if is_alone:
            os.fsync(self._counter)  # otherwise it may appear closed after a power cut
        lock_file(self._alive, fcntl.LOCK_SH, _PATIENCE, self._counter)

    def _remove_half_files(self, is_alone: bool) -> tuple[int, int]:
        """Remove files without a living writer; return the bytes of removed and of other files."""
        removed = kept = 0
        for path, state in self._folder.files("half"):
            if not (is_alone or state.st_size):
                continue  # a process may be about to lock it
            try:
                file = self._folder.open(path, os.O_RDWR)
                try:
                    lock_file(file, fcntl.LOCK_EX, 0.0)
                    removed += self._folder.unlink(path)
                finally:
                    os.close(file)
            except OSError:
                kept += state.st_size
        return removed, kept

    def reserve(self, num_bytes: int) -> bool:
        """Make room for a file that is about to be written; return False if this is impossible."""
        with self._counted() as count:
            if self.max_bytes is not None:
                if num_bytes > self.max_bytes:
                    return False
                self._evict(count, num_bytes)
                if count.used + num_bytes > self.max_bytes:
                    return False
            count.reserved += num_bytes
            return True

    def commit(self, half: str, path: str, num_bytes: int) -> None:
        """Rename a complete file to its final name; a file that already has this name is kept.

        Raises:
            OSError: The file cannot be renamed; the caller must call :meth:`give_up`.
        """
        with self._counted() as count:
            if self._folder.has(path):
                self._folder.unlink(half)
                count.reserved -= num_bytes
                return
            self._move(count, num_bytes)
            # Before the rename, so that a killed process leaves the count too high.
            self._write(count)
            try:
                self._name(half, path)
            except BaseException:
                self._move(count, -num_bytes)
                raise

    def give_up(self, half: str, num_bytes: int) -> None:
        """Remove a file that will not be renamed; if it cannot be removed, its bytes still count.

        Raises:
            OSError: The file cannot be removed, or the count cannot be changed.
        """
        with suppress(FileNotFoundError):
            self._folder.unlink(half)
        with self._counted() as count:
            count.reserved -= num_bytes

    def remove(self, path: str) -> None:
        """Remove a file, if it exists.

        Raises:
            OSError: The file cannot be removed.
        """
        with self._counted() as count, suppress(FileNotFoundError):
            count.stored -= self._folder.unlink(path)

    def used(self, path: str) -> None:
        """Record that a file was written, read or looked up again."""
        if self.max_bytes is not None:
            with suppress(OSError):  # more precise than the time that the system would set
                self._folder.set_time_of_use(path, time.time_ns())

    @property
    def used_bytes(self) -> int:
        """The bytes that all processes have counted, or the last count if one is being changed."""
        if self._mutex.acquire(blocking=False):
            try:
                if self._is_open and (count := self._read()) is not None:
                    self._last_used = count.used
            finally:
                self._mutex.release()
        return self._last_used

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        with self._mutex:
            is_open, self._is_open = self._is_open, False
        if not is_open:
            return
        with suppress(OSError):
            if self._is_alone():
                with self._counted() as count:
                    count.boot = _CLOSED
                os.fsync(self._counter)
        for file in (self._alive, self._turn, self._counter):
            os.close(file)

    def _is_alone(self) -> bool:
        try:
            lock_file(self._alive, fcntl.LOCK_EX, 0.0)
        except TimeoutError:
            return False
        return True

    @contextmanager
    def _counted(self) -> Iterator[_Count]:
        """Lock out all other threads and processes, yield the count, and write it at the end.

        Raises:
            OSError: The count cannot be locked, read or written.
        """
        with self._mutex:
            self._lock()
            try:
                count = self._read() or self._count_again()
                try:
                    yield count
                finally:
                    self._last_used = count.used
                    self._write(count)
            finally:
                fcntl.flock(self._counter, fcntl.LOCK_UN)

    def _lock(self) -> None:
        try:
            lock_file(self._turn, fcntl.LOCK_EX, self._patience, self._counter)
            try:
                lock_file(self._counter, fcntl.LOCK_EX, self._patience, self._counter)
            finally:
                fcntl.flock(self._turn, fcntl.LOCK_UN)
        except TimeoutError:
            self._patience = 0.0
            raise
        self._patience = _PATIENCE

    def _read(self) -> _Count | None:
        found = os.pread(self._counter, _COUNT.size + _SUM.size, 0)
        head, check = found[: _COUNT.size], found[_COUNT.size :]
        if len(check) != _SUM.size or _SUM.unpack(check)[0] != zlib.crc32(head):
            return None
        return _Count(*_COUNT.unpack(head))

    def _write(self, count: _Count) -> None:
        head = _COUNT.pack(count.stored, count.reserved, count.boot)
        os.pwrite(self._counter, head + _SUM.pack(zlib.crc32(head)), 0)

    def _name(self, half: str, path: str) -> None:
        try:
            self._folder.rename(half, path)
        except FileNotFoundError:
            self._folder.make_folder(os.path.dirname(path))
            self._folder.rename(half, path)

    def _move(self, count: _Count, num_bytes: int) -> None:
        count.stored += num_bytes
        count.reserved -= num_bytes

    def _count_again(self) -> _Count:
        """Count the files that exist now, including the store's own notes."""
        os.ftruncate(self._counter, _COUNT.size + _SUM.size)
        found = _Count(0, 0, _UNKNOWN)
        for note in (NOTE, "budget"):
            with suppress(OSError):
                found.stored += self._folder.stat(note).st_size
        for shard in SHARDS:
            self._show_life()
            found.stored += sum(state.st_size for _, state in self._folder.entries(shard))
        found.reserved = sum(state.st_size for _, state in self._folder.files("half"))
        return found

    def _show_life(self) -> None:
        """Signal to the processes that wait for the count that this process is still at work."""
        with suppress(OSError):
            os.utime(self._counter)

    def _evict(self, count: _Count, num_bytes: int) -> None:
        """Remove files to make room for this number of bytes, as far as possible."""
        missing = 0 if self.max_bytes is None else count.used + num_bytes - self.max_bytes
        if missing <= 0 or self.oldest.is_resting:
            return
        removed = self.oldest.remove(missing)
        count.stored -= removed
        if removed < missing:  # a count that is too high shows now
            count.stored = min(count.stored, self._count_again().stored)


def _boot_of_machine() -> bytes:
    """Return a value that differs after each start of the machine, if the system has one."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return _UNKNOWN
