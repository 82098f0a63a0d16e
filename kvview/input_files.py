"""Reading of untrusted files: regular files only, with limits on memory.

1. A folder, a device, a pipe or a socket is refused before it is opened, and a file without a
   reported length (``/proc``) after that, because reading such a file may block or never end.
2. gzip is recognised by its first bytes and decompressed row by row.
3. Every failure to read is an ``OSError`` with a reason.
"""

from __future__ import annotations

import errno
import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import BinaryIO, cast

MAX_FILE_BYTES = 64 << 20
"""Largest file that is read as a whole."""

DAMAGED_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)
"""Exceptions of the gzip reader for data that is cut off or damaged; one is an ``OSError``."""

_SKIPPED_AT_ONCE = 1 << 20


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[BufferedReader]:
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            reason = "a folder, not a file" if stat.S_ISDIR(mode) else "not a regular file"
            raise OSError(errno.EINVAL, reason, os.fspath(path))
        opened = open(path, "rb")  # noqa: SIM115 - closed below
    except ValueError as error:  # a null byte, or a surrogate that no file name can hold
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from None
    with opened as file:
        if not os.fstat(file.fileno()).st_size and file.peek(1):
            reason = "the system does not report its length"
            raise OSError(errno.EINVAL, reason, os.fspath(path))
        yield file


def read_file(path: str | os.PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a file as a whole.

    Raises:
        OSError: The file cannot be read, or is longer than ``max_bytes``.
    """
    with _opened(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"longer than {max_bytes:,} bytes", os.fspath(path))
    return content


@contextmanager
def open_rows(path: str | os.PathLike[str]) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file of rows, compressed by gzip or not.

    Returns:
        The file, and a reader of its decompressed rows.

    Raises:
        OSError: The file cannot be opened.
    """
    with _opened(path) as file:
        if file.peek(2)[:2] != b"\x1f\x8b":
            yield file, file
            return
        with gzip.GzipFile(fileobj=file) as rows:
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
