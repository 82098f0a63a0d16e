"""POOL-7 and POOL-13: a walk goes on, and tells the truth, while blocks come and go."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

from kvview.errors import ViewClosedError
from kvview.testing.cost import cost_of, cost_of_first
from kvview.testing.harness import Capability
from kvview.testing.pool.driver import PoolDriver, pool_check

CACHE = Capability.CACHE
RESUMABLE_WALK = Capability.RESUMABLE_WALK
_TOLERATED_GROWTH = 32_768  # bytes


def _bytes_kept(work: Callable[[], None], first: Callable[[], None] = lambda: None) -> int:
    """Bytes that work leaves behind, beyond what ``first`` does."""
    tracemalloc.start()
    try:
        first()
        start = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()


@pool_check("POOL-7", CACHE)
def check_pool_7_walk_goes_on_when_what_it_yields_is_touched(pool: PoolDriver) -> None:
    """Touching each block as it is yielded still reaches every block."""
    blocks = pool.hashed(5)
    walk = pool.start_walk()
    seen = []
    while (item := pool.step(walk)) is not None:
        seen.append(item[0])
        pool.true(len(seen) <= 5, "a walk ends", seen, "5 blocks")
        pool.touch(seen[-1:])
    pool.equal(seen, blocks, "a walk goes on after a touch")
    pool.check_held(*blocks)


@pool_check("POOL-7", CACHE, Capability.FREE_ORDER)
def check_pool_7_walk_of_the_whole_queue_goes_on(pool: PoolDriver) -> None:
    """``iter_free_block_ids`` leaves out what was touched ahead, and yields no block twice."""
    pool.hashed(5)
    order = pool.listed(pool.view, "iter_free_block_ids")
    walk = pool.start_walk("iter_free_block_ids")
    seen: list[int] = []
    while (block := pool.step(walk)) is not None:
        seen.append(block)
        pool.true(len(seen) <= len(order), "a walk ends", seen, f"{len(order)} blocks")
        pool.touch([block])
        if len(seen) == 2:
            pool.touch([order[3], order[-1]])
            pool.free(seen[:1])
    left = [block for block in order if block not in (order[3], order[-1])]
    pool.equal(seen, left, "a walk of the whole queue yields what is free, each block once")


@pool_check("POOL-7", CACHE)
def check_pool_7_block_touched_ahead_is_not_yielded(pool: PoolDriver) -> None:
    """What was touched after the walk began, before it got there, is left out."""
    blocks = pool.hashed(5)
    walk = pool.start_walk()
    pool.step(walk)
    pool.touch([blocks[1], blocks[3]])
    rest = [block for block, _ in pool.rest(walk)]
    pool.equal(rest, [blocks[2], blocks[4]], "what is yielded is free at that moment")


@pool_check("POOL-7", CACHE)
def check_pool_7_block_allocated_ahead_is_not_yielded(pool: PoolDriver) -> None:
    """What the engine took, and evicted, after the walk began is left out."""
    blocks = pool.hashed(5)
    walk = pool.start_walk()
    pool.step(walk)
    allocated = pool.allocate(len(pool.free_blocks) - 1)
    left = [block for block in blocks[1:] if block not in allocated]
    rest = [block for block, _ in pool.rest(walk)]
    pool.equal(rest, left, "what is yielded is free, with its hash, at that moment")


@pool_check("POOL-7", CACHE, Capability.EVICT)
def check_pool_7_block_evicted_ahead_is_not_yielded(pool: PoolDriver) -> None:
    """What lost its hash after the walk began, free as it is, is left out."""
    blocks = pool.hashed(5)
    walk = pool.start_walk()
    pool.step(walk)
    pool.evict([blocks[2]])
    rest = [block for block, _ in pool.rest(walk)]
    pool.equal(rest, [blocks[1], blocks[3], blocks[4]], "what is yielded has its hash")


@pool_check("POOL-7", CACHE)
def check_pool_7_block_freed_while_walking_is_not_part_of_the_walk(pool: PoolDriver) -> None:
    """A block that joins the queue after the walk began is not yielded by it."""
    blocks = pool.hashed(4)
    pool.touch(blocks[3:])
    walk = pool.start_walk()
    first = pool.step(walk)
    pool.equal(first and first[0], blocks[0], "a walk begins with the next victim")
    pool.free(blocks[3:])
    rest = [block for block, _ in pool.rest(walk)]
    pool.equal(rest, blocks[1:3], "a walk covers the queue as it stood when it began")


@pool_check("POOL-7", CACHE)
def check_pool_7_block_touched_and_freed_while_walking_is_yielded_once(pool: PoolDriver) -> None:
    """Touch and free of each yielded block moves it behind the end of the walk."""
    blocks = pool.hashed(4)
    walk = pool.start_walk()
    seen: list[int] = []
    while (item := pool.step(walk)) is not None:
        seen.append(item[0])
        pool.true(len(seen) <= 4, "a walk yields no block twice", seen, "4 blocks")
        pool.touch(seen[-1:])
        pool.free(seen[-1:])
    pool.equal(seen, blocks, "a walk goes on after a touch and a free")
    pool.equal(pool.walk(), pool.expected_walk(), "a new walk sees the new order")


@pool_check("POOL-7", CACHE, Capability.MANY_HASHES)
def check_pool_7_block_touched_between_its_hashes_is_left(pool: PoolDriver) -> None:
    """The second hash of a block that was touched after the first is not yielded."""
    blocks = pool.allocate(2)
    pool.cache(blocks)
    pool.cache(blocks[:1], group_idx=1)
    pool.release(blocks)
    walk = pool.start_walk()
    pool.step(walk)
    pool.touch(blocks[:1])
    rest = [block for block, _ in pool.rest(walk)]
    pool.equal(rest, blocks[1:], "what is yielded is free at that moment")


@pool_check("POOL-7", CACHE)
def check_pool_7_two_walks_do_not_disturb_each_other(pool: PoolDriver) -> None:
    """A walk that another one overtakes, and a dropped one, change nothing."""
    blocks = pool.hashed(4)
    walk = pool.start_walk()
    pool.step(walk)
    pool.equal(pool.walk(), pool.expected_walk(), "a second walk sees everything")
    pool.touch(blocks[1:2])
    rest = [block for block, _ in pool.rest(walk)]
    pool.equal(rest, blocks[2:], "the first walk goes on")


# --- POOL-13: walks that go on in later steps ---


@pool_check("POOL-13", CACHE, RESUMABLE_WALK)
def check_pool_13_walk_goes_on_where_it_stopped(pool: PoolDriver) -> None:
    """Each call takes what is behind the one before; an empty answer is no end."""
    pool.hashed(5)
    walk = pool.open_walk()
    for max_blocks in (2, 0, 2, 9, 9):
        pool.take(walk, max_blocks)
    pool.hashed(2)
    pool.take(walk, 9)
    pool.take(walk, 9)


@pool_check("POOL-13", CACHE, RESUMABLE_WALK)
def check_pool_13_what_came_back_comes_again(pool: PoolDriver) -> None:
    """What was taken, touched and freed comes again, behind all that stayed."""
    blocks = pool.hashed(6)
    walk = pool.open_walk()
    taken = pool.take(walk, 3)
    pool.touch(taken)
    pool.free(taken[:2])
    pool.take(walk, 2)
    pool.free(taken[2:])
    pool.take(walk, 9)
    pool.touch(blocks)
    pool.take(walk, 9)
    pool.free(blocks)
    pool.take(walk, 9)


@pool_check("POOL-13", CACHE, RESUMABLE_WALK, Capability.GIVE_BACK)
def check_pool_13_what_joins_at_the_head_comes_after_restart(pool: PoolDriver) -> None:
    """What is given back is in front of all that was taken, itself too."""
    blocks = pool.hashed(5)
    walk = pool.open_walk()
    for taken in (blocks[:1], blocks[1:3], blocks[3:]):
        pool.take(walk, len(taken))
        pool.touch(taken)
        pool.give_back(taken)
        pool.take(walk, 0)
    pool.take(walk, 9)
    pool.restart(walk)
    pool.take(walk, 9)


@pool_check("POOL-13", CACHE, RESUMABLE_WALK)
def check_pool_13_walk_goes_on_when_its_place_is_gone(pool: PoolDriver) -> None:
    """The blocks around the place where it stopped may be touched, and come back."""
    blocks = pool.hashed(8)
    for place in range(1, 8):
        walk = pool.open_walk()
        pool.take(walk, place)
        around = blocks[place - 1 : place + 1]
        pool.touch(around)
        pool.take(walk, 1)
        pool.free(around)
        pool.take(walk, 9)
        pool.touch(blocks)
        pool.free(blocks)
        pool.call(walk, "close")


@pool_check("POOL-13", CACHE, RESUMABLE_WALK)
def check_pool_13_engine_may_take_what_the_walk_passed(pool: PoolDriver) -> None:
    """The engine takes less than the walk has passed, more, and all of it."""
    pool.hashed(len(pool.blocks))
    walk = pool.open_walk()
    pool.take(walk, 4)
    for num_blocks in (2, 5):
        pool.allocate(num_blocks)
        pool.take(walk, 1)
    pool.allocate(len(pool.free_blocks))
    pool.take(walk, 9)
    pool.cache(list(pool.engine))
    pool.release(list(pool.engine))
    pool.take(walk, 9)
    pool.take(walk, pool.num_blocks)
    pool.restart(walk)
    pool.take(walk, 2)
    pool.allocate(5)
    pool.take(walk, pool.num_blocks)


@pool_check("POOL-13", CACHE, RESUMABLE_WALK)
def check_pool_13_what_is_taken_is_true(pool: PoolDriver) -> None:
    """Blocks held by now, unhashed ones and dropped hashes are passed over."""
    blocks = pool.hashed(6)
    walk = pool.open_walk()
    pool.take(walk, 1)
    pool.touch([blocks[1], blocks[3]])
    if pool.can(Capability.EVICT):
        pool.evict([blocks[2]])
    pool.release(pool.allocate(1))
    pool.take(walk, 9)


@pool_check("POOL-13", CACHE, RESUMABLE_WALK, Capability.MANY_HASHES)
def check_pool_13_block_with_several_hashes_is_one_block(pool: PoolDriver) -> None:
    """All keys of a block come in one call, whatever the limit."""
    blocks = pool.allocate(3)
    pool.cache(blocks)
    pool.cache(blocks[:1], group_idx=1)
    pool.cache(blocks[:1], group_idx=2)
    pool.release(blocks)
    walk = pool.open_walk()
    for _ in range(4):
        pool.take(walk, 1)


@pool_check("POOL-13", CACHE, RESUMABLE_WALK)
def check_pool_13_walk_begins_again(pool: PoolDriver) -> None:
    """``restart`` goes back to the next victim; other walks go on where they are."""
    pool.hashed(4)
    walk, other = pool.open_walk(), pool.open_walk()
    pool.take(walk, 3)
    pool.take(other, 1)
    pool.restart(walk)
    pool.take(walk, 9)
    pool.take(other, 9)


@pool_check("POOL-13", CACHE, RESUMABLE_WALK)
def check_pool_13_closed_walk_is_refused(pool: PoolDriver) -> None:
    """A closed walk takes nothing in silence; its view, and other walks, go on."""
    pool.hashed(2)
    walk, other = pool.open_walk(), pool.open_walk()
    for _ in range(2):
        pool.call(walk, "close")
    pool.refused(ViewClosedError, walk, "take", 1)
    pool.refused(ViewClosedError, walk, "restart")
    pool.take(other, 1)
    if pool.can(Capability.CLOSE):
        pool.call(pool.harness, "close")
        pool.refused(ViewClosedError, other, "take", 1)
        pool.refused(ViewClosedError, other, "restart")
        pool.call(other, "close")


@pool_check("POOL-13", CACHE, RESUMABLE_WALK, Capability.SIZED)
def check_pool_13_taking_a_few_costs_the_same_in_a_large_pool(pool: PoolDriver) -> None:
    """In the steady state of an engine, near the head of the queue and at its end."""
    for is_at_the_end in (False, True):
        costs = []
        for num_blocks in (256, 4096):
            pool.resize(num_blocks)
            pool.hashed(len(pool.blocks))
            walk = pool.open_walk()
            if is_at_the_end:
                pool.take(walk, num_blocks)
                pool.take(walk, num_blocks)
            for _ in range(8):
                _serve(pool, walk)
            costs.append(cost_of(lambda walk=walk: walk.take(8)))  # type: ignore[misc]
        small, large = costs
        limit = small.times(3)
        pool.true(
            large.lines <= limit.lines and large.num_bytes <= limit.num_bytes,
            "a walk goes on where it stopped: taking 8 blocks costs O(8), not O(pool)",
            large,
            f"at most {limit} (3 x that of 256 blocks, and a little)",
        )


@pool_check("POOL-13", CACHE, RESUMABLE_WALK, Capability.SIZED)
def check_pool_13_open_walk_does_not_grow(pool: PoolDriver) -> None:
    """What a walk keeps is bounded by the pool, however many blocks it has passed."""
    pool.resize(128)
    pool.hashed(len(pool.blocks))
    walk = pool.open_walk()
    sizes = []
    tracemalloc.start()
    try:
        for num_steps in (48, 480):  # of 8 blocks each: 3 and 30 times the pool
            for _ in range(num_steps):
                with pool.unrecorded():
                    _serve(pool, walk)
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    grown = sizes[1] - sizes[0]
    limit = f"at most {_TOLERATED_GROWTH} bytes"
    pool.true(grown <= _TOLERATED_GROWTH, "an open walk does not grow", grown, limit)


@pool_check("POOL-13", CACHE, RESUMABLE_WALK)
def check_pool_13_walk_that_is_dropped_costs_nothing(pool: PoolDriver) -> None:
    """Neither memory nor time of the engine, whether it was closed or not."""
    blocks = pool.hashed(6)

    def drop(times: int) -> None:
        for _ in range(times):
            pool.view.walk_free_blocks().take(1)

    def serve() -> None:
        for _ in range(8):
            pool.harness.release(pool.harness.allocate(2))

    pool.line("for _ in range(2000): view.walk_free_blocks().take(1)")
    drop(100)
    before = cost_of(serve)
    grown = _bytes_kept(partial(drop, 2000))
    limit = f"at most {_TOLERATED_GROWTH} bytes"
    pool.true(grown <= _TOLERATED_GROWTH, "a dropped walk leaves nothing behind", grown, limit)
    after = cost_of(serve).lines
    lines = before.times(2).lines
    pool.true(after <= lines, "nor does it slow the engine", after, f"at most {lines} lines")
    assert blocks, "something to walk over"


@pool_check("POOL-1")
def check_pool_1_touching_and_freeing_leaves_nothing_behind(pool: PoolDriver) -> None:
    """However often the same blocks are held and given back while the engine rests."""
    hashed = pool.hashed(4) if pool.can(CACHE) else []
    blocks = [block for block in pool.blocks if block not in hashed][:4]

    def hold(times: int) -> None:
        for _ in range(times):
            for some in (blocks, hashed):
                pool.view.touch_blocks(some)
                pool.view.free_blocks(some)

    pool.line(f"for _ in range(3000): view.touch_blocks({blocks}); view.free_blocks({blocks})")
    grown = _bytes_kept(partial(hold, 3000), partial(hold, 500))
    limit = f"at most {_TOLERATED_GROWTH} bytes"
    pool.true(grown <= _TOLERATED_GROWTH, "a hold that ended leaves nothing", grown, limit)


@pool_check("POOL-6", CACHE, Capability.SIZED)
def check_pool_6_what_was_touched_is_passed_over_once(pool: PoolDriver) -> None:
    """Where most of the queue is held, one walk may meet that; the next ones need not."""
    pool.resize(2000)
    blocks = pool.hashed(len(pool.blocks))
    alone = cost_of_first(pool.start_walk, 20)
    pool.touch([block for number, block in enumerate(blocks) if number % 100])
    for _ in range(3):
        pool.equal(pool.walk(), pool.expected_walk(), "a walk yields what is left")
    again = cost_of_first(pool.start_walk, 20)
    lines = alone.times(8).lines
    pool.true(
        again.lines <= lines,
        "a walk over 20 free blocks costs O(20), whatever was touched before",
        again.lines,
        f"at most {lines} lines (8 x that of 20 blocks in a row, and a little)",
    )
    if pool.can(Capability.FREE_ORDER):
        for _ in range(3):
            pool.listed(pool.view, "iter_free_block_ids")
        ids = cost_of_first(pool.view.iter_free_block_ids, 20)
        pool.true(ids.lines <= lines, "nor does the walk over all", ids.lines, f"{lines} lines")
    pool.free(list(pool.held))
    pool.equal(pool.walk(), pool.expected_walk(), "a walk yields what came back")


def _serve(pool: PoolDriver, walk: Any) -> None:
    """One step of an engine and of a connector that stores what is about to be evicted."""
    taken = pool.take(walk, 8)
    pool.touch(taken[1::2])
    used = pool.allocate(8)
    pool.cache(used)
    pool.release(used)
    pool.free(taken[1::2])


@pool_check("POOL-13", Capability.RESUMABLE_WALK, CACHE, Capability.SIZED)
def check_pool_13_walks_go_on_while_others_pass_and_end(pool: PoolDriver) -> None:
    """Most of the queue is touched, whole walks pass over it, one of several walks is closed."""
    pool.resize(600)
    blocks = pool.hashed(560)
    walks = [pool.open_walk() for _ in range(3)]
    for walk, num_blocks in zip(walks, (40, 150, 330), strict=True):
        pool.take(walk, num_blocks)
    for first in (0, 1, 2):  # each time what is left is thinned out, before and behind them
        free = [block for block in blocks if block in pool.free_blocks]
        pool.touch([block for number, block in enumerate(free) if number % 3 != first])
        for _ in range(2):
            pool.equal(pool.walk(), pool.expected_walk(), "a whole walk yields what is free")
        if first == 1:
            pool.call(walks[1], "close")
            del walks[1]
        for walk in walks:
            pool.take(walk, 5)
    for walk in walks:
        while pool.take(walk, 7):
            pass
    pool.free(list(pool.held.elements()))
    for walk in walks:
        pool.restart(walk)
        if pool.can(Capability.GIVE_BACK):
            last = pool.expected_walk()[-1][0]
            pool.touch([last])
            pool.give_back([last])  # to where a walk begins that has taken nothing yet
        while pool.take(walk, 100):
            pass
