"""Rows of every format of a trace."""

from __future__ import annotations

import json
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
UNUSUAL_BLOCKS: Rows = [flat(143, 1, 2, timestamp=0), flat(97, 1, 2, 3, timestamp=1)]
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
    # The ids after different answers stand for different blocks.
    *(flat(512, 1, session_id=name, timestamp=20) for name in "de"),
    *(flat(1024, 3, 4, session_id=name, delay=5) for name in "de"),
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
TRACES: dict[str, tuple[Rows, tuple[int, ...]]] = {
    "mooncake": (MOONCAKE, (4, 12, 5944, 5, 512)),
    "unchained": (UNCHAINED, (3, 6, 3072, 1, 512)),
    "small blocks": (SMALL_BLOCKS, (4, 10, 152, 4, 16)),
    "unusual blocks": (UNUSUAL_BLOCKS, (2, 5, 240, 2, 48)),
    "cumulative": (CUMULATIVE, (6, 24, 12288, 12, 512)),
    # The answers complete blocks: 2 + 4 + 6 of a, 3 + 5 of b, 1 + 2 of c, 1 + 4 of d and of e.
    "incremental": (INCREMENTAL, (11, 33, 14502, 2 + 3 + 2 + 2 + 1 + 2 + 4, 512)),
    "bailian": (BAILIAN, (5, 25, 345, 14, 16)),
    "weka": (WEKA, (28, 68, 4436, 50, 64)),
}
"""Rows by name, with requests, blocks, prompt tokens, hits and block size of the trace."""


def to_lines(rows: Rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
