"""GUARD-2, 3, 5 and 8 where something raises, and all of the guard's laws at random."""

from __future__ import annotations

from typing import Any

from kvview.errors import BlockNotHeldError, PinBudgetExceeded, UnknownBlockError
from kvview.testing.checks import check
from kvview.testing.harness import Capability, Factory
from kvview.testing.pool.driver import PoolDriver, pool_check

LEASES, PIN_BUDGET, GUARDS = Capability.LEASES, Capability.PIN_BUDGET, Capability.GUARDS


class _Stop(BaseException):
    """Ends a thread, as ``KeyboardInterrupt`` does."""


def _leave(pool: PoolDriver, lease: Any, error: BaseException | None) -> None:
    """Leave a ``with`` block with an error, or none, which must come out again."""
    kind = None if error is None else type(error)
    with_error = "None, None" if kind is None else f"{kind.__name__}, {kind.__name__}()"
    swallowed = pool.call(lease, "__enter__") and lease.__exit__(kind, error, None)
    pool.line(f"assert not lease.__exit__({with_error}, None)  # True swallows what was raised")
    pool.true(not swallowed, "a lease lets through what was raised", swallowed, "no true value")


@pool_check("GUARD-2", LEASES)
def check_guard_2_lease_lets_exceptions_through(pool: PoolDriver) -> None:
    """Whatever was raised, and though the lease had ended before: it gives back, once."""
    block = pool.blocks[1]
    for error in (None, ValueError("x"), BlockNotHeldError("POOL-4: x"), StopIteration(), _Stop()):
        lease = pool.call(pool.view, "lease", [block])
        pool.name(lease, "lease")
        _leave(pool, lease, error)
        pool.check_free(block)
    for ttl in (None, 5):
        lease = pool.call(pool.view, "lease", [block], ttl=ttl)
        pool.name(lease, "lease")
        pool.call(lease, "__enter__")
        if ttl is None:
            pool.call(lease, "release")
        else:
            pool.call(pool.harness, "advance", 6)
        pool.touch([block])
        swallowed = pool.call(lease, "__exit__", ValueError, ValueError(), None)
        pool.true(not swallowed, "an ended lease lets it through too", swallowed, "no true value")
        pool.check_held(block)
        pool.free([block])
        pool.check_free(block)


@pool_check("GUARD-3", LEASES)
def check_guard_3_leases_expire_in_calls_that_raise(pool: PoolDriver) -> None:
    """A refused call raises its own error, and what has expired is given back all the same."""
    first, second, third = pool.blocks[1:4]
    for method, error, wrong in (
        ("touch_blocks", UnknownBlockError, [second, pool.num_blocks]),
        ("free_blocks", BlockNotHeldError, [second]),
        ("lease", UnknownBlockError, [second, -1]),
        ("free_blocks", BlockNotHeldError, [first]),  # what the lease held
    ):
        for ttl, block in ((5, first), (None, third)):
            lease = pool.call(pool.view, "lease", [block], ttl=ttl)
            pool.name(lease, "short" if ttl else "long")
        pool.held.update([third])
        pool.call(pool.harness, "advance", 6)
        pool.refused(error, pool.view, method, wrong)
        pool.check_free(first, second)
        pool.call(lease, "release")
        del pool.held[third]
        pool.check_free(third)


@pool_check("GUARD-3", LEASES)
def check_guard_3_every_call_lets_leases_expire(pool: PoolDriver) -> None:
    """At the deadline itself, whichever method is called next; walks are calls too."""
    block = pool.blocks[1]
    calls: list[tuple[Capability | None, str, tuple[object, ...]]] = [
        (None, "touch_blocks", ([],)),
        (None, "free_blocks", ([],)),
        (Capability.HOLDS, "held_blocks", ()),
        (Capability.FREE_COUNT, "num_free_blocks", ()),
        (Capability.IS_FREE, "is_free", (block,)),
        (Capability.BLOCK_KEYS, "block_keys", ([block],)),
        (Capability.BLOCK_KEYS, "primary_keys", ([block],)),
        (Capability.FIND_CACHED, "find_cached_block", (b"hash\0\0\0\0",)),
        (Capability.GIVE_BACK, "give_back_blocks", ([],)),
        (Capability.REUSE_NOTICE, "free_blocks_with_notice", ([], id)),
        (Capability.RESUMABLE_WALK, "walk_free_blocks", ()),
    ]
    for capability, method, args in calls:
        if capability is None or pool.can(capability):
            lease = pool.call(pool.view, "lease", [block], ttl=5)
            pool.name(lease, "lease")
            pool.call(pool.harness, "advance", 5)
            pool.call(pool.view, method, *args)
            pool.check_free(block)
    if pool.can(Capability.HOLDS):
        pool.equal(dict(pool.call(pool.view, "held_blocks")), {}, "what expired is not held")


