"""Traces of real traffic, if they are available; README.md in this folder has their sources."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvview_reference.traces.trace import TraceRequest

MOONCAKE = "mooncake_conversation_trace.jsonl"
CC = "cc_traces_first40.jsonl.gz"


def trace_file(name: str) -> Path:
    """Find the real trace of this name, or skip the test."""
    folders = [Path(__file__).parents[3] / "shared" / "data"]
    if given := os.environ.get("KVVIEW_TRACES"):
        folders.insert(0, Path(given))
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    pytest.skip(f"needs {name}: tests/traces/README.md")


def mooncake_row(request: TraceRequest) -> dict[str, Any]:
    """A request as a row of Mooncake's format."""
    return {
        "timestamp": round(request.arrival_s * 1000),
        "input_length": request.num_prompt_tokens,
        "output_length": request.num_output_tokens,
        "hash_ids": list(request.hash_ids),
    }
