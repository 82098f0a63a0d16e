"""Request traces of real LLM traffic, read as a stream.

A trace is JSON Lines, gzip-compressed or not (told by the first bytes, not by the
name), in one of the schemas of ``trace_schemas``. Every row is validated before any
of its requests is yielded, and memory holds one row at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, get_args

from kvview.errors import ConfigError, KVViewError, TraceError
from kvview.input_files import DAMAGED_GZIP, InputFile, open_rows, read_rows
from kvview.urls import DOCS_URL
from kvview_reference.replay.trace_schemas import (
    RowError,
    SchemaName,
    TraceRequest,
    parse,
    recognise,
)

__all__ = ["MAX_ROW_BYTES", "Lost", "OnError", "SchemaName", "Trace", "TraceRequest", "open_trace"]

OnError = Callable[[TraceError], object]
"""Told of each malformed row; the reader then goes on with the next one."""

MAX_ROW_BYTES = 32 * 2**20
"""Longest row that is read: a file without newlines must not fill the memory."""

MAX_ROW_VALUES = 2**22
"""Values of a row, as :func:`_num_values` counts them: a value takes more memory than its text."""

_UNITS = {b",": 1, b'"': 2, b"[": 2, b"{": 8}
_MAX_LOST = 10_000
_SHOWN = 20


class TraceCutError(TraceError):
    """From a line on, nothing of a file can be read."""

    rest: str = ""
    """What is lost, beside the line itself."""


class _CutError(RowError):
    """The same, while file and line are unknown."""


@dataclass
class Lost:
    """Parts of a trace that could not be read.

    Args:
        rows: The first 10,000 rows and files, and the reason of each.
        cut: Files of which all that follows a line is lost too: how much is not known.
        num_rows: All rows and files that could not be read.
    """

    rows: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    num_rows: int = 0

    def add(self, error: KVViewError) -> bool:
        """Note one; True for the first few, which are worth a line on the terminal."""
        self.num_rows += 1
        if self.num_rows <= _MAX_LOST:
            self.rows.append(str(error))
        if isinstance(error, TraceCutError) and len(self.cut) < _MAX_LOST:
            self.cut.append(error.rest)
        return self.num_rows <= _SHOWN

    def summary(self, title: str) -> str:
        """The last line of a command."""
        num_cut = len(self.cut)
        rest = self.cut[0] if num_cut == 1 else f"the rest of {num_cut} files"
        told = f"lost: {self.num_rows} of {title} could not be read"
        return f"{told}, nor {rest}" if num_cut else told


_FIELDS_ARE_IN = f"The schemas {', '.join(get_args(SchemaName))}: {DOCS_URL}replay/#the-trace"
_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


@contextmanager
def _reading(path: str) -> Iterator[tuple[InputFile, BinaryIO]]:
    """The file, and the decompressed rows in it."""
    try:
        with open_rows(path) as opened:
            yield opened
    except OSError as error:
        raise ConfigError(f"cannot read trace {path!r}: {error.strerror}") from error


class Trace:
    """A trace of a known schema; made by :func:`open_trace`. Each iteration reads it anew.

    Attributes:
        path: The file.
        schema: Name of the schema.
        block_size: Tokens per hash id.
        has_times: Whether its rows say when they came.
        total_bytes: Size of the file, compressed if it is.
        bytes_read: How many of ``total_bytes`` the latest iteration has read.
    """

    def __init__(self, path: str, on_error: OnError | None, max_row_bytes: int) -> None:
        self.path = path
        self.bytes_read = 0
        self._on_error = on_error
        self._max_row_bytes = max_row_bytes
        with _reading(path) as (file, rows):
            self.total_bytes = file.num_bytes
            self.schema, self.block_size, self.has_times = self._find_schema(rows)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Requests in file order; inside a ``cc-traces`` session by arrival.

        Raises:
            TraceError: A row is malformed and ``on_error`` is None.
            ConfigError: The file can no longer be read.
        """
        with _reading(self.path) as (file, rows):
            for line, row in self._rows(rows):
                self.bytes_read = file.tell()
                try:
                    requests = self._requests(line, row)
                except RowError as error:
                    self._report(line, error)
                else:
                    yield from requests
            self.bytes_read = file.tell()

    def _requests(self, line: int, row: bytes | RowError) -> list[TraceRequest]:
        if isinstance(row, RowError):
            raise row
        block_size, requests, has_time = parse(row, line, self.schema)
        if has_time != self.has_times:
            what = (
                "missing, and the first row has one" if self.has_times else "the first row has none"
            )
            raise RowError(what, "timestamp")
        if block_size != self.block_size:
            raise RowError(f"{block_size} in a trace of {self.block_size}", "block_size")
        return requests

    def _find_schema(self, rows: BinaryIO) -> tuple[SchemaName, int, bool]:
        """Schema, block size and whether there are times, of the first whole row.

        Iterating reports those before it.
        """
        problem = "no rows"
        for line, row in self._rows(rows):
            try:
                if isinstance(row, RowError):
                    raise row
                schema = recognise(row)
                block_size, _, has_time = parse(row, line, schema)
            except RowError as error:
                if self._on_error is None:
                    self._report(line, error)
                if problem == "no rows":
                    problem = f"no row can be read; line {line}: {error}"
            else:
                return schema, block_size, has_time
        raise ConfigError(f"cannot read trace {self.path!r}: {problem}. {_FIELDS_ARE_IN}")

    def _report(self, line: int, error: RowError) -> None:
        where = f"{self.path}:{line}: {error}"
        report = TraceCutError(where) if isinstance(error, _CutError) else TraceError(where)
        if isinstance(report, TraceCutError):
            report.rest = f"all that follows line {line - 1} of {os.path.basename(self.path)}"
        if self._on_error is None:
            raise report from None
        self._on_error(report)

    def _rows(self, rows: BinaryIO) -> Iterator[tuple[int, bytes | RowError]]:
        """Line, from 1, and row; blank lines are skipped, damaged gzip data is the end."""
        line = 0
        try:
            for line, row in enumerate(read_rows(rows, self._max_row_bytes), 1):
                if row is None:
                    yield line, RowError(f"row longer than {self._max_row_bytes} bytes")
                    continue
                if line == 1:
                    row = row.removeprefix(b"\xef\xbb\xbf")
                if _num_values(row) > MAX_ROW_VALUES:
                    yield line, RowError(f"row of more than {MAX_ROW_VALUES:,} values")
                elif row and not row.isspace():
                    yield line, row.rstrip(b"\r\n")
        except DAMAGED_GZIP as error:
            yield line + 1, _CutError(f"gzip data truncated or damaged from here on: {error}")


