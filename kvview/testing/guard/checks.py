"""The laws of the guard: leases, their expiry, the budget, the thread."""

from __future__ import annotations

import threading
from typing import Any

from kvview.errors import (
    BlockNotHeldError,
    PinBudgetExceeded,
    StaleBlockError,
    UnknownBlockError,
    WrongThreadError,
)
from kvview.testing.harness import Capability
from kvview.testing.pool.driver import PoolDriver, pool_check

LEASES = Capability.LEASES


def _lease(pool: PoolDriver, name: str, blocks: list[int], **options: Any) -> Any:
    lease = pool.call(pool.view, "lease", blocks, **options)
    pool.name(lease, name)
    pool.held.update(block for block in blocks if block != pool.null)
    return lease


def _ended(pool: PoolDriver, blocks: list[int]) -> None:
    pool.held.subtract(block for block in blocks if block != pool.null)
    pool.held = +pool.held


@pool_check("GUARD-1", LEASES)
def check_guard_1_failed_lease_holds_nothing(pool: PoolDriver) -> None:
    """A lease that names an unknown block has taken no reference on the others."""
    first, second = pool.blocks[1:3]
    pool.refused(UnknownBlockError, pool.view, "lease", [first, second, pool.num_blocks])
    pool.refused(UnknownBlockError, pool.view, "lease", [first, True])
    pool.check_free(first, second)


@pool_check("GUARD-1", LEASES, Capability.CACHE, Capability.BLOCK_KEYS)
def check_guard_1_lease_of_a_reused_block_is_refused(pool: PoolDriver) -> None:
    """With ``expected_keys`` only what still holds what was seen is held."""
    blocks = pool.hashed(2)
    seen = [pool.hashes[block][0] for block in blocks]
    _lease(pool, "lease", blocks, expected_keys=seen)
    lease = pool.call(pool.view, "lease", blocks, expected_keys=seen)
    pool.name(lease, "second")
    pool.equal(pool.call(lease, "release"), True, "a lease that is active is released")
    pool.check_held(*blocks)
    wrong = [seen[0], seen[0]]
    pool.refused(StaleBlockError, pool.view, "lease", blocks, expected_keys=wrong)
    other = pool.hashed(1)
    stale = [pool.hashes[other[0]][0]]
    pool.allocate(len(pool.free_blocks))  # the engine takes it for something else
    pool.refused(StaleBlockError, pool.view, "lease", other, expected_keys=stale)
    pool.release(other)
    pool.check_free(*other)


@pool_check("GUARD-1", Capability.PIN_BUDGET)
def check_guard_1_hold_beyond_the_budget_is_refused(pool: PoolDriver) -> None:
    """More blocks than the budget raise PinBudgetExceeded, and none is held for it."""
    pool.use(pool.call(pool.harness, "budgeted", 4), "view")
    first, second, third, fourth, fifth = pool.blocks[:5]
    pool.touch([first, second, third])
    pool.touch([first, first])
    pool.refuse(PinBudgetExceeded, "touch_blocks", [fourth, fifth])
    pool.refused(PinBudgetExceeded, pool.view, "lease", [fourth, fifth])
    pool.check_free(fourth, fifth)
    pool.touch([fourth])
    pool.refused(PinBudgetExceeded, pool.view, "lease", [fifth])
    pool.free([second])
    pool.touch([fifth])
    pool.check_held(first, third, fourth, fifth)


@pool_check("GUARD-2", LEASES)
def check_guard_2_lease_gives_back_once(pool: PoolDriver) -> None:
    """Released twice, or released and left, a lease gives its references back once."""
    first, second = pool.blocks[1:3]
    pool.touch([first])
    lease = _lease(pool, "lease", [first, second, second])
    pool.check_held(first, second)
    pool.equal(pool.call(lease, "release"), True, "a lease that is active is released")
    _ended(pool, [first, second, second])
    pool.check_held(first)
    pool.equal(pool.call(lease, "release"), False, "a lease that has ended is not released")
    pool.check_held(first)
    pool.free([first])
    pool.check_free(first, second)


@pool_check("GUARD-2", LEASES)
def check_guard_2_lease_ends_when_an_exception_flies(pool: PoolDriver) -> None:
    """The end of the ``with`` block gives back, however it is left."""
    block = pool.blocks[1]
    pool.line(f"with suppress(ZeroDivisionError), view.lease([{block}]): 1 / 0")
    try:
        with pool.view.lease([block]):
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    pool.check_free(block)


