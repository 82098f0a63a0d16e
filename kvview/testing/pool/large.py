"""POOL-4, 7, 12 and 13 in pools of thousands, and with the ids that numpy makes."""

from __future__ import annotations

import random
from typing import Any

from kvview.errors import UnknownBlockError
from kvview.testing.harness import Capability
from kvview.testing.pool.driver import PoolDriver, pool_check
from kvview.testing.profiles import current_profile

CACHE, SIZED = Capability.CACHE, Capability.SIZED
RESUMABLE_WALK, GIVE_BACK = Capability.RESUMABLE_WALK, Capability.GIVE_BACK
_NUM_BLOCKS = 3000


def _large(pool: PoolDriver) -> random.Random:
    """A pool of thousands of blocks, all but a few free and hashed."""
    pool.resize(_NUM_BLOCKS)
    blocks = pool.hashed(_NUM_BLOCKS - 50)
    rng = random.Random(current_profile().seed or 0)
    rng.shuffle(blocks)
    pool.touch(blocks[: _NUM_BLOCKS // 2])
    pool.free(blocks[: _NUM_BLOCKS // 2])
    return rng


def _disturb(pool: PoolDriver, rng: random.Random, most: int) -> None:
    """Hold, free, allocate or drop up to so many blocks, anywhere in the queue."""
    held, waiting = sorted(pool.held), list(pool.hashed_free)
    move = rng.choice(["touch", "touch", "free", "give_back", "allocate", "evict"])
    if move == "touch":
        pool.touch(rng.sample(waiting, min(most, len(waiting))))
    elif move == "free" and held:
        pool.free(rng.sample(held, min(most, len(held))))
    elif move == "give_back" and held and pool.can(GIVE_BACK):
        pool.give_back(rng.sample(held, min(most, len(held))))
    elif move == "allocate":
        # Given back after the walk: an adapter is not told of the engine's own moves.
        pool.cache(pool.allocate(min(most // 4, len(pool.free_blocks))))
    elif move == "evict" and pool.can(Capability.EVICT) and waiting:
        pool.evict(rng.sample(waiting, min(most // 8, len(waiting))))


@pool_check("POOL-7", CACHE, SIZED)
def check_pool_7_long_walk_tells_the_truth(pool: PoolDriver) -> None:
    """Over thousands of blocks, while blocks come, go and lose their hashes all around."""
    rng = _large(pool)
    for most in (0, 40, 700):
        began = max(pool.joined.values())
        ahead = list(pool.hashed_free)[::-1]
        walk = pool.start_walk()
        while True:
            expected = (ahead[-1], pool.hashes[ahead.pop()][0]) if ahead else None
            with pool.unrecorded():  # of a script without the steps, the check is the judge
                item = pool.step(walk)
                what = "a long walk goes on and tells the truth"
                pool.true(item == expected, what, item, repr(expected))
            if expected is None:
                break
            if most and rng.random() < 0.02:
                _disturb(pool, rng, most)
                ahead = [block for block in ahead if _stays(pool, block, began)]
        pool.free(list(pool.held))
        pool.release(list(pool.engine))


def _stays(pool: PoolDriver, block: int, began: int) -> bool:
    """Whether a block is free, with its hash, and did not join the queue anew."""
    is_free = block not in pool.held and block not in pool.engine
    return is_free and block in pool.hashes and pool.joined[block] <= began


@pool_check("POOL-6", CACHE, SIZED)
def check_pool_6_long_walk_after_most_was_touched(pool: PoolDriver) -> None:
    """Each of the few that are left is yielded, and all again when they are back."""
    _large(pool)
    for keep in (1, 7, 64, 129):
        blocks = list(pool.hashed_free)
        pool.touch([block for at, block in enumerate(blocks) if at % 1000 >= keep])
        pool.equal(pool.walk(), pool.expected_walk(), "a walk yields what is left")
        pool.free(list(pool.held))
        pool.equal(pool.walk(), pool.expected_walk(), "a walk yields what came back")
    pool.has_order = True
    pool.check_free()


@pool_check("POOL-11", CACHE, SIZED)
def check_pool_11_long_churn_keeps_the_order(pool: PoolDriver) -> None:
    """What is held, freed, allocated and dropped in batches is evicted in order, all along."""
    rng = _large(pool)
    for number in range(120):
        _disturb(pool, rng, rng.choice([1, 3, 40, 300, 1500]))
        if number % 3 == 0:
            pool.release(rng.sample(sorted(pool.engine), len(pool.engine) // 2))
        if number % 20 == 19:
            pool.equal(pool.walk(), pool.expected_walk(), "a walk yields what is free, in order")
            pool.free(rng.sample(sorted(pool.held), len(pool.held) // 2))
            pool.release(pool.allocate(len(pool.free_blocks) // 2))
        if number == 60:
            pool.free(list(pool.held.elements()))
            pool.release(list(pool.engine.elements()))
            pool.reset()
    pool.check_free()


@pool_check("POOL-11", CACHE, SIZED)
def check_pool_11_touches_again_and_again_keep_the_queue(pool: PoolDriver) -> None:
    """Hundreds are touched and freed without an allocation, few after that, then most allocated."""
    pool.resize(_NUM_BLOCKS // 5)
    rng = random.Random(current_profile().seed or 0)
    for number in range(30):
        share = (0.0, 0.5, 1.0)[number % 3]  # that has a hash
        blocks = pool.allocate(len(pool.free_blocks))
        pool.cache(rng.sample(blocks, int(share * len(blocks))))
        pool.release(rng.sample(blocks, len(blocks)))
        for _ in range(rng.randint(3, 7)):
            some = rng.sample(blocks, len(blocks) // 2)
            pool.touch(some)
            pool.free(some)
        for _ in range(rng.randint(0, 9)):
            pool.touch([rng.choice(blocks)])
        most = len(pool.free_blocks)
        pool.allocate(rng.choice([1, most // 3, most // 2, most - rng.randint(1, 9), most]))
        pool.equal(pool.walk(), pool.expected_walk(), "a walk yields what is left, in order")
        pool.free(list(pool.held.elements()))
        pool.release(list(pool.engine.elements()))
    pool.check_free()


@pool_check("POOL-13", CACHE, SIZED, RESUMABLE_WALK)
def check_pool_13_long_walk_misses_nothing(pool: PoolDriver) -> None:
    """Resumed over thousands of blocks, with most of the queue touched in between."""
    rng = _large(pool)
    walk, slow = pool.open_walk(), pool.open_walk()
    for number in range(60):
        pool.take(walk, rng.choice([1, 31, 33, 64, 65, 200, 1500]))
        if number % 7 == 0:
            pool.take(slow, rng.choice([1, 40]))
        _disturb_for_walks(pool, rng, rng.choice([10, 300, 2500]))
        if number % 20 == 19:
            pool.restart(walk)
    pool.free(list(pool.held))
    pool.take(slow, _NUM_BLOCKS)
    pool.take(walk, _NUM_BLOCKS)


def _disturb_for_walks(pool: PoolDriver, rng: random.Random, most: int) -> None:
    """As :func:`_disturb`, less what a resumed walk is promised nothing about."""
    held, waiting = sorted(pool.held), list(pool.hashed_free)
    if rng.random() < 0.5:
        pool.touch(rng.sample(waiting, min(most, len(waiting))))
    elif held:
        pool.free(rng.sample(held, min(most, len(held))))
    if pool.can(Capability.EVICT) and rng.random() < 0.2:
        pool.evict(rng.sample(pool.hashed_free, len(pool.hashed_free) // 8))


# --- ids as numpy has them ---


@pool_check("POOL-4")
def check_pool_4_numpy_ids_work_or_are_refused(pool: PoolDriver) -> None:
    """Scalars are refused in every call that names blocks; an array is too, or taken whole."""
    try:
        import numpy as np
    except ModuleNotFoundError:  # then nobody can hand them over either
        return
    pool.give_name(np, "np", "import numpy as np")
    free, other, held = pool.blocks[1:4]
    pool.touch([held])
    for dtype in (np.int64, np.int32, np.uint8):
        for wrong in ([dtype(free)], [free, dtype(other)]):
            pool.refused(UnknownBlockError, pool.view, "touch_blocks", wrong)
            if pool.can(Capability.LEASES):
                pool.refused(UnknownBlockError, pool.view, "lease", wrong)
            if pool.can(Capability.BLOCK_KEYS):
                for method in ("block_keys", "primary_keys"):
                    pool.refused(UnknownBlockError, pool.view, method, wrong)
        if pool.can(Capability.IS_FREE):
            pool.refused(UnknownBlockError, pool.view, "is_free", dtype(free))
        for method in _giving_back(pool):
            more = [pool.told.append] if method == "free_blocks_with_notice" else []
            for wrong in ([dtype(held)], [held, dtype(held)]):
                pool.refused(UnknownBlockError, pool.view, method, wrong, *more)
        pool.check_held(held)
        if _is_taken(pool, "touch_blocks", np.array([free, other], dtype)):
            pool.held.update([free, other])
            pool.check_held(free, other)
            pool.free([free, other])
        for method in _giving_back(pool, with_notice=False):
            if _is_taken(pool, method, np.array([held], dtype)):
                del pool.held[held]
                pool.check_free(held)
                pool.touch([held])
        pool.check_held(held)
    pool.free([held])
    pool.check_free(free, other, held)


def _giving_back(pool: PoolDriver, with_notice: bool = True) -> list[str]:
    methods = ["free_blocks"]
    methods += ["give_back_blocks"] if pool.can(GIVE_BACK) else []
    if with_notice and pool.can(Capability.REUSE_NOTICE):
        methods.append("free_blocks_with_notice")
    return methods


def _is_taken(pool: PoolDriver, method: str, block_ids: Any) -> bool:
    """Whether a call with an array is accepted; it may be refused."""
    code = f"view.{method}(np.{block_ids!r})"
    try:
        getattr(pool.view, method)(block_ids)
    except UnknownBlockError:
        pool.line(f"with suppress(UnknownBlockError): {code}")
        return False
    except Exception as error:
        pool.line(code)
        pool.fail(f"{code} is done or refused", repr(error), "UnknownBlockError at most")
    pool.line(code)
    return True
