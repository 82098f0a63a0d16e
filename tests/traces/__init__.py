"""Traces of real traffic if they are available, and look-alikes otherwise.

    python -m tests.traces FOLDER      # writes both look-alikes to FOLDER

A look-alike has the schema and the number of requests of the real file, and similar sizes and
sharing, so that every test of real traces runs anywhere; only exact figures of the real file are
not asserted. README.md in this folder has the sources of the real files.
"""

from __future__ import annotations

import atexit
import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from kvview_reference.replay.traces import TraceRequest
from kvview_reference.replay.workload import generate_trace

MOONCAKE = "mooncake_conversation_trace.jsonl"
CC = "cc_traces_first40.jsonl.gz"
NAMES = (MOONCAKE, CC)

_MOONCAKE_REQUESTS = 12_031
_CC_SESSIONS, _CC_REQUESTS, _CC_AGENTS, _CC_NESTED = 40, 3_330, 11, 121
_CC_BLOCK = 64


@dataclass(frozen=True)
class TraceFile:
    """A trace for a test.

    Args:
        path: The file.
        is_real: Whether it is the real file.
    """

    path: Path
    is_real: bool


@cache
def trace_file(name: str) -> TraceFile:
    """Find the real trace of this name, or write a look-alike until the end of the process."""
    folders = [Path(__file__).parents[3] / "shared" / "data"]
    if given := os.environ.get("KVVIEW_TRACES"):
        folders.insert(0, Path(given))
    for folder in folders:
        if (folder / name).is_file():
            return TraceFile(folder / name, is_real=True)
    made = tempfile.TemporaryDirectory(prefix="kvview-traces-")
    atexit.register(made.cleanup)
    path = Path(made.name) / name
    write_look_alike(path)
    return TraceFile(path, is_real=False)


def write_look_alike(path: Path) -> None:
    """Write a look-alike of the real file of this name."""
    if path.name == MOONCAKE:
        requests = generate_trace(num_requests=_MOONCAKE_REQUESTS, seed=0, block_size=512)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in map(mooncake_row, requests)))
    else:
        with gzip.open(path, "wt", compresslevel=1) as file:
            file.writelines(f"{json.dumps(row)}\n" for row in _cc_sessions(Random(0)))


def mooncake_row(request: TraceRequest) -> dict[str, Any]:
    """A request as a row of Mooncake's format."""
    return {
        "timestamp": round(request.arrival_s * 1000),
        "input_length": request.num_prompt_tokens,
        "output_length": request.num_output_tokens,
        "hash_ids": list(request.hash_ids),
    }


def _cc_sessions(random: Random) -> Iterator[dict[str, Any]]:
    """Generate sessions of a few to some hundred requests, some with sub-agents."""
    flat = _CC_REQUESTS - _CC_NESTED
    weights = [random.paretovariate(1) for _ in range(_CC_SESSIONS)]
    spare = flat - 3 * _CC_SESSIONS
    ends = [round(spare * end / sum(weights)) for end in accumulate(weights)]
    sizes = [3 + end - start for start, end in zip([0, *ends], ends, strict=False)]
    for number, size in enumerate(sizes):
        conversation = _CcConversation(random)
        entries = [conversation.turn() for _ in range(size)]
        if number in range(2, 2 + _CC_AGENTS):
            agent = _CcConversation(random, first_id=10**6, t=conversation.t)
            nested = [agent.turn() for _ in range(_CC_NESTED // _CC_AGENTS)]
            entries.append({"t": conversation.t, "type": "subagent", "requests": nested})
        yield {
            "id": f"trace_{number + 1:04}",
            "block_size": _CC_BLOCK,
            "hash_id_scope": "local",
            "requests": entries,
        }


class _CcConversation:
    """A context that grows, and is rewritten when it is too long."""

    def __init__(self, random: Random, first_id: int = 1, t: float = 0.0) -> None:
        self.random, self.t, self._next = random, t, first_id
        self._ids: list[int] = []
        self._tokens = 0
        self._start()

    def turn(self) -> dict[str, Any]:
        """Make the next request."""
        self._tokens += int(self.random.expovariate(1 / 900)) + 1
        if self._tokens > 150_000:
            self._start()
        while len(self._ids) < self._tokens // _CC_BLOCK:
            self._ids.append(self._next)
            self._next += 1
        self.t = round(self.t + self.random.expovariate(1 / 12), 3)
        return {
            "t": self.t,
            "type": "n",
            "in": self._tokens,
            "out": self.random.randint(1, 900),
            "hash_ids": self._ids.copy(),
        }

    def _start(self) -> None:
        self._tokens = self.random.randint(16_000, 70_000)
        del self._ids[12_000 // _CC_BLOCK :]  # the system prompt stays
