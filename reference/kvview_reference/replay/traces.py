"""Request traces of real LLM traffic, read as a stream.

A trace is JSON Lines, gzip-compressed or not (recognised by the first bytes, not by the
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
"""Called with the error of each malformed row; the reader then continues with the next row."""

MAX_ROW_BYTES = 32 * 2**20
"""Bytes of the longest row that is read, so that a file without newlines cannot fill the memory."""

MAX_ROW_VALUES = 2**22
"""Maximum of values in a row, because a value takes more memory than its text."""

_UNITS = {b",": 1, b'"': 2, b"[": 2, b"{": 8}
_MAX_LOST = 10_000
_SHOWN = 20


class TraceCutError(TraceError):
    """An error after which the rest of a file cannot be read.

    Args:
        message: The reason.
        rest: The part that is lost, in addition to the line itself.
    """

    def __init__(self, message: str, rest: str) -> None:
        super().__init__(message)
        self.rest = rest


@dataclass
class Lost:
    """Parts of a trace that could not be read.

    Args:
        rows: The first 10,000 of these rows and files, each with its reason.
        cut: Files whose rest after a line is lost too, with an unknown number of rows.
        num_rows: Number of all rows and files that could not be read.
    """

    rows: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    num_rows: int = 0

    def add(self, error: KVViewError) -> bool:
        """Record a part, and return whether it is one of the first few, which are printed."""
        self.num_rows += 1
        if self.num_rows <= _MAX_LOST:
            self.rows.append(str(error))
        if isinstance(error, TraceCutError) and len(self.cut) < _MAX_LOST:
            self.cut.append(error.rest)
        return self.num_rows <= _SHOWN

    def summary(self, title: str) -> str:
        """Summarise the losses in the last line of a command."""
        num_cut = len(self.cut)
        rest = self.cut[0] if num_cut == 1 else f"the rest of {num_cut} files"
        summary = f"lost: {self.num_rows} of {title} could not be read"
        return f"{summary}, nor {rest}" if num_cut else summary


_FIELDS_ARE_IN = f"The schemas {', '.join(get_args(SchemaName))}: {DOCS_URL}replay/#the-trace"
_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


@contextmanager
def _reading(path: str) -> Iterator[tuple[InputFile, BinaryIO]]:
    """Open a file, and yield the file and its decompressed rows."""
    try:
        with open_rows(path) as opened:
            yield opened
    except OSError as error:
        raise ConfigError(f"cannot read trace {path!r}: {error.strerror}") from error


class Trace:
    """A trace of a known schema, made by :func:`open_trace`; each iteration reads it again.

    Attributes:
        path: The file.
        schema: Name of the schema.
        block_size: Number of tokens per hash id.
        has_times: Whether its rows have arrival times.
        total_bytes: Size of the file on disk, which may be compressed.
        bytes_read: Number of bytes of the file that the latest iteration has read.
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
        """Yield requests in the order of the file; within a ``cc-traces`` session, by arrival.

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
            raise RowError(
                "is missing, but the first row has it"
                if self.has_times
                else "is present, but the first row lacks it",
                "timestamp",
            )
        if block_size != self.block_size:
            raise RowError(f"{block_size} in a trace of {self.block_size}", "block_size")
        return requests

    def _find_schema(self, rows: BinaryIO) -> tuple[SchemaName, int, bool]:
        """Read the schema, the block size, and whether rows have times, from the first valid row.

        Malformed rows before this row are reported by each iteration.
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
        message = f"{self.path}:{line}: {error}"
        report = TraceError(message)
        if error.ends_file:
            rest = f"all that follows line {line - 1} of {os.path.basename(self.path)}"
            report = TraceCutError(message, rest)
        if self._on_error is None:
            raise report from None
        self._on_error(report)

    def _rows(self, rows: BinaryIO) -> Iterator[tuple[int, bytes | RowError]]:
        """Yield line numbers and rows, without blank lines, up to the first damaged gzip data."""
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
            problem = f"gzip data truncated or damaged from here on: {error}"
            yield line + 1, RowError(problem, ends_file=True)


def _num_values(row: bytes) -> int:
    """Estimate the memory of a parsed row of JSON, in units of one number, without parsing it."""
    return sum(row.count(mark) * units for mark, units in _UNITS.items())


class TraceFolder(Trace):
    """The files of a folder as one trace, in the order of their names.

    cc-traces has one session per file. A file that cannot be read, or has another schema or block
    size, counts as a malformed row.
    """

    def __init__(self, path: str, on_error: OnError | None, max_row_bytes: int) -> None:
        names = sorted(name for name in os.listdir(path) if name.endswith(_SUFFIXES))
        if not names:
            raise ConfigError(
                f"cannot read trace {path!r}: no file in this folder ends in .json(l)(.gz)"
            )
        self.path = path
        self.bytes_read = self.total_bytes = 0
        self._on_error = on_error
        self._files: list[Trace] = []
        self._errors: list[TraceError] = []
        for name in names:
            try:
                self._add(Trace(os.path.join(path, name), on_error, max_row_bytes))
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
                f"{file.path}: {file.schema} in blocks of {file.block_size}, but the files before "
                f"it are {self.schema} in blocks of {self.block_size}"
            )
        self._files.append(file)
        self.total_bytes += file.total_bytes

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests of each file, one file after another."""
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
        on_error: Called in each iteration with the error of each malformed row, which is then
            skipped; None raises the first error.
        max_row_bytes: Maximum length of a decompressed row; a longer row is malformed.

    Returns:
        The trace, of which no row has been yielded yet.

    Raises:
        ConfigError: The file cannot be read, is empty, or no row of it can be read.
        TraceError: The first row is malformed and ``on_error`` is None.
    """
    kind = TraceFolder if os.path.isdir(path) else Trace
    return kind(os.fspath(path), on_error, max_row_bytes)
