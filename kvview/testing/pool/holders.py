"""POOL-6 and POOL-8: several blocks hold one key, as after two equal prompts at once."""

from __future__ import annotations

from kvview.testing.harness import Capability
from kvview.testing.pool.driver import PoolDriver, pool_check

CACHE, EVICT = Capability.CACHE, Capability.EVICT
FIND_CACHED, BLOCK_KEYS = Capability.FIND_CACHED, Capability.BLOCK_KEYS


def _alike(pool: PoolDriver, num_blocks: int = 3) -> tuple[list[int], bytes]:
    """Blocks that the engine uses, all under one key."""
    blocks = pool.allocate(num_blocks)
    (key,) = pool.cache(blocks[:1])
    pool.cache_as(blocks[1:], [key] * (num_blocks - 1))
    return blocks, key


@pool_check("POOL-6", CACHE)
def check_pool_6_each_block_of_one_key_is_yielded(pool: PoolDriver) -> None:
    """Once each, where it stands in the queue, and the others when one was touched."""
    blocks, _ = _alike(pool)
    other = pool.hashed(1)
    pool.release(blocks)
    pool.check_queries()
    pool.equal(pool.walk(), pool.expected_walk(), "each block of one key is yielded")
    for block in (blocks[1], blocks[0]):
        pool.touch([block])
        pool.equal(pool.walk(), pool.expected_walk(), "the others are yielded still")
        pool.free([block])
        pool.equal(pool.walk(), pool.expected_walk(), "each block of one key is yielded")
    pool.has_order = True
    pool.check_free(*blocks, *other)
    pool.equal(pool.walk(), [], "a walk yields nothing after everything was evicted")


@pool_check("POOL-7", CACHE)
def check_pool_7_walk_goes_on_past_a_block_of_the_same_key(pool: PoolDriver) -> None:
    """What is touched ahead is left out by its block, not by its key."""
    blocks, _ = _alike(pool, 4)
    pool.release(blocks)
    walk = pool.start_walk()
    pool.step(walk)
    pool.touch([blocks[2]])
    rest = [block for block, _ in pool.rest(walk)]
    pool.equal(rest, [blocks[1], blocks[3]], "what is yielded is free at that moment")


@pool_check("POOL-8", CACHE, FIND_CACHED)
def check_pool_8_key_is_found_while_any_block_holds_it(pool: PoolDriver) -> None:
    """One after the other is handed out again: a holder that is left is found, then none."""
    for gone in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        blocks, key = _alike(pool)
        pool.release([blocks[at] for at in gone])
        pool.check_found([key])
        for at in gone:
            while blocks[at] in pool.hashes:
                pool.allocate(1)
            pool.check_found([key])
        pool.release(list(pool.engine))


@pool_check("POOL-8", CACHE, FIND_CACHED, EVICT)
def check_pool_8_evicting_one_block_leaves_the_others(pool: PoolDriver) -> None:
    """A key is the others' still when the engine drops one of its blocks."""
    for gone in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        blocks, key = _alike(pool)
        pool.release(blocks[1:])
        for at in gone:
            pool.evict([blocks[at]])
            pool.check_found([key])
            pool.check_queries()
        pool.release(blocks[:1])
        pool.check_free(*blocks)


@pool_check("POOL-8", CACHE, FIND_CACHED, EVICT)
def check_pool_8_block_takes_a_key_again(pool: PoolDriver) -> None:
    """A key that was gone with its last block, or one of them, comes again with any."""
    blocks, key = _alike(pool)
    pool.evict(blocks[:2])
    pool.cache_as([blocks[1]], [key])
    pool.check_found([key])
    pool.evict(blocks[1:])
    pool.check_found([key])
    pool.cache_as([blocks[0]], [key])
    pool.check_found([key])
    pool.release(blocks)
    pool.check_queries()
    pool.check_free(*blocks)
    pool.check_found([key])


@pool_check("POOL-8", CACHE, BLOCK_KEYS)
def check_pool_8_each_block_tells_the_key(pool: PoolDriver) -> None:
    """``block_keys`` goes by block: one that was handed out again has lost the key alone."""
    blocks, _ = _alike(pool)
    pool.release(blocks[:1])
    pool.check_queries()
    while blocks[0] in pool.hashes:
        pool.allocate(1)
    pool.check_queries()
    pool.release(blocks[1:])
    pool.touch(blocks[2:])
    pool.check_queries()


@pool_check("POOL-8", CACHE, FIND_CACHED, Capability.RESET)
def check_pool_8_reset_forgets_each_block_of_a_key(pool: PoolDriver) -> None:
    """After a reset nobody holds the key, and who takes it again is the only one."""
    blocks, key = _alike(pool)
    pool.release(blocks)
    pool.equal(pool.reset(), True, "a reset is done when nothing is held")
    pool.check_found([key])
    again = pool.allocate(1)
    pool.cache_as(again, [key])
    pool.check_found([key])
    pool.check_queries()


@pool_check("GUARD-1", CACHE, BLOCK_KEYS, Capability.LEASES)
def check_guard_1_lease_names_a_block_of_several(pool: PoolDriver) -> None:
    """With ``expected_keys`` each block of one key can be leased, and no other one."""
    blocks, key = _alike(pool)
    pool.release(blocks)
    for block in blocks:
        lease = pool.call(pool.view, "lease", [block], expected_keys=[key])
        pool.name(lease, "lease")
        pool.call(lease, "release")
    pool.hashed_free.clear()
    pool.check_free(*blocks)


@pool_check("POOL-13", CACHE, Capability.RESUMABLE_WALK)
def check_pool_13_each_block_of_one_key_is_taken(pool: PoolDriver) -> None:
    """A resumed walk goes by block, whatever the key."""
    blocks, _ = _alike(pool, 5)
    pool.release(blocks)
    walk = pool.open_walk()
    pool.take(walk, 2)
    pool.touch([blocks[3], blocks[0]])
    pool.take(walk, 1)
    pool.free([blocks[3], blocks[0]])
    pool.take(walk, 9)


@pool_check("POOL-14", CACHE, Capability.REUSE_NOTICE)
def check_pool_14_notice_is_of_the_block_not_of_its_key(pool: PoolDriver) -> None:
    """Another block of the same key that is handed out first is not told of."""
    blocks, _ = _alike(pool)
    pool.touch(blocks)
    pool.release(blocks)
    pool.free(blocks[:1])
    pool.free_with_notice(blocks[1:])
    while blocks[2] in pool.hashes:
        pool.allocate(1)
