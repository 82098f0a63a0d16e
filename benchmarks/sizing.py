"""The curve of `kvview size` compared with vLLM's real manager, one size after another.

    python benchmarks/sizing.py [TRACE ...] [--vllm-sources DIR]

Drives the `CPUOffloadingManager` of vLLM 0.33.0 with every request of a trace like vLLM's own
connector: a lookup of the prefix, and stores of all full blocks in steps of 8,192 tokens that
complete one step later. The table has the difference of the hits from the curve, in points of the
prompt blocks. The exit code is 1 if one is larger than 0.5.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import click
from harness import DATA, Table, add_vllm_to_path  # type: ignore[import-not-found, unused-ignore]

from kvview import OffloadKey, make_offload_key
from kvview_reference.sizing.hit_curve import size
from kvview_reference.traces.command import open_source
from kvview_reference.traces.reader import read_trace

STEP_TOKENS = 8192
MOST_APART = 0.5  # points


class RealManager:
    """vLLM's manager of host memory, with the calls of its connector."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        manager = import_module("vllm.v1.kv_offload.cpu.manager")
        self._base = import_module("vllm.v1.kv_offload.base")
        self._manager = manager.CPUOffloadingManager(num_blocks, "lru")
        self._block_size = block_size
        self._step = max(1, STEP_TOKENS // block_size)
        self._num_requests = 0

    def serve(self, keys: Sequence[OffloadKey]) -> int:
        """Serve one request to its end; returns the blocks that were hit."""
        self._num_requests += 1
        manager = self._manager
        context = self._base.ReqContext(str(self._num_requests))
        for number, key in enumerate(keys, 1):
            context.set_offload_key_position(key, number * self._block_size)
        manager.on_new_request(context)
        end = 0
        while end < len(keys) and manager.lookup(keys[end], context) is self._base.LookupResult.HIT:
            end += 1
        if loaded := keys[:end]:
            manager.prepare_load(loaded, context)
            manager.complete_load(loaded, context)
        stored: Sequence[OffloadKey] = ()
        for at in range(0, len(keys), self._step):
            output = manager.prepare_store(keys[at : at + self._step], context)
            manager.complete_store(stored, context)
            stored = output.keys_to_store if output else ()
        manager.complete_store(stored, context)
        manager.on_request_finished(context)
        return end


@click.command(help=__doc__)
@click.argument("traces", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--vllm-sources", type=click.Path(path_type=Path))
def main(traces: tuple[Path, ...], vllm_sources: Path | None) -> None:
    add_vllm_to_path(vllm_sources)
    table = Table("trace", "blocks", "kvview %", "vLLM %", "difference")
    worst = 0.0
    chosen: tuple[Path | None, ...] = traces or (None, *sorted(DATA.glob("*.jsonl*")))
    for path in chosen:
        trace = read_trace(path) if path else open_source(None, 12_000, 0, None, None, False)
        prompts = [
            [make_offload_key(n.to_bytes(32, "big"), 0) for n in full]
            for row in trace.requests
            for full in [row.hash_ids[: row.num_prompt_tokens // trace.block_size]]
        ]
        num_blocks = len({key for prompt in prompts for key in prompt})
        report = size(trace, sizes=[round(num_blocks ** (0.6 + 0.4 * i / 7)) for i in range(8)])
        for point in report.points:
            manager = RealManager(point.blocks, trace.block_size)
            expected = 100 * sum(map(manager.serve, prompts)) / report.blocks
            found = 100 * point.lru_hit_rate
            worst = max(worst, abs(found - expected))
            table.add(
                *(trace.title, f"{point.blocks:,}"),
                *(f"{found:.2f}", f"{expected:.2f}", f"{found - expected:+.2f}"),
            )
    table.show()
    print(f"largest difference: {worst:.2f} points")
    sys.exit(1 if worst > MOST_APART else 0)


if __name__ == "__main__":
    main()
