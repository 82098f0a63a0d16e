"""POOL-12: what was held only to be read comes back as the next victim."""

from __future__ import annotations

from kvview.errors import BlockNotHeldError, UnknownBlockError, ViewClosedError
from kvview.testing.harness import Capability
from kvview.testing.pool.driver import PoolDriver, pool_check

CACHE = Capability.CACHE
GIVE_BACK = Capability.GIVE_BACK


@pool_check("POOL-12", GIVE_BACK, CACHE)
def check_pool_12_what_is_given_back_is_evicted_next(pool: PoolDriver) -> None:
    """Before the hashed blocks that were free all the time, and with its hash until then."""
    pool.has_order = True
    blocks = pool.hashed(6)
    pool.touch([blocks[1], blocks[3]])
    pool.give_back([blocks[3], blocks[1]])
    pool.equal(
        pool.walk(), pool.expected_walk(), "what is given back is the next victim, as it was"
    )
    pool.touch(blocks[5:])
    pool.free(blocks[5:])
    pool.equal(pool.walk(), pool.expected_walk(), "what is freed after it goes to the end")
    pool.check_free(*blocks)


@pool_check("POOL-12", GIVE_BACK, CACHE)
def check_pool_12_order_given_counts_hashed_or_not(pool: PoolDriver) -> None:
    """The very next allocations take them, in the order given."""
    hashed = pool.hashed(2)
    unhashed = pool.allocate(2)
    pool.touch([*hashed, *unhashed])
    pool.release(unhashed)
    order = [hashed[1], unhashed[0], hashed[0], unhashed[1]]
    pool.give_back(order)
    taken = [block for _ in order for block in pool.allocate(1)]
    pool.equal(taken, order, "allocations take what was given back, in the order given")
    pool.release(taken)
    pool.check_free(*order)


@pool_check("POOL-12", GIVE_BACK, CACHE)
def check_pool_12_later_calls_come_first(pool: PoolDriver) -> None:
    """What a later call gives back is evicted before what an earlier one did."""
    pool.has_order = True
    blocks = pool.hashed(5)
    pool.touch(blocks[:4])
    pool.give_back(blocks[:2])
    pool.give_back(blocks[2:4])
    pool.equal(pool.walk(), pool.expected_walk(), "each call puts blocks at the head")
    pool.check_free(*blocks)


@pool_check("POOL-12", GIVE_BACK, CACHE)
def check_pool_12_last_mention_of_a_block_counts(pool: PoolDriver) -> None:
    """A block that is named several times stands where its last mention is."""
    pool.has_order = True
    one, two, three = pool.hashed(3)
    pool.touch([three, one, two, one])
    pool.give_back([one, two, one, three])
    order = [block for block, _ in pool.walk()]
    pool.equal(order, [two, one, three], "a walk is in the order of the last mentions")
    pool.check_free(one, two, three)


@pool_check("POOL-12", GIVE_BACK, CACHE)
def check_pool_12_block_in_use_stays_in_use(pool: PoolDriver) -> None:
    """A block that the engine or another touch holds does not become free."""
    blocks = pool.allocate(2)
    pool.cache(blocks)
    pool.touch([blocks[0], blocks[1], blocks[1]])
    pool.give_back(blocks)
    pool.check_held(*blocks)
    pool.release(blocks)
    pool.check_held(blocks[1])
    pool.give_back(blocks[1:])
    pool.check_free(*blocks)


@pool_check("POOL-12", GIVE_BACK)
def check_pool_12_refusals_change_nothing(pool: PoolDriver) -> None:
    """What ``free_blocks`` refuses is refused, whole; the null block is skipped."""
    held, other = pool.blocks[1], pool.blocks[2]
    pool.touch([held])
    pool.refuse(BlockNotHeldError, "give_back_blocks", [held, held])
    pool.refuse(BlockNotHeldError, "give_back_blocks", [held, other])
    pool.refuse(UnknownBlockError, "give_back_blocks", [held, pool.num_blocks])
    pool.refuse(UnknownBlockError, "give_back_blocks", [held, True])
    pool.check_held(held)
    if pool.null is not None:
        pool.give_back([pool.null])
    pool.give_back([held])
    pool.check_free(held)
    if pool.can(Capability.CLOSE):
        pool.call(pool.harness, "close")
        pool.refuse(ViewClosedError, "give_back_blocks", [])