@pool_check("GUARD-5", PIN_BUDGET)
def check_guard_5_refused_hold_changes_nothing(pool: PoolDriver) -> None:
    """Neither the count, nor what is held, nor the room in the budget."""
    pool.use(pool.call(pool.harness, "budgeted", 4), "view")
    null = [] if pool.null is None else [pool.null]
    blocks = pool.blocks[:7]
    held = blocks[:3]
    pool.touch([*held, held[0]])
    for wrong in (
        blocks[3:5],
        [held[0], *blocks[3:6]],
        [blocks[3], blocks[3], blocks[4]],
        [*null, *blocks[3:5], held[1]],
        pool.blocks,
    ):
        pool.refuse(PinBudgetExceeded, "touch_blocks", wrong)
        pool.refused(PinBudgetExceeded, pool.view, "lease", wrong, ttl=5)
        pool.equal(pool.call(pool.view, "num_pinnable_blocks"), 1, "one more may be held")
        if pool.can(Capability.HOLDS):
            told = dict(pool.call(pool.view, "held_blocks"))
            pool.equal(told, dict(pool.held), "a refused hold holds nothing")
        pool.check_held(*held)
    pool.refuse(UnknownBlockError, "touch_blocks", [*blocks[3:6], pool.num_blocks])
    pool.refuse(BlockNotHeldError, "free_blocks", [*held, blocks[3]])
    pool.equal(pool.call(pool.view, "num_pinnable_blocks"), 1, "one more may be held")
    pool.touch([held[0], blocks[3]])
    pool.equal(pool.call(pool.view, "num_pinnable_blocks"), 0, "the budget is used up")
    pool.free([*held, blocks[3], held[0], held[0]])
    pool.equal(pool.call(pool.view, "num_pinnable_blocks"), 4, "what is free may be held again")
    pool.check_free(*blocks)


@pool_check("GUARD-5", PIN_BUDGET, LEASES)
def check_guard_5_leases_count_until_they_end(pool: PoolDriver) -> None:
    """Released, expired, left: each makes room in the budget, once."""
    pool.use(pool.call(pool.harness, "budgeted", 4), "view")
    first, second, third, fourth = pool.blocks[:4]
    for end in ("release", "expiry", "exit"):
        pool.touch([first])
        lease = pool.call(pool.view, "lease", [first, second, second, third], ttl=5)
        pool.name(lease, "lease")
        pool.equal(pool.call(pool.view, "num_pinnable_blocks"), 1, "each block counts once")
        pool.refused(PinBudgetExceeded, pool.view, "lease", [fourth, pool.blocks[4]])
        if end == "release":
            pool.call(lease, "release")
        elif end == "exit":
            pool.call(lease, "__exit__", None, None, None)
        else:
            pool.call(pool.harness, "advance", 6)
        pool.equal(pool.call(pool.view, "num_pinnable_blocks"), 3, "one block is held still")
        pool.free([first])
        pool.equal(pool.call(pool.view, "num_pinnable_blocks"), 4, "nothing is held")
    pool.check_free(first, second, third, fourth)


@pool_check("GUARD-5", PIN_BUDGET, GUARDS)
def check_guard_5_smaller_budget_of_several_counts(pool: PoolDriver) -> None:
    """A guard over a guard may hold what both allow; without one of its own, what that allows."""
    pool.use(pool.call(pool.harness, "budgeted", 4), "view")
    first, second, third, fourth, fifth = pool.blocks[:5]
    for budget, left in ((2, 2), (9, 4), (None, 4)):
        above = pool.call(pool.harness, "guard_over", pool.view, budget)
        pool.name(above, "above")
        pool.equal(pool.call(above, "num_pinnable_blocks"), left, "the smaller budget counts")
        pool.touch([first])
        pool.equal(pool.call(above, "num_pinnable_blocks"), left - 1, "what is held counts")
        more = pool.blocks[1:left]
        pool.call(above, "touch_blocks", [first, *more])
        pool.equal(pool.call(above, "num_pinnable_blocks"), 0, "the budget is used up")
        pool.refused(PinBudgetExceeded, above, "touch_blocks", [fifth])
        left_below = pool.call(pool.view, "num_pinnable_blocks")
        pool.equal(left_below, 4 - left, "what a guard above holds counts below")
        pool.call(above, "free_blocks", [first, *more])
        pool.free([first])
        pool.check_free(first, second, third, fourth, fifth)


@check("GUARD-*", LEASES, PIN_BUDGET, GUARDS, Capability.HOLDS, contract="pool")
def check_guard_any_sequence_of_calls(factory: Factory) -> None:
    """Random holds, leases and expiries through three guards, compared with plain counters."""
    from kvview.testing.guard.machine import run_guard_machine  # hypothesis is slow to import

    run_guard_machine(factory)