@pool_check("GUARD-2", LEASES)
def check_guard_2_leases_of_one_block_are_counted_apart(pool: PoolDriver) -> None:
    """Two jobs that hold the same block: the end of one leaves the other's hold."""
    first, second = pool.blocks[1:3]
    one = _lease(pool, "one", [first, second], job="a")
    two = _lease(pool, "two", [first], job="b")
    pool.call(one, "release")
    _ended(pool, [first, second])
    pool.check_held(first)
    pool.call(two, "release")
    _ended(pool, [first])
    pool.check_free(first, second)


@pool_check("GUARD-2", LEASES)
def check_guard_2_leased_reference_can_not_be_freed_as_a_plain_one(pool: PoolDriver) -> None:
    """``free_blocks`` gives back what ``touch_blocks`` took, nothing of a lease."""
    block = pool.blocks[1]
    lease = _lease(pool, "lease", [block])
    pool.refuse(BlockNotHeldError, "free_blocks", [block])
    pool.check_held(block)
    pool.call(lease, "release")
    _ended(pool, [block])
    pool.check_free(block)


@pool_check("GUARD-2", LEASES)
def check_guard_2_expired_lease_is_not_released_again(pool: PoolDriver) -> None:
    """After expiry ``release`` gives nothing back, and ``renew`` raises."""
    block = pool.blocks[1]
    lease = _lease(pool, "lease", [block], ttl=5)
    pool.call(pool.harness, "advance", 6)
    pool.touch([block])
    _ended(pool, [block])
    pool.equal(pool.call(lease, "release"), False, "a lease that has expired is not released")
    pool.refused(BlockNotHeldError, lease, "renew", 5)
    pool.check_held(block)
    pool.free([block])
    pool.check_free(block)


@pool_check("GUARD-3", LEASES)
def check_guard_3_lease_expires(pool: PoolDriver) -> None:
    """A lease whose end was never reported is given back after its TTL, not before."""
    block = pool.blocks[1]
    _lease(pool, "lease", [block], ttl=5)
    pool.call(pool.harness, "advance", 4)
    pool.touch([])
    pool.check_held(block)
    pool.call(pool.harness, "advance", 2)
    pool.touch([])
    _ended(pool, [block])
    pool.check_free(block)


@pool_check("GUARD-3", LEASES)
def check_guard_3_leases_expire_by_deadline_not_by_age(pool: PoolDriver) -> None:
    """A short lease behind a long one expires first (vLLM #58222)."""
    blocks = pool.blocks[1:4]
    _lease(pool, "long", blocks[:1], ttl=100)
    _lease(pool, "short", blocks[1:2], ttl=5)
    _lease(pool, "forever", blocks[2:])
    pool.call(pool.harness, "advance", 10)
    pool.touch([])
    _ended(pool, blocks[1:2])
    pool.check_free(blocks[1])
    pool.call(pool.harness, "advance", 100)
    pool.touch([])
    _ended(pool, blocks[:1])
    pool.check_free(blocks[0])


@pool_check("GUARD-3", LEASES)
def check_guard_3_renewed_lease_expires_at_its_new_deadline(pool: PoolDriver) -> None:
    """``renew`` moves a deadline, later or earlier, and the old one means nothing."""
    first, second = pool.blocks[1:3]
    later = _lease(pool, "later", [first], ttl=5)
    earlier = _lease(pool, "earlier", [second], ttl=100)
    pool.call(later, "renew", 50)
    pool.call(earlier, "renew", 5)
    pool.call(pool.harness, "advance", 10)
    pool.touch([])
    _ended(pool, [second])
    pool.check_free(second)
    pool.call(pool.harness, "advance", 50)
    pool.touch([])
    _ended(pool, [first])
    pool.check_free(first)


@pool_check("GUARD-4", Capability.ONE_THREAD)
def check_guard_4_another_thread_is_refused(pool: PoolDriver) -> None:
    """A call from another thread raises WrongThreadError and changes nothing."""
    block = pool.blocks[1]
    for method, blocks in (("touch_blocks", [block]), ("free_blocks", [])):
        raised: list[BaseException | None] = [None]

        def call(method: str, blocks: list[int], raised: list[BaseException | None]) -> None:
            try:
                getattr(pool.view, method)(blocks)
            except Exception as error:
                raised[0] = error

        thread = threading.Thread(target=call, args=(method, blocks, raised))
        thread.start()
        thread.join()
        code = f"Thread(target=view.{method}, args=({blocks},))"
        pool.line(f"from threading import Thread; t = {code}; t.start(); t.join()")
        pool.true(
            isinstance(raised[0], WrongThreadError),
            f"{method} on another thread raises",
            raised[0],
            "WrongThreadError",
        )
    pool.check_free(block)
