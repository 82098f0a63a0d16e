"""Rows of every format of a trace, and mutations of them."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Iterator
from typing import Any

Rows = list[dict[str, Any]]


def flat(tokens: int, *hash_ids: int, output: int = 8, **changes: Any) -> dict[str, Any]:
    """A row of Mooncake, or of Bailian with a chat_id."""
    return {"input_length": tokens, "output_length": output, "hash_ids": list(hash_ids), **changes}


def weka(t: float, tokens: int, *hash_ids: int, **changes: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 5, "hash_ids": list(hash_ids), **changes}


def subagent(t: float, *requests: Any) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": "agent_001", "requests": list(requests)}


def session(*requests: Any, **changes: Any) -> dict[str, Any]:
    head = {"id": "trace_1", "block_size": 64, "hash_id_scope": "local"}
    return {**head, "requests": list(requests), **changes}


MOONCAKE: Rows = [
    flat(1024, 0, 50, timestamp=0),
    flat(1436, 0, 1, 51, timestamp=100),
    flat(2048, 0, 1, 2, 52, timestamp=200),
    flat(1436, 0, 1, 53, timestamp=300),
]
UNCHAINED: Rows = [
    flat(1024, a, b, timestamp=n) for n, (a, b) in enumerate([(1, 2), (3, 4), (1, 4)])
]
SMALL_BLOCKS: Rows = [
    *(flat(12, 1, timestamp=n) for n in range(2)),
    *(flat(64, 2, 3, 4, 5, timestamp=n) for n in (2, 3)),
]
CUMULATIVE: Rows = [
    flat(512 * len(ids), *ids, session_id=name, **time)
    for name, start in (("a", 1), ("b", 11))
    for end, time in ((2, {"timestamp": start}), (4, {"delay": 500.0}), (6, {"delay": 500.0}))
    for ids in [range(start, start + end)]
]
INCREMENTAL: Rows = [
    flat(1024, 1, 2, session_id="a", timestamp=0),
    flat(1000, 3, 4, output=30, session_id="a", delay=500.0),
    flat(1100, 1, 2, 7, output=0, session_id="b", timestamp=10),
    flat(512, 6, session_id="a", delay=500.0),
    flat(1024, 9, 10, session_id="b", delay=50.0),
    flat(512, 1, output=0, session_id="c", timestamp=5),
    flat(512, 2, output=0, session_id="c", delay=5),
]
BAILIAN: Rows = [
    flat(16 * n + 5, *range(n), 900 + n, chat_id=n, parent_chat_id=n - 3, timestamp=n * 1.5)
    for n in range(2, 7)
]
WEKA: Rows = [
    session(
        weka(0.0, 67, 0),
        weka(1.5, 195, 0, 1, 2),
        subagent(2.0, weka(0.0, 131, 0, 1), weka(3.0, 259, 0, 1, 2, 3, type="s")),
        weka(4.0, 323, 0, 1, 2, 3, 4),
        # In other releases a sub-agent's requests have the session's own clock.
        subagent(20.0, weka(21.0, 67, 9), subagent(30.0, weka(0.5, 67, 9))),
        hash_id_scope=scope,
    )
    for scope in ("local", "global", "local", "global")
]
TRACES = [MOONCAKE, UNCHAINED, SMALL_BLOCKS, CUMULATIVE, INCREMENTAL, BAILIAN, WEKA]

_VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 1.5, "1", [], {}, [1, "a"], [True], [-1], [2**64], [2**64 - 1]),
    *(10**30, float("nan"), float("inf"), -0.5, 2**31, 16, 512, 1024, [4], "local"),
]
_ALIASES = {
    "input_length": "input_tokens",
    "output_length": "output_tokens",
    "timestamp": "created_time",
    "delay": "delay_ms",
}


def to_lines(rows: Rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def variant(draw: random.Random) -> bytes:
    """A trace with a few changes, many of which keep it valid."""
    rows = copy.deepcopy(draw.choice(TRACES))
    for _ in range(draw.choice((0, 1, 1, 1, 2))):
        _change(rows, draw)
    data = to_lines(rows)
    lines = data.splitlines(keepends=True)
    match draw.randrange(16):
        case 0:
            data = data.replace(b"\n", b"\r\n")
        case 1:
            data = b"\xef\xbb\xbf" + data.rstrip()
        case 2:
            lines.insert(draw.randrange(len(lines) + 1), draw.choice((b"\n", b"  \n", b"\t\r\n")))
            data = b"".join(lines)
        case 3:
            lines.insert(
                draw.randrange(1, len(lines) + 1), draw.choice((b"null\n", b"7\n", b"{\n"))
            )
            data = b"".join(lines)
        case 4:
            data = data[: -draw.randint(2, 40)]
        case 5:
            data = gzip.compress(data)
        case 6:
            data = gzip.compress(data)[: -draw.randint(1, 20)]
    return data


def _objects(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield row
    requests = row.get("requests")
    for inner in requests if isinstance(requests, list) else []:
        if isinstance(inner, dict):
            yield from _objects(inner)


def _change(rows: Rows, draw: random.Random) -> None:
    at = draw.randrange(len(rows))
    target = draw.choice([each for each in _objects(rows[at]) if each] or [{"": 0}])
    name = draw.choice(list(target))
    match draw.randrange(12):
        case 0 | 1:
            target[name] = draw.choice(_VALUES)
        case 2:
            del target[name]
        case 3:
            rows.insert(draw.randrange(len(rows) + 1), copy.deepcopy(rows[at]))
        case 4:
            draw.shuffle(rows)
        case 5:
            rows.insert(
                draw.randrange(len(rows) + 1), copy.deepcopy(draw.choice(draw.choice(TRACES)))
            )
        case 6:
            for row in rows:
                for old, new in _ALIASES.items():
                    if old in row and draw.random() < 0.7:
                        row[new] = row.pop(old)
        case 7:
            factor = draw.choice((2, 0.5, 1 / 32, 48 / 512))
            for key in ("input_length", "in"):
                for each in (each for row in rows for each in _objects(row) if key in each):
                    if isinstance(each[key], int):
                        each[key] = max(1, int(each[key] * factor))
        case 8:
            for key in {"input_length", "in", "output_length"} & target.keys():
                if isinstance(target[key], int):
                    target[key] += draw.choice((-600, -100, -1, 1, 5, 600))
        case 9:
            for row in rows:
                if "hash_ids" in row and draw.random() < 0.6:
                    row["session_id"] = draw.choice(("a", "b", 1))
        case 10:
            for each in _objects(rows[at]):
                if isinstance(each.get("hash_ids"), list):
                    each["hash_ids"] = [draw.choice((0, 1, 2, 4)) for _ in each["hash_ids"]]
        case 11:
            target["unknown"] = draw.choice(_VALUES)
