"""Checks of the pool contract that the model cannot state: cost and growth."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvview.testing.cost import Cost, cost_of, cost_of_first, growth_of
from kvview.testing.harness import Capability as C
from kvview.testing.pool.player import PoolPlayer
from kvview.testing.search import example

_TOLERATED_GROWTH = 32_768  # bytes
_WALK = "iter_free_block_ids_with_hash"


def _fill(pool: PoolPlayer, num_blocks: int) -> list[int]:
    """Make a pool whose blocks are all free and have keys; returns the blocks in queue order."""
    pool.resize(num_blocks)
    pool.allocate(len(pool.model.joined))
    blocks = list(pool.model.engine)
    pool.cache_and_release(blocks)
    return blocks


def _walk(pool: PoolPlayer) -> Any:
    return getattr(pool.views[0], _WALK)()


def _keep_size(
    pool: PoolPlayer, what: str, work: Callable[[], None], warm_up: Callable[[], None]
) -> None:
    """Break the law if some work, after a warm-up, leaves memory allocated."""
    grown = growth_of(work, warm_up)
    limit = f"at most {_TOLERATED_GROWTH} bytes"
    pool.true(grown <= _TOLERATED_GROWTH, what, grown, limit)


def _bound(pool: PoolPlayer, what: str, cost: Cost, limit: Cost) -> None:
    is_small = cost.lines <= limit.lines and cost.num_bytes <= limit.num_bytes
    pool.true(is_small, what, cost, f"at most {limit}")


@example(PoolPlayer, "POOL-6", C.CACHE, C.SIZED)
def check_pool_6_cost_of_a_walk(pool: PoolPlayer) -> None:
    """Cost: the first eight items of a walk cost about the same for 4,096 blocks as for 256."""
    costs = []
    for num_blocks in (256, 4096):
        _fill(pool, num_blocks)
        costs.append(cost_of_first(partial(_walk, pool), 8))
    _bound(pool, "a walk is lazy: 8 items cost O(8), not O(pool)", costs[1], costs[0].times(3))


@example(PoolPlayer, "POOL-6", C.CACHE, C.SIZED)
def check_pool_6_cost_after_touches(pool: PoolPlayer) -> None:
    """Cost: only the first walk skips held blocks; later walks do not read these blocks again."""
    blocks = _fill(pool, 2000)
    alone = cost_of_first(partial(_walk, pool), 20)
    pool.views[0].touch_blocks([block for number, block in enumerate(blocks) if number % 100])
    walks = [_WALK] + ["iter_free_block_ids"] * pool.can(C.FREE_ORDER)
    for method in walks:
        for _ in range(3):
            pool.listed(pool.views[0], method)
        again = cost_of_first(getattr(pool.views[0], method), 20)
        _bound(pool, "20 free blocks cost O(20), whatever is held", again, alone.times(8))


@example(PoolPlayer, "POOL-13", C.CACHE, C.RESUMABLE_WALK, C.SIZED)
def check_pool_13_cost_of_a_resumed_walk(pool: PoolPlayer) -> None:
    """Cost: a resumed walk is lazy near the head of the queue and at its end, step after step."""
    for is_at_the_end in (False, True):
        costs = []
        for num_blocks in (256, 4096):
            _fill(pool, num_blocks)
            walk = pool.views[0].walk_free_blocks()
            if is_at_the_end:
                walk.take(num_blocks)
                walk.take(num_blocks)
            for _ in range(8):
                _serve(pool, walk)
            costs.append(cost_of(partial(walk.take, 8)))
        _bound(pool, "a resumed walk costs O(8), not O(pool)", costs[1], costs[0].times(3))


def _serve(pool: PoolPlayer, walk: Any) -> None:
    """Run one step of an engine whose connector stores the next victims."""
    taken = list(dict.fromkeys(block for block, _ in walk.take(8)))
    held = taken[1::2]
    pool.views[0].touch_blocks(held)
    used = pool.harness.allocate(8)
    pool.num_hashes += len(used)
    hashes = [b"h%05d" % (pool.num_hashes + number) for number in range(len(used))]
    pool.harness.cache(used, hashes, 0)
    pool.harness.release(used)
    pool.views[0].free_blocks(held)


@example(PoolPlayer, "POOL-13", C.CACHE, C.RESUMABLE_WALK, C.SIZED)
def check_pool_13_growth_of_an_open_walk(pool: PoolPlayer) -> None:
    """Growth: the memory of an open walk is bounded by the pool, not by the passed blocks."""
    _fill(pool, 128)
    walk = pool.views[0].walk_free_blocks()

    def serve(times: int) -> None:
        for _ in range(times):
            _serve(pool, walk)

    _keep_size(pool, "an open walk does not grow", partial(serve, 430), partial(serve, 48))


@example(PoolPlayer, "POOL-13", C.CACHE, C.RESUMABLE_WALK)
def check_pool_13_cost_of_dropped_walks(pool: PoolPlayer) -> None:
    """Growth and cost: a walk that was dropped costs neither memory nor time of the engine."""
    _fill(pool, 16)

    def drop(times: int) -> None:
        for _ in range(times):
            pool.views[0].walk_free_blocks().take(1)

    def serve() -> None:
        for _ in range(8):
            pool.harness.release(pool.harness.allocate(2))

    drop(100)
    before = cost_of(serve)
    _keep_size(pool, "a dropped walk leaves nothing behind", partial(drop, 2000), partial(drop, 1))
    lines, most = cost_of(serve).lines, before.times(2).lines
    pool.true(lines <= most, "a dropped walk does not slow the engine", lines, f"at most {most}")


@example(PoolPlayer, "POOL-1")
def check_pool_1_growth_of_holds(pool: PoolPlayer) -> None:
    """Growth: ended holds keep no memory allocated, even after many holds."""
    blocks = pool.model.blocks[:8]
    if pool.can(C.CACHE):
        pool.allocate(4)
        pool.cache_and_release(list(pool.model.engine))

    def hold(times: int) -> None:
        for _ in range(times):
            pool.views[0].touch_blocks(blocks)
            pool.views[0].free_blocks(blocks)

    _keep_size(pool, "a hold that ended leaves nothing", partial(hold, 3000), partial(hold, 500))
