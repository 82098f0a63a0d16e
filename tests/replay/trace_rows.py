"""Rows of every format of a trace; ``traces.jsonl`` has whole traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def flat(tokens: int, *hash_ids: int, output: int = 8, **changes: Any) -> dict[str, Any]:
    """A row of Mooncake, or of Bailian with a chat_id."""
    return {"input_length": tokens, "output_length": output, "hash_ids": list(hash_ids), **changes}


def weka(t: float, tokens: int, *hash_ids: int, **changes: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 5, "hash_ids": list(hash_ids), **changes}


def session(*requests: Any, **changes: Any) -> dict[str, Any]:
    head = {"id": "trace_1", "block_size": 64, "hash_id_scope": "local"}
    return {**head, "requests": list(requests), **changes}


def to_lines(rows: Rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _read_traces() -> dict[str, tuple[Rows, tuple[int, ...]]]:
    traces: dict[str, tuple[Rows, tuple[int, ...]]] = {}
    rows: Rows = []
    for line in Path(__file__).with_name("traces.jsonl").read_text().splitlines():
        row = json.loads(line)
        if name := row.get("trace"):
            rows = []
            traces[name] = rows, tuple(row["found"])
        else:
            rows.append(row)
    return traces


TRACES = _read_traces()
"""Rows by name, with requests, blocks, prompt tokens, hits and block size of the trace."""
CUMULATIVE, INCREMENTAL, WEKA = (TRACES[name][0] for name in ("cumulative", "incremental", "weka"))
