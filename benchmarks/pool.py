"""The block pool compared with vLLM's: fresh, call by call, and in steady state; and its size.

    python benchmarks/pool.py [--vllm-sources DIR] [--rounds N]

Both pools get the same calls, in turns, in one process. A connector names blocks by id, so
vLLM's calls include looking them up in ``pool.blocks``. ``view`` rows use a view and its ledger,
which vLLM does not have. In steady state all blocks have hashes and were freed in random order,
requests of 1 to 500 blocks come and go, and touches name scattered blocks in batches of 64. The
speedup is vLLM's time over kvview's.
"""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

from harness import (  # type: ignore[import-not-found, unused-ignore]
    Figures,
    beside_vllm,
    take_turns,
)

from kvview_reference.pool import BlockPool

NUM_BLOCKS = 10_001
BLOCKS_PER_ROUND = 20_000
BATCHES = (4, 64, 1000)
SCATTERED_BATCH = 64
TARGETS = {"alloc free 4": 1.0, "alloc free 1000": 3.0, "touch free 4": 1.0}
TARGETS |= {"touch free 1000": 2.0, "touch free hashed 1000": 2.0}


class Ours:
    """The reference pool, by block id."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.view = self.pool.view()
        self.take, self.give, self.touch = (
            self.pool.allocate_blocks,
            self.pool.free_blocks,
            self.pool.touch_blocks,
        )

    def of(self, block_ids: list[int]) -> Any:
        return block_ids

    def ids(self, blocks: Any) -> Any:
        return blocks

    def hash(self, blocks: Any, hashes: list[bytes]) -> None:
        self.pool.cache_blocks(blocks, hashes, block_size=16)

    def walk(self) -> Iterator[tuple[int, bytes]]:
        return self.view.iter_free_block_ids_with_hash()


class VLLMs:
    """vLLM's pool, by block, with the code that a connector writes by hand on top of it."""

    def __init__(self, num_blocks: int) -> None:
        utils: Any = import_module("vllm.v1.core.kv_cache_utils")
        self.make_key = utils.make_block_hash_with_group_id
        self.pool = import_module("vllm.v1.core.block_pool").BlockPool(num_blocks, True, 16)
        self.take, self.give, self.touch = (
            self.pool.get_new_blocks,
            self.pool.free_blocks,
            self.pool.touch,
        )

    def of(self, block_ids: list[int]) -> Any:
        blocks = self.pool.blocks
        return [blocks[block_id] for block_id in block_ids]

    def ids(self, blocks: Any) -> Any:
        return [block.block_id for block in blocks]

    def hash(self, blocks: Any, hashes: list[bytes]) -> None:
        insert = self.pool._insert_block_hash  # the loop of cache_full_blocks
        for block, block_hash in zip(blocks, hashes, strict=True):
            insert(self.make_key(block_hash, 0), block, 16)

    def walk(self) -> Iterator[tuple[int, bytes]]:
        queue = self.pool.free_block_queue
        tail = queue.fake_free_list_tail
        block = queue.fake_free_list_head.next_free_block
        while block is not tail:
            if (block_hash := block.block_hash) is not None:
                yield block.block_id, block_hash
            block = block.next_free_block


def hashes_of(first: int, number: int) -> list[bytes]:
    return [n.to_bytes(32, "big") for n in range(first, first + number)]


def used(kind: Any, num_blocks: int) -> Any:
    """A used pool: all blocks hashed, freed in random order."""
    side = kind(num_blocks)
    blocks = side.take(num_blocks - 1)
    side.hash(blocks, hashes_of(0, num_blocks - 1))
    random.Random(1).shuffle(blocks)
    side.give(blocks)
    return side


def allocation(side: Any, batch: int, hashes: list[bytes]) -> Callable[[], None]:
    """Take and free blocks; give each its own hash, if there are hashes."""

    def turn() -> None:
        blocks = side.take(batch)
        if hashes:
            side.hash(blocks, [hashes[block_id] for block_id in side.ids(blocks)])
        side.give(blocks)

    return turn


def touch_and_free(side: Any, block_ids: list[int]) -> None:
    side.touch(side.of(block_ids))
    side.give(side.of(block_ids))


def touch_and_free_in_view(side: Ours, block_ids: list[int]) -> None:
    side.view.touch_blocks(block_ids)
    side.view.free_blocks(block_ids)


