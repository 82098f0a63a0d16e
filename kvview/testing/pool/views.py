"""Several views of one pool, and what its engine tells of the prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvview.errors import BlockNotHeldError, ViewClosedError
from kvview.events import AllBlocksCleared, BlockStored
from kvview.keys import make_offload_key
from kvview.testing.harness import Capability
from kvview.testing.pool.driver import PoolDriver, pool_check

CACHE, EVICT, RESET = Capability.CACHE, Capability.EVICT, Capability.RESET


@pool_check("POOL-4", Capability.VIEWS)
def check_pool_4_views_of_one_pool_are_told_apart(pool: PoolDriver) -> None:
    """Neither gives back what the other holds; a block is free when both have let it go."""
    other = pool.call(pool.harness, "another_view")
    pool.name(other, "other")
    first, second, third = pool.blocks[1:4]
    pool.touch([first, second])
    pool.call(other, "touch_blocks", [second, third])
    pool.held.update([second, third])
    pool.refuse(BlockNotHeldError, "free_blocks", [third])
    pool.refuse(BlockNotHeldError, "free_blocks", [second, second])
    pool.refused(BlockNotHeldError, other, "free_blocks", [first])
    pool.check_held(first, second, third)
    if pool.can(Capability.HOLDS):
        told = [dict(pool.call(view, "held_blocks")) for view in (pool.view, other)]
        pool.derive()
        right = [{first: 1, second: 1}, {second: 1, third: 1}]
        pool.equal(told, right, "each view tells what is held through it")
    pool.free([second])
    pool.check_held(first, second, third)
    pool.call(other, "free_blocks", [second])
    pool.held.subtract([second])
    pool.held = +pool.held
    pool.check_free(second)
    if pool.can(Capability.CLOSE):
        pool.call(pool.harness, "close")
        pool.refuse(ViewClosedError, "touch_blocks", [first])
        pool.call(other, "touch_blocks", [second])
        pool.call(other, "free_blocks", [second, third])


def _cached(pool: PoolDriver) -> Counter[bytes]:
    """How many blocks the oracle has under each key."""
    return Counter(bytes(key) for keys in pool.hashes.values() for key in keys)


class _Told:
    """Folds what the engine tells: how many blocks hold each key."""

    def __init__(self, pool: PoolDriver) -> None:
        self.pool = pool
        self.held: Counter[bytes] = Counter()

    def check(self, what: str) -> Sequence[object]:
        """Take what is new; what is told must be what is cached."""
        events: Sequence[object] = self.pool.call(self.pool.harness, "take_events")
        self.pool.derive()
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
                continue
            keys = [
                bytes(make_offload_key(block_hash, event.group_idx))  # type: ignore[attr-defined]
                for block_hash in event.block_hashes  # type: ignore[attr-defined]
            ]
            if isinstance(event, BlockStored):
                self.held.update(keys)
                continue
            self.held.subtract(keys)
            self.pool.true(
                min(self.held.values()) >= 0,
                "what is removed was stored",
                keys,
                "of those",
                "EVENT-1",
            )
        self.pool.equal(+self.held, _cached(self.pool), what)
        return events


@pool_check("EVENT-2", Capability.GPU_EVENTS, CACHE)
def check_event_2_prefix_cache_tells_what_it_holds(pool: PoolDriver) -> None:
    """Stores, a second hash, equal blocks, evictions and a reset, each told once."""
    pool.use(pool.call(pool.harness, "telling"), "view")
    told = _Told(pool)
    told.check("nothing is cached yet")
    first = pool.allocate(4)
    keys = pool.cache(first, group_idx=1)
    told.check("what was cached is told, with its group")
    pool.equal(len(told.check("what was told once is not told again")), 0, "events are taken once")
    pool.cache_as(first[:1], keys[:1])
    pool.hashes[first[0]].pop()  # the same again: the block holds it once
    told.check("what a block holds already is not told again")
    if pool.can(Capability.MANY_HASHES):
        pool.cache(first[:2])
        told.check("a further hash is told")
    second = pool.allocate(2)
    pool.cache_as(second, [keys[0], keys[3]])
    told.check("a block under a key that another one has is told too")
    if pool.can(EVICT):
        pool.evict([first[0], second[1]])
        told.check("what was evicted is told, once a block")
        pool.evict([first[0]])
        told.check("what holds nothing has nothing to be told")
    pool.release([*first, *second])
    told.check("what is free is cached still")
    pool.release(pool.allocate(len(pool.free_blocks)))
    told.check("what is handed out again is not cached any more")
    if pool.can(RESET):
        pool.hashed(3)
        pool.reset()
        told.check("a reset is told")
        pool.hashed(1)
        told.check("what comes after a reset is told")
