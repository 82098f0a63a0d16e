"""The laws of the guard: leases, their expiry, the budget, the thread."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvview.errors import (
    BlockNotHeldError,
    NotCopyableError,
    PinBudgetExceeded,
    StaleBlockError,
    UnknownBlockError,
    WrongThreadError,
)
from kvview.keys import OffloadKey
from kvview.pool import SupportsPinBudget
from kvview.testing.cost import cost_of
from kvview.testing.harness import Capability
from kvview.testing.pool.driver import PoolDriver, pool_check

LEASES = Capability.LEASES
_TOLERATED_GROWTH = 65_536  # bytes


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


@pool_check("GUARD-3", LEASES)
def check_guard_3_deadline_goes_with_its_lease(pool: PoolDriver) -> None:
    """Thousands of leases that ended before their time cost neither memory nor the next one."""
    block, other = pool.blocks[1:3]
    costs, sizes, others = [], [], []

    def lease_often(times: int) -> None:
        for _ in range(times):
            pool.view.lease([block], ttl=1e6).release()

    tracemalloc.start()
    try:
        for num_others in (0, 1000):  # leases that go on
            others += [pool.view.lease([other], ttl=1e6) for _ in range(num_others)]
            pool.line(f"others = [view.lease([{other}], ttl=1e6) for _ in range({num_others})]")
            pool.line(f"for _ in range(6000): view.lease([{block}], ttl=1e6).release()")
            lease_often(3000)
            start = tracemalloc.get_traced_memory()[0]
            lease_often(3000)
            sizes.append(tracemalloc.get_traced_memory()[0] - start)
            costs.append(cost_of(lambda: lease_often(50)))
    finally:
        tracemalloc.stop()
    limit = f"at most {_TOLERATED_GROWTH} bytes more"
    pool.true(max(sizes) <= _TOLERATED_GROWTH, "what has ended is forgotten", sizes, limit)
    alone, beside = costs
    pool.true(
        beside.lines <= alone.times(4).lines,
        "a lease costs the same beside a thousand others",
        beside.lines,
        f"at most {alone.times(4).lines} lines (4 x that of 50 leases alone, and a little)",
    )
    pool.held.update([other])
    pool.check_held(other)
    pool.call(pool.harness, "advance", 2e6)
    pool.touch([])
    _ended(pool, [other])
    pool.check_free(other)


@pool_check("GUARD-4", Capability.ONE_THREAD)
def check_guard_4_another_thread_is_refused(pool: PoolDriver) -> None:
    """A call from another thread raises WrongThreadError and changes nothing."""
    block = pool.blocks[1]
    view, harness = pool.view, pool.harness
    calls: list[tuple[str, Callable[[], object]]] = [
        (f"view.touch_blocks([{block}])", lambda: view.touch_blocks([block])),
        ("view.free_blocks([])", lambda: view.free_blocks([])),
        (
            "next(view.iter_free_block_ids_with_hash(), None)",
            lambda: next(view.iter_free_block_ids_with_hash(), None),
        ),
    ]
    if pool.can(Capability.HOLDS):
        calls.append(("view.held_blocks()", lambda: view.held_blocks()))
    if pool.can(LEASES):
        calls.append((f"view.lease([{block}])", lambda: view.lease([block])))
    if pool.can(Capability.GUARDS):
        calls.append(("h.guard_over(view, None)", lambda: harness.guard_over(view, None)))
    for code, call in calls:
        code = f"__import__({__name__!r}, fromlist=['x']).in_a_thread(lambda: {code})"
        error = pool.refuses(WrongThreadError, code, lambda call=call: in_a_thread(call))  # type: ignore[misc]
        pool.true(str(error).startswith("GUARD-4: "), "the error names its law", error, "GUARD-4")
    pool.check_free(block)


def in_a_thread(call: Callable[[], object]) -> None:
    """Run a call on another thread, and raise here what it raised there."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@pool_check("GUARD-5", Capability.PIN_BUDGET)
def check_guard_5_num_pinnable_blocks_tells_what_may_be_held(pool: PoolDriver) -> None:
    """A guard with a budget says how many more blocks it takes; one without does not."""
    has_query = isinstance(pool.view, SupportsPinBudget)
    pool.true(not has_query, "a guard without a budget has no num_pinnable_blocks", has_query, "no")
    pool.use(pool.call(pool.harness, "budgeted", 4), "view")
    first, second, third, fourth, fifth = pool.blocks[:5]
    null = [] if pool.null is None else [pool.null]
    for blocks, left in ((null, 4), ([first, first], 3), ([*null, first, second, third], 1)):
        pool.touch(blocks)
        told = pool.call(pool.view, "num_pinnable_blocks")
        pool.equal(told, left, "the budget less the blocks held, each once")
    pool.refuse(PinBudgetExceeded, "touch_blocks", [fourth, fifth])
    pool.touch([fourth])
    pool.equal(pool.call(pool.view, "num_pinnable_blocks"), 0, "the budget is used up")


