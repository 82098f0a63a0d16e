"""POOL-7: a walk goes on, and tells the truth, while blocks come and go."""

from __future__ import annotations

from kvview.testing.harness import Capability
from kvview.testing.pool.driver import PoolDriver, pool_check

CACHE = Capability.CACHE


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
