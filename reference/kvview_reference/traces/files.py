"""The rows of the files of a trace, and files that are not traces."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from io import BufferedReader
from typing import BinaryIO, cast

from kvview.errors import ConfigError
from kvview.input_files import DAMAGED_GZIP, open_rows, read_rows
from kvview_reference.traces.rows import RowError

MAX_ROW_BYTES = 32 * 2**20
"""Bytes of the longest row that is read, so that a file without newlines cannot fill the memory."""

MAX_ROW_VALUES = 2**22
"""Maximum of values in a row, because a value takes more memory than its text."""

_BOM = b"\xef\xbb\xbf"
_START_BYTES = 200
_UNITS = {b",": 1, b'"': 2, b"[": 2, b"{": 8}
_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_NEEDED = "kvview reads JSON Lines (.jsonl, .jsonl.gz), one request or session per line"
_FOREIGN = {
    b"PAR1": "a Parquet file; write its rows as JSON Lines, with a list of hash_ids in each row",
    b"ARROW1": "an Arrow file; write its rows as JSON Lines, with a list of hash_ids in each row",
    b"\x28\xb5\x2f\xfd": "compressed with Zstandard; decompress it with 'zstd -d'",
    b"\xfd7zXZ": "compressed with xz; decompress it with 'xz -d'",
    b"BZh": "compressed with bzip2; decompress it with 'bzip2 -d'",
    b"PK\x03\x04": "a zip archive; unpack it",
}
"""Kinds of files that are not traces, by their first bytes."""


class CutError(RowError):
    """The rest of the file after a row cannot be read."""


def files_of(path: str) -> list[str]:
    """List the files of a trace, which may be a folder, in the order of their names.

    Raises:
        ConfigError: The folder has no trace file.
    """
    if not os.path.isdir(path):
        return [path]
    names = sorted(name for name in os.listdir(path) if name.endswith(_SUFFIXES))
    if not names:
        raise ConfigError(
            f"cannot read trace {path!r}: no file in this folder ends in .json(l)(.gz)"
        )
    return [os.path.join(path, name) for name in names]


def is_recording(path: str) -> bool:
    """Whether a file was written by ``kvview events --record``."""
    try:
        with open_rows(path) as (_, rows):
            row = rows.readline(MAX_ROW_BYTES)
        first = json.loads(row) if b'"payload"' in row else None
    except (OSError, *DAMAGED_GZIP, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and {"sequence", "payload"} <= first.keys()


def rows_of(
    path: str, on_progress: Callable[[str], object] = lambda text: None
) -> Iterator[tuple[int, bytes | RowError]]:
    """Yield the line and the content of each row that is not blank, or the error of a row.

    Args:
        path: JSON Lines, compressed with gzip or not.
        on_progress: Called with the name of the file and the share that was read.

    Raises:
        ConfigError: The file cannot be read, or is not a trace.
    """
    try:
        with open_rows(path) as (file, rows):
            num_bytes = max(1, os.path.getsize(path))
            for line, row in _rows(path, rows):
                yield line, row
                on_progress(f"{os.path.basename(path)}, {file.tell() / num_bytes:.0%}")
    except OSError as error:
        raise ConfigError(f"cannot read trace {path!r}: {error.strerror}") from error


def _rows(path: str, rows: BinaryIO) -> Iterator[tuple[int, bytes | RowError]]:
    line = 0
    try:
        _require_trace(path, cast(BufferedReader, rows).peek(_START_BYTES))
        for line, row in enumerate(read_rows(rows, MAX_ROW_BYTES), 1):
            if row is None:
                yield line, RowError(f"row longer than {MAX_ROW_BYTES:,} bytes")
                continue
            if line == 1:
                row = row.removeprefix(_BOM)
            if sum(row.count(mark) * units for mark, units in _UNITS.items()) > MAX_ROW_VALUES:
                yield line, RowError(f"row of more than {MAX_ROW_VALUES:,} values")
            elif row and not row.isspace():
                yield line, row.strip()
    except DAMAGED_GZIP as error:
        yield line + 1, CutError(f"gzip data truncated or damaged from here on: {error}")


def _require_trace(path: str, start: bytes) -> None:
    """Refuse a file of another kind, by its first bytes.

    Raises:
        ConfigError: The file is not a trace.
    """
    kind = next((text for magic, text in _FOREIGN.items() if start.startswith(magic)), None)
    first, *others = start.removeprefix(_BOM).lstrip()[:_START_BYTES].splitlines() or [b""]
    if first.startswith(b"["):
        kind = "a JSON array; write one element per line with \"jq -c '.[]'\""
    elif first.rstrip() == b"{" and others and not others[0].startswith(b"{"):
        kind = "one JSON object over several lines; write it in one line with 'jq -c .'"
    elif b"," in first and (first[:1].isalpha() or first.startswith(b'"')):
        kind = "a CSV file, which lacks the hash_ids of each request's prompt; hits need them"
    if kind is not None:
        raise ConfigError(f"{path} is {kind}. {_NEEDED}")
