"""POOL-3 for the engine's own moves, where a pool checks them."""

from __future__ import annotations

import random

from kvview.errors import BlockNotHeldError, UnknownBlockError
from kvview.testing.harness import Capability
from kvview.testing.pool.driver import PoolDriver, pool_check
from kvview.testing.profiles import current_profile

ENGINE_REFUSES = Capability.ENGINE_REFUSES


@pool_check("POOL-3", ENGINE_REFUSES)
def check_pool_3_refused_move_of_the_engine_changes_nothing(pool: PoolDriver) -> None:
    """Calls that name blocks of every kind, and then one that nobody can mean."""
    rng = random.Random(current_profile().seed or 0)
    for _ in range(12):
        used = pool.allocate(rng.randint(2, max(2, len(pool.free_blocks) - 4)))
        if pool.can(Capability.CACHE):
            pool.cache(rng.sample(used, len(used) // 2))
        pool.release(rng.sample(used, len(used) // 2))
        in_use = sorted(pool.engine)
        unhashed = [block for block in sorted(pool.free_blocks) if block not in pool.hashes]
        some = [*in_use[:2], *pool.hashed_free[:2], *unhashed[:2], *in_use[:1]]
        rng.shuffle(some)
        for unknown in (pool.num_blocks, -1):
            _refused(pool, UnknownBlockError, "share", [*some, unknown, *some])
            _refused(pool, UnknownBlockError, "release", [*in_use, unknown, in_use[0]])
            if pool.can(Capability.EVICT):
                _refused(pool, UnknownBlockError, "evict", [*some, unknown])
        for once_more in ([in_use[-1]], pool.hashed_free[-1:], unhashed[-1:]):
            if once_more:
                _refused(pool, BlockNotHeldError, "release", [*in_use, *once_more])
        if pool.can(Capability.CACHE):
            hashes = [b"never"] * (len(in_use) + 1)
            _refused(pool, UnknownBlockError, "cache", [*in_use, pool.num_blocks], hashes, 0)
            if unhashed:
                _refused(pool, BlockNotHeldError, "cache", [*in_use, unhashed[0]], hashes, 0)
        pool.release(rng.sample(in_use, len(in_use) // 2))
        pool.check_free()
    pool.release(list(pool.engine.elements()))
    pool.check_free()


def _refused(
    pool: PoolDriver, error: type[Exception], method: str, blocks: list[int], *more: object
) -> None:
    pool.refused(error, pool.harness, method, blocks, *more)
    pool.check_queries()