def _num_values(row: bytes) -> int:
    """Values of a row of JSON, counted without parsing it, in units of what a number takes."""
    return sum(row.count(mark) * units for mark, units in _UNITS.items())


class TraceFolder(Trace):
    """The files of a folder as one trace, by name: as cc-traces come, a session each.

    A file that cannot be read, or is of another schema or block size, is a malformed row.
    """

    def __init__(self, path: str, on_error: OnError | None, max_row_bytes: int) -> None:
        names = sorted(name for name in os.listdir(path) if name.endswith(_SUFFIXES))
        if not names:
            raise ConfigError(f"cannot read trace {path!r}: no file in it ends in .json(l)(.gz)")
        self.path = path
        self.bytes_read = self.total_bytes = 0
        self._on_error = on_error
        self._files: list[Trace] = []
        self._errors: list[TraceError] = []
        for name in names:
            try:
                file = Trace(os.path.join(path, name), on_error, max_row_bytes)
                self._add(file)
            except ConfigError as error:
                if on_error is None:
                    raise
                self._errors.append(TraceError(str(error)))
        if not self._files:
            raise ConfigError(f"cannot read trace {path!r}: {self._errors[0]}")

    def _add(self, file: Trace) -> None:
        if not self._files:
            self.schema, self.block_size = file.schema, file.block_size
            self.has_times = file.has_times
        if file.has_times != self.has_times:
            raise ConfigError(f"{file.path}: only some files of this trace have timestamps")
        if (file.schema, file.block_size) != (self.schema, self.block_size):
            raise ConfigError(
                f"{file.path}: {file.schema} in blocks of {file.block_size}, and {self.schema} in "
                f"blocks of {self.block_size} before it"
            )
        self._files.append(file)
        self.total_bytes += file.total_bytes

    def __iter__(self) -> Iterator[TraceRequest]:
        """Requests, a file after the other."""
        for error in self._errors:
            if self._on_error is not None:
                self._on_error(error)
        before = 0
        for file in self._files:
            for request in file:
                self.bytes_read = before + file.bytes_read
                yield request
            before += file.total_bytes
            self.bytes_read = before


def open_trace(
    path: str | os.PathLike[str],
    *,
    on_error: OnError | None = None,
    max_row_bytes: int = MAX_ROW_BYTES,
) -> Trace:
    """Open a trace of any known schema.

    Args:
        path: JSON Lines, gzip-compressed or not; or a folder of such files.
        on_error: Told of each malformed row, once per iteration, and the row is
            skipped; None raises at the first.
        max_row_bytes: Longer rows, decompressed, are malformed.

    Returns:
        The trace, before its first row.

    Raises:
        ConfigError: The file cannot be read, is empty, or no row of it can be read.
        TraceError: The first row is malformed and ``on_error`` is None.
    """
    kind = TraceFolder if os.path.isdir(path) else Trace
    return kind(os.fspath(path), on_error, max_row_bytes)
