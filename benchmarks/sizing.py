"""The curve of `kvview size` beside vLLM's real classes, one size after the other.

    python benchmarks/sizing.py [TRACE ...] [--gpu-blocks 0,default] [--policies lru,arc]

Drives the `CPUOffloadingManager` and the `BlockPool` of vLLM 0.33.0 with every request of a
trace as vLLM's own connector and scheduler do: the GPU's prefix first, what the host has of
the rest, stores of all full blocks in steps of 8,192 tokens that complete one step later, and
the request's end. Says by how many points of the prompt blocks the hits of both tiers differ
from the curve, at eight sizes. The exit code is 1 when one differs by more than 0.5.

Without vLLM there is nothing to compare with: `python tests/vllm/sources.py 0.33.0` prints a
folder for `--vllm-sources`, and tests/vllm/requirements.txt is what it imports.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from peer import HOW_TO_GET_IT, add_vllm_to_path  # type: ignore[import-not-found,unused-ignore]

from kvview import OffloadKey, make_offload_key
from kvview_reference.replay.traces import open_trace
from kvview_reference.replay.workload import generate_trace
from kvview_reference.sizing.references import References, read_references
from kvview_reference.sizing.tier_hits import Tiers

DATA = Path(__file__).parents[2] / "shared" / "data"
STEP_TOKENS = 8192
MOST_APART = 0.5  # points


class RealTiers:
    """The two tiers of vLLM, and what its scheduler and connector tell them."""

    def __init__(self, gpu_blocks: int, host_blocks: int, policy: str, block_size: int) -> None:
        manager = import_module("vllm.v1.kv_offload.cpu.manager")
        self._base = import_module("vllm.v1.kv_offload.base")
        self._make_key = import_module("vllm.v1.core.kv_cache_utils").make_block_hash_with_group_id
        pool = import_module("vllm.v1.core.block_pool").BlockPool
        self._manager = manager.CPUOffloadingManager(host_blocks, policy)
        # One more: vLLM's pool keeps the null block.
        self._pool = pool(gpu_blocks + 1, True, block_size) if gpu_blocks else None
        self._block_size = block_size
        self._step = max(1, STEP_TOKENS // block_size)
        self._num_requests = 0

    def serve(self, hashes: Sequence[bytes], keys: Sequence[OffloadKey]) -> tuple[int, int]:
        """One request from its arrival to its end: blocks hit on the GPU and on the host."""
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
    """Blocks that the real classes hit in both tiers."""
    hashes = [number.to_bytes(32, "big") for number in range(references.num_blocks)]
    keys = [make_offload_key(block_hash, 0) for block_hash in hashes]
    tiers = RealTiers(gpu_blocks, host_blocks, policy, block_size)
    starts, hits = references.starts, 0
    for request in references.requests:
        spans = [range(starts[run], starts[run + 1]) for run in request.runs]
        numbers = [number for span in spans for number in span]
        hits += sum(tiers.serve([hashes[n] for n in numbers], [keys[n] for n in numbers]))
    return hits


@click.command()
@click.argument("traces", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--gpu-blocks", default="0,default", show_default=True, help="Sizes.")
@click.option("--policies", default="lru,arc", show_default=True)
@click.option("--vllm-sources", type=click.Path(path_type=Path))
def main(
    traces: tuple[Path, ...], gpu_blocks: str, policies: str, vllm_sources: Path | None
) -> None:
    """Compare at eight sizes."""
    if not add_vllm_to_path(vllm_sources):
        sys.exit(HOW_TO_GET_IT)
    names = ("trace", "GPU", "policy", "host", "kvview %", "vLLM %", "apart", "s", "s vLLM")
    print("{:20}{:>8}{:>8}{:>9}{:>10}{:>8}{:>7}{:>7}{:>8}".format(*names))
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
            for policy in policies.split(","):
                for size in sizes:
                    start = time.process_time()
                    traffic = (
                        tiers.lru(size) if policy == "lru" else tiers.replay(size, f"vllm-{policy}")
                    )
                    ours = sum(tiers.gpu_hits) + sum(traffic.loaded)
                    between = time.process_time()
                    real = real_hits(references, num_gpu, size, policy, block_size)
                    took = between - start, time.process_time() - between
                    shares = [100 * hits / references.num_ids for hits in (ours, real)]
                    worst = max(worst, abs(shares[0] - shares[1]))
                    name = trace.name[:19] if trace else "generated"
                    apart = shares[0] - shares[1]
                    print(
                        f"{name:20}{num_gpu:>8,}{policy:>8}{size:>9,}{shares[0]:>10.2f}"
                        f"{shares[1]:>8.2f}{apart:>+7.2f}{took[0]:>7.1f}{took[1]:>8.1f}",
                        flush=True,
                    )
    print(f"at most {worst:.2f} points apart")
    sys.exit(1 if worst > MOST_APART else 0)


if __name__ == "__main__":
    main()
