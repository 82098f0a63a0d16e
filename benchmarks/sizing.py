"""The curve of `kvview size` compared with vLLM's real classes, one size after another.

    python benchmarks/sizing.py [TRACE ...] [--vllm-sources DIR]

Drives the `CPUOffloadingManager` and the `BlockPool` of vLLM 0.33.0 with every request of a
trace like vLLM's own connector and scheduler: the GPU's prefix first, then the rest of the prefix
on the host, stores of all full blocks in steps of 8,192 tokens that complete one step later, and
the request's end. The table has the difference of the hits of both tiers from the curve, in points
of the prompt blocks. The exit code is 1 if one is larger than 0.5.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from harness import DATA, Table, add_vllm_to_path  # type: ignore[import-not-found, unused-ignore]

from kvview import OffloadKey, make_offload_key
from kvview_reference.replay.traces import open_trace
from kvview_reference.replay.workload import generate_trace
from kvview_reference.sizing.references import References, read_references
from kvview_reference.sizing.tier_hits import Tiers

STEP_TOKENS = 8192
MOST_APART = 0.5  # points


class RealTiers:
    """The two tiers of vLLM, with the calls of its scheduler and connector."""

    def __init__(self, gpu_blocks: int, host_blocks: int, policy: str, block_size: int) -> None:
        manager = import_module("vllm.v1.kv_offload.cpu.manager")
        self._base = import_module("vllm.v1.kv_offload.base")
        self._make_key = import_module("vllm.v1.core.kv_cache_utils").make_block_hash_with_group_id
        pool = import_module("vllm.v1.core.block_pool").BlockPool
        self._manager = manager.CPUOffloadingManager(host_blocks, policy)
        # One block more, because vLLM's pool keeps the null block.
        self._pool = pool(gpu_blocks + 1, True, block_size) if gpu_blocks else None
        self._block_size = block_size
        self._step = max(1, STEP_TOKENS // block_size)
        self._num_requests = 0

    def serve(self, hashes: Sequence[bytes], keys: Sequence[OffloadKey]) -> tuple[int, int]:
        """Serve one request to its end; returns the blocks hit on the GPU and on the host."""
        on_gpu = self._find(hashes)
        self._num_requests += 1
        manager = self._manager
        context = self._base.ReqContext(str(self._num_requests))
        for number, key in enumerate(keys, 1):
            context.set_offload_key_position(key, number * self._block_size)
        manager.on_new_request(context)
        end = on_gpu
        while end < len(keys) and manager.lookup(keys[end], context) is self._base.LookupResult.HIT:
            end += 1
        if loaded := keys[on_gpu:end]:
            manager.prepare_load(loaded, context)
            manager.complete_load(loaded, context)
        self._compute(hashes, on_gpu)
        stored: Sequence[OffloadKey] = ()
        for at in range(0, len(keys), self._step):
            output = manager.prepare_store(keys[at : at + self._step], context)
            manager.complete_store(stored, context)
            stored = output.keys_to_store if output else ()
        manager.complete_store(stored, context)
        manager.on_request_finished(context)
        return on_gpu, end - on_gpu

    def _find(self, hashes: Sequence[bytes]) -> int:
        self._found: list[Any] = []
        if self._pool is not None:
            for block_hash in hashes:
                block = self._pool.get_cached_block(block_hash, [0])
                if block is None:
                    break
                self._found += block
        return len(self._found)

    def _compute(self, hashes: Sequence[bytes], num_found: int) -> None:
        pool = self._pool
        if pool is None:
            return
        pool.touch(self._found)
        blocks = self._found + pool.get_new_blocks(len(hashes) - num_found)
        request = SimpleNamespace(block_hashes=list(hashes))
        pool.cache_full_blocks(request, blocks, num_found, len(blocks), self._block_size, 0)
        pool.free_blocks(reversed(blocks))


def real_hits(
    references: References, gpu_blocks: int, host_blocks: int, policy: str, block_size: int
) -> int:
    """Count the blocks that the real classes hit in both tiers."""
    hashes = [number.to_bytes(32, "big") for number in range(references.num_blocks)]
    keys = [make_offload_key(block_hash, 0) for block_hash in hashes]
    tiers = RealTiers(gpu_blocks, host_blocks, policy, block_size)
    starts, hits = references.starts, 0
    for request in references.requests:
        spans = [range(starts[run], starts[run + 1]) for run in request.runs]
        numbers = [number for span in spans for number in span]
        hits += sum(tiers.serve([hashes[n] for n in numbers], [keys[n] for n in numbers]))
    return hits


@click.command(help=__doc__)
@click.argument("traces", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--gpu-blocks", default="0,default", show_default=True, help="Sizes.")
@click.option("--policies", default="lru,arc", show_default=True)
@click.option("--vllm-sources", type=click.Path(path_type=Path))
def main(
    traces: tuple[Path, ...], gpu_blocks: str, policies: str, vllm_sources: Path | None
) -> None:
    add_vllm_to_path(vllm_sources)
    table = Table("trace", "GPU", "policy", "host", "kvview %", "vLLM %", "difference")
    worst = 0.0
    chosen: tuple[Path | None, ...] = traces or (None, *sorted(DATA.glob("*.jsonl*")))
    for trace in chosen:
        source = open_trace(trace, on_error=lambda error: None) if trace else None
        block_size = source.block_size if source else 512
        rows = source or generate_trace(num_requests=12_000, seed=0, block_size=block_size)
        references = read_references(rows, block_size)
        sizes = [round(references.num_blocks ** (0.6 + 0.4 * i / 7)) for i in range(8)]
        for gpu in gpu_blocks.split(","):
            num_gpu = 2**20 // block_size if gpu == "default" else int(gpu)
            tiers = Tiers(references, num_gpu)
            for policy, size in product(policies.split(","), sizes):
                is_lru = policy == "lru"
                traffic = tiers.lru(size) if is_lru else tiers.replay(size, f"vllm-{policy}")
                ours = sum(tiers.gpu_hits) + sum(traffic.loaded)
                real = real_hits(references, num_gpu, size, policy, block_size)
                found, expected = (100 * hits / references.num_ids for hits in (ours, real))
                worst = max(worst, abs(found - expected))
                table.add(
                    *(trace.name if trace else "generated", f"{num_gpu:,}", policy, f"{size:,}"),
                    *(f"{found:.2f}", f"{expected:.2f}", f"{found - expected:+.2f}"),
                )
    table.show()
    print(f"largest difference: {worst:.2f} points")
    sys.exit(1 if worst > MOST_APART else 0)


if __name__ == "__main__":
    main()