@pool_check("GUARD-5", Capability.GUARDS)
def check_guard_5_budgets_of_one_pool_are_not_added_up(pool: PoolDriver) -> None:
    """What another guard, or the view below, holds counts in a budget, each block once."""
    one = _guard_over(pool, "one", 4)
    two = _guard_over(pool, "two", 4)
    first, second, third, fourth, fifth = pool.blocks[:5]
    pool.call(one, "touch_blocks", [first, second])
    pool.call(two, "touch_blocks", [second])
    pool.touch([third])
    pool.refused(PinBudgetExceeded, two, "touch_blocks", [fourth, fifth])
    pool.equal(pool.call(two, "num_pinnable_blocks"), 1, "three blocks of four are held")
    pool.call(two, "touch_blocks", [fourth])
    pool.refused(PinBudgetExceeded, one, "touch_blocks", [fifth])
    pool.call(one, "touch_blocks", [fourth])
    pool.call(two, "free_blocks", [second, fourth])
    pool.call(one, "free_blocks", [first, second, fourth])
    pool.free([third])
    pool.check_free(first, second, third, fourth, fifth)


@pool_check("GUARD-6", LEASES)
def check_guard_6_copies_are_refused(pool: PoolDriver) -> None:
    """Neither a guard nor a lease is copied or pickled; the original goes on."""
    block = pool.blocks[1]
    lease = _lease(pool, "lease", [block])
    ways: tuple[Callable[[Any], object], ...] = (copy.copy, copy.deepcopy, pickle.dumps)
    for subject, name in ((pool.view, "view"), (lease, "lease")):
        for way in ways:
            code = f"__import__({way.__module__!r}).{way.__name__}({name})"
            pool.refuses(NotCopyableError, code, lambda s=subject, w=way: w(s))  # type: ignore[misc]
    pool.call(lease, "release")
    _ended(pool, [block])
    pool.check_free(block)


@pool_check("GUARD-7", LEASES)
def check_guard_7_ended_lease_is_not_entered(pool: PoolDriver) -> None:
    """``with`` and ``renew`` raise on a lease that was released or has expired."""
    first, second = pool.blocks[1:3]
    released = _lease(pool, "released", [first])
    expired = _lease(pool, "expired", [second], ttl=5)
    pool.call(released, "release")
    pool.call(pool.harness, "advance", 6)
    _ended(pool, [first, second])
    for lease in (released, expired):
        pool.refused(BlockNotHeldError, lease, "__enter__")
        pool.refused(BlockNotHeldError, lease, "renew", 5)
    pool.check_free(first, second)


@pool_check("GUARD-7", LEASES, Capability.CLOSE)
def check_guard_7_lease_of_a_closed_view_has_ended(pool: PoolDriver) -> None:
    """A lease is not active once its view was closed, and its release gives nothing back."""
    lease = _lease(pool, "lease", [pool.blocks[1]])
    pool.call(pool.harness, "close")
    pool.equal(pool.read(lease, "is_active"), False, "a lease of a closed view is not active")
    pool.equal(pool.call(lease, "release"), False, "a lease of a closed view is not released")


@pool_check("GUARD-8", LEASES, Capability.GUARDS)
def check_guard_8_failed_expiry_hits_nobody_and_is_tried_again(pool: PoolDriver) -> None:
    """An engine that does not take blocks back at an expiry gets them later, once."""
    engine = _TrustingView(pool.num_blocks)
    pool.line("view = ...  # a view that fails in free_blocks when it is told to")
    guard = pool.harness.guard_over(engine, None)
    lease = guard.lease([1, 2], ttl=5)
    other = guard.lease([3], ttl=6)
    pool.harness.advance(10)
    engine.is_failing = True
    with _logged():
        try:
            guard.touch_blocks([4])
        except Exception as error:
            pool.fail("a call that meets a failed expiry goes on", repr(error), "no error")
    active = [lease.is_active, other.is_active]
    pool.equal(active, [False, False], "leases that have expired are not active")
    pool.equal(engine.num_held, {1: 1, 2: 1, 3: 1, 4: 1}, "the engine took nothing back")
    pool.equal(dict(guard.held_blocks()), engine.num_held, "the ledger says what is held")
    engine.is_failing = False
    pool.harness.advance(1000)
    guard.touch_blocks([])
    pool.equal(engine.num_held, {4: 1}, "what was not taken back is given back again")
    pool.equal(dict(guard.held_blocks()), {4: 1}, "the ledger says what is held")
    pool.equal(lease.release(), False, "a lease that has expired is not released")
    guard.free_blocks([4])


