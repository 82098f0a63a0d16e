"""The block pool in steady state beside vLLM's: used pools, scattered ids, blocks with hashes.

    python benchmarks/pool_steady.py [--json FILE] [--vllm-sources DIR] [--rounds N]

Both pools have been through the same churn: all blocks hashed, and freed in random order.
Requests of 1 to 500 blocks come and go in random order, as in an engine; touches name
scattered blocks, in batches of 64. ``*_speedup`` is vLLM's time over ours, median of the
rounds, in turns in one process. ``worst_call_ms`` is CPU time of one call.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

from peer import (  # type: ignore[import-not-found, unused-ignore]
    Figures,
    take_turns,
    vllm_benchmark,
)

from kvview_reference.pool import BlockPool
from pool import OurSide, VLLMSide  # type: ignore[import-not-found, unused-ignore]

SIZES = (100_000, 1_000_000)
BATCH = 64
BLOCKS_PER_ROUND = 20_000
TOUCHED_SHARES = (0.0, 0.001, 0.1, 0.49)


class Ours:
    """The reference pool, by block id."""

    def __init__(self, num_blocks: int) -> None:
        self.side = OurSide(num_blocks)
        pool = self.side.pool
        self.take, self.give, self.touch = (
            pool.allocate_blocks,
            pool.free_blocks,
            pool.touch_blocks,
        )

    def of(self, block_ids: list[int]) -> Any:
        return block_ids

    def hash(self, blocks: Any, hashes: list[bytes]) -> None:
        self.side.pool.cache_blocks(blocks, hashes, block_size=16)


class VLLMs:
    """vLLM's pool, by block."""

    def __init__(self, num_blocks: int) -> None:
        self.side = VLLMSide(num_blocks)
        pool = self.side.pool
        self.take, self.give, self.touch = pool.get_new_blocks, pool.free_blocks, pool.touch

    def of(self, block_ids: list[int]) -> Any:
        """A connector names blocks by id."""
        blocks = self.side.pool.blocks
        return [blocks[block_id] for block_id in block_ids]

    def hash(self, blocks: Any, hashes: list[bytes]) -> None:
        make_key, insert = self.side.make_key, self.side.pool._insert_block_hash
        for block, block_hash in zip(blocks, hashes, strict=True):
            insert(make_key(block_hash, 0), block, 16)


def make(kind: Any, num_blocks: int) -> Any:
    """A used pool: all blocks hashed, freed in random order."""
    side = kind(num_blocks)
    blocks = side.take(num_blocks - 1)
    side.hash(blocks, [sha256(n.to_bytes(4, "big")).digest() for n in range(num_blocks - 1)])
    random.Random(1).shuffle(blocks)
    side.give(blocks)
    return side


def request_churn(side: Any, num_blocks: int) -> Callable[[], None]:
    """Requests of mixed sizes take, hash and free blocks; half of the pool is in use."""
    rng, running = random.Random(2), list[Any]()
    number = num_blocks

    def turn() -> None:
        nonlocal number
        taken = 0
        while taken < BLOCKS_PER_ROUND:
            size = rng.randint(1, 500)
            blocks = side.take(size)
            side.hash(blocks, [n.to_bytes(32, "big") for n in range(number, number + size)])
            number += size
            running.append(blocks)
            taken += size
            if len(running) > 100:
                last = len(running) - 1
                at = rng.randint(0, last)
                running[at], running[last] = running[last], running[at]
                side.give(running.pop())

    return turn


def touches(side: Any, num_blocks: int) -> Callable[[], None]:
    rng = random.Random(3)
    batches = [
        rng.sample(range(1, num_blocks), BATCH) for _ in range(4 * BLOCKS_PER_ROUND // BATCH)
    ]
    at = 0

    def turn() -> None:
        nonlocal at
        for batch in batches[at : at + BLOCKS_PER_ROUND // BATCH]:
            side.touch(side.of(batch))
            side.give(side.of(batch))
        at = (at + BLOCKS_PER_ROUND // BATCH) % len(batches)

    return turn


def worst_call(num_blocks: int) -> float:
    """The longest single call of a pool in which all is touched, allocated and walked, ms."""
    side = make(Ours, num_blocks)
    pool, worst = side.side.pool, 0.0
    gc.disable()
    for offset in range(0, 8 * num_blocks, 1000):
        first = 1 + offset % (num_blocks - 1001)
        block_ids = list(range(first, first + 1000))
        calls: tuple[Callable[[], object], ...] = (
            partial(pool.touch_blocks, block_ids),
            partial(pool.free_blocks, block_ids),
            partial(pool.allocate_blocks, 1),  # as the engine does
        )
        for call in calls:
            start = time.thread_time()
            call()
            worst = max(worst, time.thread_time() - start)
    gc.enable()
    return worst * 1e3


def bytes_per_block(num_blocks: int, num_touches: int) -> float:
    """Of a pool once used, and touched so often; without hashes, which are the keys' own."""
    gc.collect()
    tracemalloc.start()
    pool = BlockPool(num_blocks)
    block_ids = pool.allocate_blocks(num_blocks - 1)
    random.Random(4).shuffle(block_ids)
    pool.free_blocks(block_ids)
    worst = tracemalloc.get_traced_memory()[0]
    for _ in range(num_touches):
        for first in range(0, num_blocks, 1000):
            batch = block_ids[first : first + 1000]
            pool.touch_blocks(batch)
            pool.free_blocks(batch)
        worst = max(worst, tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return (worst - sys.getsizeof(block_ids)) / num_blocks


def exhaust(iterable: Any) -> None:
    deque(iterable, maxlen=0)


def measure(sizes: Sequence[int], rounds: int, figures: Figures) -> None:
    per_round = BLOCKS_PER_ROUND
    for size in sizes:
        for name, work in (("alloc_hash_free", request_churn), ("touch_free", touches)):
            sides = [work(make(kind, size), size) for kind in (Ours, VLLMs)]
            times = take_turns(sides, rounds=rounds)
            del sides
            gc.collect()
            figures.ratio(f"{name}_{size}", _per_block(times, per_round), 2.0)
        figures.limit(f"worst_call_ms_{size}", worst_call(size), 5.0)
    size = 20_001
    for share in TOUCHED_SHARES:
        pools = [make(kind, size) for kind in (Ours, VLLMs)]
        block_ids = random.Random(5).sample(range(1, size), int(share * size))
        for pool in pools:
            pool.touch(pool.of(block_ids))
            pool.give(pool.of(block_ids))
        orders = [pool.side.free_order for pool in pools]
        assert orders[0]() == orders[1]()
        walks = [lambda side=pool.side: exhaust(side.walk()) for pool in pools]
        name = f"{share * 100:g}_percent_touched"
        figures.ratio(f"walk_{name}", _per_block(take_turns(walks, rounds=rounds), size), 1.0)
        figures.ratio(f"order_{name}", _per_block(take_turns(orders, rounds=rounds), size), 1.0)
    figures.limit("bytes_once_used", bytes_per_block(100_000, 0), 110.0)
    figures.limit("bytes_at_worst", bytes_per_block(100_000, 12), 150.0)


def _per_block(times: list[list[float]], num_blocks: int) -> list[list[float]]:
    return [[seconds / num_blocks for seconds in side] for side in times]


main = vllm_benchmark(
    measure,
    Figures("pool in steady state", "ns a block", 1e9),
    SIZES,
    "Measure the block pool in steady state beside vLLM's.",
)


if __name__ == "__main__":
    main()
