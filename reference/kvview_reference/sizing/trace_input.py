"""The requests of ``kvview size``: a trace, a recording, or a generated workload."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from kvview.errors import KVViewError
from kvview.input_files import DAMAGED_GZIP, open_rows
from kvview_reference.replay.traces import MAX_ROW_BYTES, open_trace
from kvview_reference.replay.workload import generate_trace
from kvview_reference.sizing.recordings import RecordedTrace

_GENERATED_BLOCK_SIZE = 512


def open_source(
    trace: str | None,
    on_error: Callable[[KVViewError], object] | None,
    requests: int | None,
    seed: int,
) -> tuple[Iterable[Any], int, str]:
    """Requests, their block size, and the name of the trace."""
    if trace is None:
        size, number = _GENERATED_BLOCK_SIZE, requests or 12_000
        rows = generate_trace(num_requests=number, seed=seed, block_size=size)
        return rows, size, f"generated workload (seed {seed})"
    if _is_recording(trace):
        recorded = RecordedTrace(trace, on_error)
        return islice(recorded, requests), recorded.block_size, Path(trace).name
    source = open_trace(trace, on_error=on_error)
    return islice(source, requests), source.block_size, Path(trace).resolve().name


def _is_recording(path: str) -> bool:
    try:
        with open_rows(path) as (_, rows):
            row = rows.readline(MAX_ROW_BYTES)
        first = json.loads(row) if b'"payload"' in row else None
    except (OSError, *DAMAGED_GZIP, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and {"sequence", "payload"} <= first.keys()