@pool_check("GUARD-9", LEASES, Capability.GUARDS)
def check_guard_9_what_is_dropped_while_it_holds_is_told(pool: PoolDriver) -> None:
    """A lease without a deadline, and a guard, that are dropped and hold say so in the log."""
    first, second, third = pool.blocks[1:4]
    pool.line(f"view.lease([{first}])  # and dropped")
    with _logged() as messages:
        pool.view.lease([second], ttl=5)
        gc.collect()
        pool.equal(messages, [], "a lease with a deadline ends by itself")
        pool.view.lease([first])
        gc.collect()
        pool.equal(len(messages), 1, "a lease that nobody can release is told")
        guard = pool.harness.guard_over(pool.view, None)
        guard.touch_blocks([third])
        guard.free_blocks([third])
        del guard
        gc.collect()
        pool.equal(len(messages), 1, "a guard that holds nothing goes in silence")
        guard = pool.harness.guard_over(pool.view, None)
        guard.touch_blocks([third])
        del guard
        gc.collect()
        pool.equal(len(messages), 2, "a guard that is dropped and holds blocks is told")


@pool_check("GUARD-9", LEASES, Capability.SIZED)
def check_guard_9_guard_that_goes_with_its_pool_goes_in_silence(pool: PoolDriver) -> None:
    """There is nobody left to whom its blocks could be given back."""
    pool.line(f"ring = [h.sized({pool.num_blocks})]; ring.append(ring)")
    pool.line(f"ring[0].view.touch_blocks([{pool.blocks[1]}]); del ring")
    with _logged() as messages:
        # Of a ring the collector takes all at once, the guard perhaps before its pool.
        ring = [pool.harness.sized(pool.num_blocks)]
        ring.append(ring)
        ring[0].view.touch_blocks([pool.blocks[1]])
        del ring
        gc.collect()
        pool.equal(messages, [], "a guard whose pool goes too says nothing")


@pool_check("GUARD-3", LEASES)
def check_guard_3_what_has_expired_is_told_to_who_asks(pool: PoolDriver) -> None:
    """``release_expired`` tells of each lease that it ended, earliest deadline first."""
    for job, block, ttl in (("late", 1, 3.0), ("early", 2, 1.0), ("later", 3, 9.0)):
        lease = pool.call(pool.view, "lease", [pool.blocks[block]], job=job, ttl=ttl)
        pool.name(lease, job)
    for seconds, ended in ((0.5, []), (4.0, ["early", "late"]), (1.0, []), (9.0, ["later"])):
        pool.call(pool.harness, "advance", seconds)
        told = [leak.job for leak in pool.call(pool.view, "release_expired")]
        pool.derive()
        pool.equal(told, ended, "release_expired tells what it ended")
    pool.check_free()


@pool_check("GUARD-10", Capability.GUARDS)
def check_guard_10_guards_over_one_view_are_told_apart(pool: PoolDriver) -> None:
    """One guard gives back nothing of another's, nor of the view's under both."""
    one = _guard_over(pool, "one", None)
    two = _guard_over(pool, "two", None)
    first, second, third = pool.blocks[1:4]
    pool.call(one, "touch_blocks", [first])
    pool.call(two, "touch_blocks", [second])
    pool.touch([third])
    pool.held.update([first, second])
    for guard, blocks in ((one, [second, third]), (two, [first, third])):
        for block in blocks:
            pool.refused(BlockNotHeldError, guard, "free_blocks", [block])
    for block in (first, second):
        pool.refuse(BlockNotHeldError, "free_blocks", [block])
    pool.check_held(first, second, third)
    if pool.can(Capability.HOLDS):
        pool.equal(dict(pool.call(one, "held_blocks")), {first: 1}, "a guard tells what it holds")
        told = dict(pool.call(pool.view, "held_blocks"))
        pool.equal(told, dict(pool.held), "the view tells what is held through it, by whomever")
    pool.call(one, "free_blocks", [first])
    pool.call(two, "free_blocks", [second])
    pool.held.subtract([first, second])
    pool.held = +pool.held
    pool.free([third])
    pool.check_free(first, second, third)


def _guard_over(pool: PoolDriver, name: str, num_blocks: int | None) -> Any:
    guard = pool.call(pool.harness, "guard_over", pool.view, num_blocks)
    pool.name(guard, name)
    return guard


class _TrustingView:
    """A view that checks nothing, as engines do, and fails when it is told to."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.null_block_id = 0
        self.num_held: dict[int, int] = {}
        self.is_failing = False

    def touch_blocks(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.num_held[block_id] = self.num_held.get(block_id, 0) + 1

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        if self.is_failing:
            raise RuntimeError("the engine does not take this back, as it was told to")
        for block_id in block_ids:
            self.num_held[block_id] -= 1
            if not self.num_held[block_id]:
                del self.num_held[block_id]

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        return iter(())


@contextmanager
def _logged() -> Iterator[list[str]]:
    """The warnings and errors that anyone logs meanwhile; they go nowhere else."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    root = logging.getLogger()
    before, handler = root.handlers, Keep(logging.WARNING)
    gc.collect()  # what earlier checks dropped is theirs
    root.handlers = [handler]
    try:
        yield messages
    finally:
        root.handlers = before
