"""The hits of a trace from the documents of its format, in a way that the reader does not use.

A prompt is a list of contents, one per block, and a set holds every prefix that was seen. The
contents of incremental turns are lists of tokens.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Content = tuple[object, ...]


class RefusedError(Exception):
    """A trace that has no answer; the argument is the line of the row that does not fit."""


@dataclass
class Entry:
    line: int
    at: float | None
    delay: float | None
    session: object
    scope: int
    tokens: int
    output: int
    ids: list[int]

    def fits(self, block_size: int) -> bool:
        full = self.tokens // block_size
        return full <= len(self.ids) <= math.ceil(self.tokens / block_size)

    def contents(self, block_size: int) -> list[Content]:
        return [(self.scope, block_id, block_size) for block_id in self.ids]


@dataclass
class Hits:
    requests: int
    blocks: int
    prompt_tokens: int
    hits: int
    block_size: int


def hits_of(data: bytes, block_size: int | None = None, turns: str | None = None) -> Hits:
    """The hits of a cache that holds every block, or RefusedError."""
    entries, kind, stated = _entries(data)
    if block_size is not None and stated not in (None, block_size):
        raise RefusedError
    size = block_size or stated or _block_size(entries, 16 if kind == "bailian" else 512)
    for entry in entries:
        if not entry.fits(size):
            raise RefusedError(entry.line)
    turns = turns or _turns(entries, size)
    seen: set[tuple[Content, ...]] = set()
    found = Hits(0, 0, 0, 0, size)
    for _, tokens, contents in sorted(_prompts(entries, size, turns), key=lambda prompt: prompt[0]):
        prefixes = [tuple(contents[: end + 1]) for end in range(tokens // size)]
        found.requests += 1
        found.blocks += len(contents)
        found.prompt_tokens += tokens
        found.hits += sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    return found


def _entries(data: bytes) -> tuple[list[Entry], str, int | None]:
    try:
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (EOFError, OSError) as error:
        raise RefusedError from error
    entries: list[Entry] = []
    kind, size = "", None
    for line, row in enumerate(text.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not row.strip():
            continue
        try:
            fields = json.loads(row)
        except ValueError as error:
            raise RefusedError(line) from error
        _require(isinstance(fields, dict), line)
        of_row = "weka" if "requests" in fields else "mooncake"
        if fields.keys() & {"chat_id", "parent_chat_id"} and of_row == "mooncake":
            of_row = "bailian"
        kind = kind or of_row
        _require(of_row == kind, line)
        if kind == "weka":
            of_row_size = _number(fields.get("block_size"), line, 1)
            _require(size in (None, of_row_size), line)
            size = of_row_size
            _require(isinstance(fields.get("id"), str) and fields["id"], line)
            scope = fields.get("hash_id_scope", "local")
            _require(scope in ("local", "global"), line)
            entries += _weka(fields["requests"], 0.0, line, line if scope == "local" else 0)
        else:
            entries.append(_flat(fields, kind, line))
    if not entries:
        raise RefusedError
    return entries, kind, size


def _flat(row: dict[str, Any], kind: str, line: int) -> Entry:
    def get(*names: str) -> Any:
        return next((row[name] for name in names if name in row), None)

    aliases = kind == "mooncake"
    at = _time(get("timestamp", *(["created_time"] if aliases else [])), line)
    delay = _time(get("delay", "delay_ms"), line) if aliases else None
    session = row.get("session_id") if aliases else None
    _require(session is None or type(session) in (str, int), line)
    _require(delay is None or session is not None, line)
    if kind == "bailian":
        _require(
            type(row.get("chat_id")) is int and type(row.get("parent_chat_id", -1)) is int, line
        )
    return Entry(
        line,
        at if at is None or not aliases else at / 1000,
        delay if delay is None else delay / 1000,
        session if session is None else repr(session),
        0,
        _number(get("input_length", *(["input_tokens"] if aliases else [])), line, 1),
        _number(get("output_length", *(["output_tokens"] if aliases else [])), line),
        _ids(row, line),
    )


def _weka(entries: Any, base: float, line: int, scope: int) -> Iterator[Entry]:
    _require(isinstance(entries, list), line)
    for entry in entries:
        _require(isinstance(entry, dict), line)
        at = _time(entry.get("t"), line)
        kind = entry.get("type")
        if at is None or not isinstance(kind, str) or kind not in ("n", "s", "subagent"):
            raise RefusedError(line)
        if kind == "subagent":
            inner = entry.get("requests")
            _require(isinstance(inner, list), line)
            times = [x["t"] for x in inner if isinstance(x, dict) and _is_number(x.get("t"))]
            yield from _weka(inner, base + at if min(times, default=at) < at else base, line, scope)
        else:
            tokens, output = _number(entry.get("in"), line, 1), _number(entry.get("out"), line)
            ids = _ids(entry, line)
            yield Entry(line, base + at, None, None, scope, tokens, output, ids)


def _block_size(entries: list[Entry], default: int) -> int:
    """The documented size, the only power of two, or the only size that fits every row."""
    fitting = [n for n in range(1, 6000) if all(entry.fits(n) for entry in entries)]
    powers = [n for n in fitting if n & (n - 1) == 0]
    if default not in fitting:
        if len(powers) != 1 and len(fitting) != 1:
            raise RefusedError
        default = powers[0] if len(powers) == 1 else fitting[0]
    if all(entry.tokens < default for entry in entries):
        raise RefusedError
    return default


def _turns(entries: list[Entry], size: int) -> str:
    last: dict[object, Entry] = {}
    repeats, has_later = set(), False
    for entry in entries:
        before = None if entry.session is None else last.get(entry.session)
        if before is not None:
            has_later = True
            if before.tokens >= size and entry.ids:
                repeats.add(entry.ids[0] == before.ids[0])
        last[entry.session] = entry
    if len(repeats) > 1 or (has_later and not repeats):
        raise RefusedError
    return "incremental" if repeats == {False} else "cumulative"


def _prompts(
    entries: list[Entry], size: int, turns: str
) -> Iterator[tuple[float, int, list[Content]]]:
    has_times = entries[0].at is not None
    latest: dict[object, float] = {}
    histories: dict[object, list[object]] = {}
    for entry in entries:
        before = None if entry.session is None else latest.get(entry.session)
        at = entry.at
        _require(at is None or has_times, entry.line)
        _require(at is None or before is None or at >= before, entry.line)
        if at is None:
            _require(entry.delay is None or before is not None, entry.line)
            _require(not has_times or entry.delay is not None, entry.line)
            at = (before or 0.0) + (entry.delay or 0.0) if has_times else 0.0
        latest[entry.session] = at
        if turns == "cumulative":
            yield at, entry.tokens, entry.contents(size)
            continue
        tokens = [(block, n) for block in entry.contents(size) for n in range(size)]
        if entry.session is None:
            yield at, entry.tokens, _blocks(tokens, size)
            continue
        history = histories.setdefault(entry.session, [])
        own = entry.tokens // size * size  # behind it stands a partial block
        history += tokens[:own]
        history += [(entry.session, "prompt", len(history) + n) for n in range(entry.tokens - own)]
        yield at, len(history), _blocks(history, size)
        history += [(entry.session, "answer", len(history) + n) for n in range(entry.output)]


def _blocks(tokens: Sequence[object], size: int) -> list[Content]:
    return [tuple(tokens[n : n + size]) for n in range(0, len(tokens), size)]


def _require(condition: object, line: int) -> None:
    if not condition:
        raise RefusedError(line)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _number(value: Any, line: int, least: int = 0) -> int:
    _require(type(value) is int and least <= value < 2**31, line)
    return int(value)


def _time(value: Any, line: int) -> float | None:
    if value is None:
        return None
    _require(_is_number(value) and math.isfinite(value) and 0 <= value <= 2**42, line)
    return float(value)


def _ids(row: dict[str, Any], line: int) -> list[int]:
    ids = row.get("hash_ids")
    _require(isinstance(ids, list), line)
    for block_id in ids or ():
        _require(type(block_id) is int and 0 <= block_id < 2**64, line)
    return list(ids or ())
