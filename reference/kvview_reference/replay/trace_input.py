"""The requests of a command: a trace, a recording of KV events, or a generated workload."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from kvview.errors import KVViewError
from kvview.input_files import DAMAGED_GZIP, open_rows
from kvview_reference.replay.trace_schemas import TraceRequest
from kvview_reference.replay.traces import MAX_ROW_BYTES, Lost, Trace, open_trace
from kvview_reference.replay.workload import generate_trace

_GENERATED_BLOCK_SIZE = 512


@dataclass(frozen=True)
class Source:
    """Requests and their source.

    Args:
        requests: The requests, in the order of the trace.
        block_size: Number of tokens per hash id.
        title: The name of the trace.
        trace: The trace file or folder; None for a recording or a generated workload.
        lost: Parts of the trace that could not be read, which are added while the requests are
            read.
    """

    requests: Iterable[TraceRequest]
    block_size: int
    title: str
    trace: Trace | None = None
    lost: Lost = field(default_factory=Lost)


def open_source(
    path: str | None,
    requests: int | None,
    seed: int,
    num_generated: int,
    *,
    strict: bool,
    report: Callable[[str], object],
) -> Source:
    """Open the requests of a command.

    Args:
        path: The trace or recording; None generates a workload.
        requests: Maximum number of requests; None reads all requests, or generates
            ``num_generated``.
        seed: Seed of the generated workload.
        num_generated: Number of requests to generate by default.
        strict: Whether damaged input raises an exception; otherwise damaged parts are skipped.
        report: Called with a line of text for each of the first skipped parts.
    """
    if path is None:
        rows = generate_trace(
            num_requests=requests or num_generated, seed=seed, block_size=_GENERATED_BLOCK_SIZE
        )
        return Source(rows, _GENERATED_BLOCK_SIZE, f"generated workload (seed {seed})")
    lost = Lost()

    def skip(error: KVViewError) -> None:
        if lost.add(error):
            report(f"kvview: skipped: {error}")

    on_error = None if strict else skip
    title = Path(path).absolute().name
    if _is_recording(path):
        from kvview_reference.sizing.recordings import RecordedTrace  # needs the extra "events"

        recorded = RecordedTrace(path, on_error)
        return Source(islice(recorded, requests), recorded.block_size, title, lost=lost)
    trace = open_trace(path, on_error=on_error)
    return Source(islice(trace, requests), trace.block_size, title, trace, lost)


def _is_recording(path: str) -> bool:
    try:
        with open_rows(path) as (_, rows):
            row = rows.readline(MAX_ROW_BYTES)
        first = json.loads(row) if b'"payload"' in row else None
    except (OSError, *DAMAGED_GZIP, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and {"sequence", "payload"} <= first.keys()
