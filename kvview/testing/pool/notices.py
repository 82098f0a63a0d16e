"""POOL-14: who gave a block back with notice hears when it is handed out again."""

from __future__ import annotations

from kvview.errors import BlockNotHeldError, UnknownBlockError
from kvview.testing.harness import Capability
from kvview.testing.pool.driver import PoolDriver, pool_check

REUSE_NOTICE = Capability.REUSE_NOTICE


@pool_check("POOL-14", REUSE_NOTICE)
def check_pool_14_notice_comes_once_when_a_block_is_handed_out(pool: PoolDriver) -> None:
    """Not before, and not again; the driver compares at each allocation."""
    blocks = pool.blocks[:3]
    pool.touch(blocks)
    pool.free_with_notice(blocks)
    for _ in range(2):
        pool.check_free(*blocks)


@pool_check("POOL-14", REUSE_NOTICE, Capability.CACHE)
def check_pool_14_hashed_block_is_told_of_too(pool: PoolDriver) -> None:
    """A block that keeps its hash is watched until it is evicted, in the order given."""
    pool.has_order = True
    blocks = pool.hashed(4)
    pool.touch(blocks[:2])
    pool.free_with_notice([blocks[1], blocks[0]])
    pool.equal(pool.walk(), pool.expected_walk(), "what is watched is free, and has its hash")
    pool.allocate(len(pool.free_blocks) - 2)
    pool.release(pool.allocate(1))
    pool.check_free(*blocks[:2])


@pool_check("POOL-14", REUSE_NOTICE)
def check_pool_14_touch_does_not_end_the_wait(pool: PoolDriver) -> None:
    """A block that was held in between, and freed without notice, is still watched."""
    block, other = pool.blocks[:2]
    pool.touch([block, other])
    pool.free_with_notice([block, other])
    pool.touch([block])
    pool.allocate(len(pool.free_blocks))
    pool.free([block])
    pool.allocate(1)


@pool_check("POOL-14", REUSE_NOTICE)
def check_pool_14_block_in_use_is_watched_until_all_gave_it_back(pool: PoolDriver) -> None:
    """What the engine, or this view, still holds is told of at its next allocation."""
    first, second = blocks = pool.allocate(2)
    pool.touch([first, second, second])
    pool.free_with_notice(blocks)
    pool.check_held(first, second)
    pool.release(blocks)
    pool.check_held(second)
    pool.free([second])
    pool.check_free(first, second)


@pool_check("POOL-14", REUSE_NOTICE, Capability.RESET, Capability.CACHE)
def check_pool_14_notice_comes_at_a_reset(pool: PoolDriver) -> None:
    """A reset that is done tells of all that is watched, and a refused one of nothing."""
    blocks = pool.hashed(3)
    pool.touch(blocks)
    pool.free_with_notice(blocks[:2])
    pool.equal(pool.reset(), False, "a reset is refused while a view holds")
    pool.check_told(set(), "not at a reset that is refused")
    pool.free(blocks[2:])
    pool.equal(pool.reset(), True, "a reset is done when nothing is held")
    pool.check_free(*blocks)


@pool_check("POOL-14", REUSE_NOTICE)
def check_pool_14_gives_back_as_free_does(pool: PoolDriver) -> None:
    """References, null blocks and refusals are those of ``free_blocks``."""
    first, second, other = pool.blocks[:3]
    null = [] if pool.null is None else [pool.null]
    pool.touch([first, second, second])
    for error, wrong in (
        (BlockNotHeldError, [first, other]),
        (BlockNotHeldError, [first, first]),
        (UnknownBlockError, [second, pool.num_blocks]),
        (UnknownBlockError, [True]),
    ):
        law = "POOL-4"
        pool.refused(error, pool.view, "free_blocks_with_notice", wrong, pool.told.append, law=law)
        pool.check_held(first, second)
    pool.free_with_notice([*null, second, first, second])
    pool.check_free(first, second)


@pool_check("POOL-14", REUSE_NOTICE)
def check_pool_14_later_call_takes_the_place_of_the_earlier_one(pool: PoolDriver) -> None:
    """A view that watches a block twice is told once."""
    block = pool.blocks[0]
    for _ in range(2):
        pool.touch([block])
        pool.free_with_notice([block])
    pool.check_free(block)


@pool_check("POOL-14", REUSE_NOTICE)
def check_pool_14_notice_that_raises_does_not_end_the_engine(pool: PoolDriver) -> None:
    """The allocation is done, and the others are told, whatever a callback raises."""
    first, second = pool.blocks[:2]
    pool.touch([first, second])

    def on_reuse(block_id: int) -> None:
        raise RuntimeError("a connector's own fault")

    pool.give_name(on_reuse, "on_reuse", "on_reuse = [].index  # raises")
    pool.call(pool.view, "free_blocks_with_notice", [first], on_reuse)
    del pool.held[first]
    pool.free_with_notice([second])
    pool.check_free(first, second)


@pool_check("POOL-14", REUSE_NOTICE, Capability.CLOSE)
def check_pool_14_closed_view_is_told_nothing(pool: PoolDriver) -> None:
    """What a view watched is forgotten when the engine closes it."""
    block = pool.blocks[0]
    pool.touch([block])
    pool.free_with_notice([block])
    pool.call(pool.harness, "close")
    pool.watched.clear()
    pool.check_free(block)
