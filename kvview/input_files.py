"""Reading of untrusted files: regular files only, with limits on memory.

1. A folder, a device, a pipe or a socket is refused before it is opened, because reading such a
   file may block or never end.
2. A file is read up to the length that it had when it was opened, so reading ends even if the
   file grows. A file without a reported length (``/proc``) is refused.
3. gzip is recognised by its first bytes and decompressed row by row.
4. Every failure to read is an ``OSError`` with a reason.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from typing_extensions import Buffer, override

MAX_FILE_BYTES = 64 << 20
"""Largest file that is read as a whole."""

DAMAGED_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)
"""Exceptions of the gzip reader for data that is cut off or damaged; one is an ``OSError``."""

_READ_AT_ONCE = 1 << 17
_SKIPPED_AT_ONCE = 1 << 20


class InputFile(io.RawIOBase):
    """A regular file, up to the length that it had when it was opened.

    Args:
        path: Path of the file.

    Attributes:
        num_bytes: The length of the file in bytes.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        try:
            _require_regular(os.stat(path), path)
            # The path may name a pipe by now; opening a pipe must not block.
            self._file = io.FileIO(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)))
        except ValueError as error:  # a null byte, or a surrogate that no file name can hold
            raise OSError(errno.EINVAL, str(error), os.fspath(path)) from None
        found = os.fstat(self._file.fileno())
        try:
            _require_regular(found, path)
            if not found.st_size:
                self._require_empty(path)
        except OSError:
            self.close()
            raise
        self.num_bytes = found.st_size
        self._num_read = 0

    def _require_empty(self, path: str | os.PathLike[str]) -> None:
        """Refuse a file of length 0 that has bytes, as files of ``/proc`` do."""
        if self._file.read(1):
            if not os.fstat(self._file.fileno()).st_size:
                reason = "the system does not report its length"
                raise OSError(errno.EINVAL, reason, os.fspath(path))
            self._file.seek(0)  # the file has grown since it was opened

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer, /) -> int:
        free = memoryview(buffer).cast("B")
        number = self._file.readinto(free[: self.num_bytes - self._num_read]) or 0
        self._num_read += number
        return number

    @override
    def tell(self) -> int:
        return self._num_read

    @override
    def close(self) -> None:
        self._file.close()
        super().close()


def _require_regular(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "a folder, not a file", os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def read_file(path: str | os.PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a file as a whole.

    Raises:
        OSError: The file cannot be read, or is longer than ``max_bytes``.
    """
    file = InputFile(path)
    with io.BufferedReader(file) as reader:
        if file.num_bytes > max_bytes:
            raise OSError(errno.EFBIG, f"longer than {max_bytes:,} bytes", os.fspath(path))
        return reader.read(file.num_bytes)


@contextmanager
def open_rows(path: str | os.PathLike[str]) -> Iterator[tuple[InputFile, BinaryIO]]:
    """Open a file of rows, compressed by gzip or not.

    Returns:
        The file, and a reader of its decompressed rows.

    Raises:
        OSError: The file cannot be opened.
    """
    file = InputFile(path)
    with io.BufferedReader(file, _READ_AT_ONCE) as reader:
        if reader.peek(2)[:2] != b"\x1f\x8b":
            yield file, cast(BinaryIO, reader)
            return
        with gzip.GzipFile(fileobj=reader) as rows:
            yield file, cast(BinaryIO, rows)


def read_rows(rows: BinaryIO, longest: int) -> Iterator[bytes | None]:
    """Yield each row with its line break, or None for a row longer than ``longest`` bytes.

    Raises:
        OSError: The file can no longer be read, or is damaged (:data:`DAMAGED_GZIP`).
    """
    while row := rows.readline(longest + 1):
        if len(row) <= longest:
            yield row
            continue
        while row and not row.endswith(b"\n"):
            row = rows.readline(_SKIPPED_AT_ONCE)
        yield None
