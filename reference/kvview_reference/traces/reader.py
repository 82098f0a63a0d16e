"""The reader of request traces, which checks a trace as a whole before it returns a request.

A row that does not fit ends the reading, unless bad rows are skipped and counted. So no result is
computed from a part of a trace by mistake.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice

from kvview.errors import ConfigError, TraceError
from kvview.urls import DOCS_URL
from kvview_reference.traces.block_size import find_block_size, fits
from kvview_reference.traces.files import CutError, files_of, is_recording, rows_of
from kvview_reference.traces.rows import (
    DEFAULT_BLOCK_SIZES,
    FormatName,
    Row,
    RowError,
    load,
    parse,
    recognise,
)
from kvview_reference.traces.sessions import Timeline, Turns, find_turns
from kvview_reference.traces.trace import SkippedRows, Trace


def read_trace(
    path: str | os.PathLike[str],
    *,
    block_size: int | None = None,
    turns: Turns | None = None,
    max_requests: int | None = None,
    skipped: SkippedRows | None = None,
    on_progress: Callable[[str], object] = lambda text: None,
) -> Trace:
    """Read a trace of any known format.

    Args:
        path: JSON Lines, compressed with gzip or not; a folder of such files; or a recording of KV
            events.
        block_size: Tokens of a hash id; None finds it.
        turns: Whether a later turn of a session repeats the turns before it; None finds it.
        max_requests: Number of requests to read, from the start; None reads all.
        skipped: Receives the bad rows; None raises the first error.
        on_progress: Called with the state of the reading.

    Raises:
        ConfigError: The file cannot be read, is not a trace, or its meaning is ambiguous.
        TraceError: A row does not fit.
    """
    path = os.fspath(path)
    skipped = skipped or SkippedRows()
    title = os.path.basename(os.path.abspath(path))
    if is_recording(path):
        from kvview_reference.traces.recordings import RecordedTrace  # needs the extra "events"

        if block_size is not None:
            raise ConfigError("a recording states its block size; drop --block-size")
        recorded = RecordedTrace(path, skipped)
        return Trace(title, [*islice(recorded, max_requests)], recorded.block_size, skipped)
    reader = _Reader(block_size, skipped)
    rows = [*islice(reader.read(path, on_progress), max_requests)]
    if not rows:
        raise ConfigError(f"cannot read trace {path!r}: {reader.problem}")
    try:
        size = reader.find_block_size(rows)
        rows = [row for row in rows if reader.check(row, size)]
        kind = turns or find_turns(rows, size)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    timeline = Timeline(size, kind, has_times=any(row.at_s is not None for row in rows[:1]))
    requests = []
    for row in rows:
        try:
            requests.append(timeline.add(row))
        except RowError as error:
            reader.skip(row.place, error)
    if not requests:
        raise ConfigError(f"cannot read trace {path!r}: {reader.problem}")
    if kind == "incremental" and skipped.num_requests:
        raise ConfigError(
            f"{path}: later turns contain the turns before them (--turns incremental), so "
            "--skip-bad-rows would change prompts; correct the bad rows"
        )
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(title, requests, size, skipped)


class _Reader:
    """Reads the rows of a trace, whose format and block size must not change.

    Args:
        block_size: Tokens of a block; None finds it.
        skipped: Receives the bad rows.

    Attributes:
        problem: The reason if no row can be read.
    """

    def __init__(self, block_size: int | None, skipped: SkippedRows) -> None:
        self._stated = block_size
        self._skipped = skipped
        self._format: FormatName | None = None
        self._row_size: int | None = None
        self.problem = f"no rows. Formats: {DOCS_URL}replay/#the-trace"

    def read(self, path: str, on_progress: Callable[[str], object]) -> Iterator[Row]:
        """Yield the requests of all files that can be read."""
        for name in files_of(path):
            for line, content in rows_of(name, on_progress):
                place = f"{name}:{line}"
                try:
                    found = self._parse(content, place, line)
                except RowError as error:
                    self.skip(place, error)
                    continue
                for row in found:
                    if isinstance(row, RowError):
                        self.skip(place, row)
                    else:
                        yield row

    def _parse(self, content: bytes | RowError, place: str, line: int) -> list[Row | RowError]:
        if isinstance(content, RowError):
            raise content
        fields = load(content)
        name = self._format or recognise(fields)
        size, found = parse(fields, name, place, line)
        self._format = name
        if size is not None:
            expected = self._stated or self._row_size or size
            if size != expected:
                raise RowError(f"{size}, expected {expected}", "block_size", max(1, len(found)))
            self._row_size = size
        return found

    def skip(self, place: str, error: RowError) -> None:
        """Count a bad row, or raise its error."""
        self.problem = f"no row can be read; {place}: {error}"
        message = TraceError(f"{place}: {error}")
        self._skipped.add(message, error.num_requests, ends_file=isinstance(error, CutError))

    def find_block_size(self, rows: list[Row]) -> int:
        """Find the block size of the trace."""
        if (known := self._stated or self._row_size) is not None:
            return known
        assert self._format is not None
        lengths = [(row.num_prompt_tokens, len(row.hash_ids)) for row in rows]
        default = DEFAULT_BLOCK_SIZES[self._format]
        try:
            size = find_block_size(lengths, default)
        except ConfigError as error:
            first = next(row for row in rows if not _fits(row, default))
            raise ConfigError(
                f"line {first.line}: {_misfit(first, default)}, but {error}"
            ) from None
        if all(tokens < size for tokens, _ in lengths):
            raise ConfigError(
                f"no prompt fills a block of {size:,} tokens, so no block can be hit; pass "
                "--block-size if the blocks of this trace are smaller"
            )
        return size

    def check(self, row: Row, block_size: int) -> bool:
        """Whether the ids of a row fit its tokens; otherwise the row is skipped."""
        if not _fits(row, block_size):
            self.skip(row.place, RowError(_misfit(row, block_size), row.field))
            return False
        return True


def _fits(row: Row, block_size: int) -> bool:
    return fits(row.num_prompt_tokens, len(row.hash_ids), block_size)


def _misfit(row: Row, block_size: int) -> str:
    full, rest = divmod(row.num_prompt_tokens, block_size)
    expected = f"{full} or {full + 1}" if rest else f"{full}"
    return (
        f"{len(row.hash_ids)} ids for {row.num_prompt_tokens} prompt tokens in blocks of "
        f"{block_size}, expected {expected}"
    )