def churn(side: Any, num_blocks: int) -> Callable[[], None]:
    """Requests of mixed sizes take, hash and free blocks; half of the pool is in use."""
    rng, running = random.Random(2), list[Any]()
    number = num_blocks

    def turn() -> None:
        nonlocal number
        taken = 0
        while taken < BLOCKS_PER_ROUND:
            size = rng.randint(1, 500)
            blocks = side.take(size)
            side.hash(blocks, hashes_of(number, size))
            number += size
            running.append(blocks)
            taken += size
            if len(running) > 100:
                at = rng.randrange(len(running))
                running[at], running[-1] = running[-1], running[at]
                side.give(running.pop())

    return turn


def scattered_touches(side: Any, num_blocks: int) -> Callable[[], None]:
    rng = random.Random(3)
    batches = [
        rng.sample(range(1, num_blocks), SCATTERED_BATCH)
        for _ in range(4 * BLOCKS_PER_ROUND // SCATTERED_BATCH)
    ]
    following = iter(batches * 1000)

    def turn() -> None:
        for _ in range(BLOCKS_PER_ROUND // SCATTERED_BATCH):
            touch_and_free(side, next(following))

    return turn


def exhaust_walk(side: Any) -> None:
    deque(side.walk(), maxlen=0)


def per_block(times: list[list[float]], num_blocks: int) -> list[list[float]]:
    return [[seconds / num_blocks for seconds in side] for side in times]


def bytes_per_block(num_blocks: int, num_touches: int) -> float:
    """The most bytes of a used pool that is touched some times, without its hashes."""
    gc.collect()
    tracemalloc.start()
    pool = BlockPool(num_blocks)
    block_ids = pool.allocate_blocks(num_blocks - 1)
    random.Random(4).shuffle(block_ids)
    pool.free_blocks(block_ids)
    worst = tracemalloc.get_traced_memory()[0]
    for _ in range(num_touches):
        for first in range(0, num_blocks, 1000):
            pool.touch_blocks(block_ids[first : first + 1000])
            pool.free_blocks(block_ids[first : first + 1000])
        worst = max(worst, tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return (worst - sys.getsizeof(block_ids)) / num_blocks


def call_by_call(rounds: int) -> None:
    figures = Figures("fresh, ns a block", 1e9)
    for is_hashed in (False, True):
        suffix = " hashed" if is_hashed else ""
        for batch in BATCHES:
            pools: list[Any] = [
                used(kind, NUM_BLOCKS) if is_hashed else kind(NUM_BLOCKS) for kind in (Ours, VLLMs)
            ]
            hashes = hashes_of(0, NUM_BLOCKS) if is_hashed else []
            ids = list(range(5000, 5000 + batch))
            touches = [partial(touch_and_free, pool, ids) for pool in pools]
            calls = {
                "alloc free": [allocation(pool, batch, hashes) for pool in pools],
                "touch free": touches,
                "view touch free": [partial(touch_and_free_in_view, pools[0], ids), touches[1]],
            }
            for name, sides in calls.items():
                name = f"{name}{suffix} {batch}"
                times = take_turns(sides, repeats=5 * BLOCKS_PER_ROUND // batch, rounds=rounds)
                figures.ratio(name, per_block(times, batch), TARGETS.get(name))
    builds = [partial(kind, 100_000) for kind in (Ours, VLLMs)]
    figures.ratio("build", per_block(take_turns(builds, rounds=min(rounds, 5)), 100_000), 5.0)
    figures.show()


def steady_state(rounds: int) -> None:
    figures = Figures("steady state, ns a block", 1e9)
    for size in (100_000, 1_000_000):
        for name, work in (("alloc hash free", churn), ("touch free", scattered_touches)):
            sides = [work(used(kind, size), size) for kind in (Ours, VLLMs)]
            times = take_turns(sides, rounds=rounds)
            figures.ratio(f"{name} {size}", per_block(times, BLOCKS_PER_ROUND), 2.0)
    walks = [partial(exhaust_walk, used(kind, 20_001)) for kind in (Ours, VLLMs)]
    figures.ratio("walk", per_block(take_turns(walks, rounds=rounds), 20_000), 1.0)
    figures.limit("bytes, once used", bytes_per_block(100_000, 0), 110.0)
    figures.limit("bytes, at worst", bytes_per_block(100_000, 12), 150.0)
    figures.show()


def measure(rounds: int) -> None:
    call_by_call(rounds)
    steady_state(rounds)


main = beside_vllm(measure, 5)

if __name__ == "__main__":
    main()
