"""What stands around a guard: views of any kind, engines that fail, forks, counters, a trace."""

from __future__ import annotations

import multiprocessing
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from kvview.errors import (
    BlockNotHeldError,
    PinBudgetExceeded,
    StaleBlockError,
    UnknownBlockError,
    ViewClosedError,
    WrongThreadError,
)
from kvview.keys import OffloadKey
from kvview.testing.harness import Capability
from kvview.testing.pool.driver import PoolDriver, pool_check

GUARDS, LEASES = Capability.GUARDS, Capability.LEASES


class UncheckedEngine:
    """A view of an engine that checks nothing, and fails when it is told to.

    Args:
        num_blocks: Of its pool; None when it does not tell.
    """

    def __init__(self, num_blocks: int | None) -> None:
        if num_blocks is not None:
            self.num_blocks, self.null_block_id = num_blocks, 0
        self.held: Counter[int] = Counter()
        self.calls: list[str] = []
        self.fails_at = ""

    def _take(self, name: str, block_ids: Sequence[int], step: int) -> None:
        if name == self.fails_at:
            raise RuntimeError(f"{name} fails, as it was told to")
        self.calls.append(name)
        for block_id in block_ids:
            self.held[block_id] += step
            if not self.held[block_id]:
                del self.held[block_id]

    def touch_blocks(self, block_ids: Sequence[int]) -> None:
        """Take references."""
        self._take("touch_blocks", block_ids, 1)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Give them back."""
        self._take("free_blocks", block_ids, -1)

    def give_back_blocks(self, block_ids: Sequence[int]) -> None:
        """Give them back, to the head of the queue."""
        self._take("give_back_blocks", block_ids, -1)

    def free_blocks_with_notice(
        self, block_ids: Sequence[int], on_reuse: Callable[[int], None]
    ) -> None:
        """Give them back, and tell, here at once."""
        self._take("free_blocks_with_notice", block_ids, -1)
        for block_id in block_ids:
            on_reuse(block_id)

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        """Nothing."""
        return iter(())


def _name(pool: PoolDriver, engine: UncheckedEngine, size: int | None) -> None:
    name = UncheckedEngine.__name__
    pool.give_name(engine, "engine", f"from {__name__} import {name}; engine = {name}({size})")


def _guard_over(pool: PoolDriver, engine: UncheckedEngine) -> Any:
    size = getattr(engine, "num_blocks", None)
    pool.give_name(
        engine,
        "engine",
        f"from {__name__} import UncheckedEngine; engine = UncheckedEngine({size})",
    )
    guard = pool.call(pool.harness, "guard_over", engine, None)
    pool.name(guard, "guard")
    return guard


def _compare(pool: PoolDriver, guard: Any, engine: UncheckedEngine, held: dict[int, int]) -> None:
    told = dict(pool.call(guard, "held_blocks"))
    pool.equal(told, held, "the guard tells what is held through it")
    pool.equal(dict(engine.held), held, "the engine was asked for that, and no more")


@pool_check("GUARD-10", GUARDS, Capability.HOLDS)
def check_guard_10_view_of_any_kind_is_guarded(pool: PoolDriver) -> None:
    """Over a view that checks and counts nothing, and need not tell its size, the guard does."""
    for size in (8, None):
        engine = UncheckedEngine(size)
        guard = _guard_over(pool, engine)
        pool.call(guard, "touch_blocks", [1, 2, 1, 0, 5])
        _compare(pool, guard, engine, {1: 2, 2: 1, 5: 1})
        wrong = [-1, True, "1", *([] if size is None else [size])]
        for block in wrong:
            for method in ("touch_blocks", "free_blocks", "give_back_blocks"):
                pool.refused(UnknownBlockError, guard, method, [2, block])
        for blocks in ([3], [2, 2], [1, 1, 1]):
            for method in ("free_blocks", "give_back_blocks"):
                pool.refused(BlockNotHeldError, guard, method, blocks)
            pool.refused(BlockNotHeldError, guard, "free_blocks_with_notice", blocks, id)
        error = pool.refused(BlockNotHeldError, guard, "free_blocks", [5, 3, 0])
        named = re.findall(r"\d+", str(error))
        is_named = "3" in named and "5" not in named
        pool.true(is_named, "the error names the block that is not held", error, "block 3")
        _compare(pool, guard, engine, {1: 2, 2: 1, 5: 1})
        pool.call(guard, "give_back_blocks", [1, 0])
        _compare(pool, guard, engine, {1: 1, 2: 1, 5: 1})
        told: list[int] = []
        pool.give_name(told.append, "told.append", "told = []")
        pool.call(guard, "free_blocks_with_notice", [2, 1], told.append)
        pool.equal(told, [2, 1], "the notice goes to whom it is for")
        pool.call(guard, "free_blocks", [5])
        _compare(pool, guard, engine, {})
        right = ["touch_blocks", "give_back_blocks", "free_blocks_with_notice", "free_blocks"]
        pool.equal(engine.calls, right, "each call goes to the engine once, under its own name")
        pool.call(guard, "close")
        for method in ("touch_blocks", "free_blocks", "give_back_blocks"):
            pool.refused(ViewClosedError, guard, method, [1], law="POOL-10")


@pool_check("GUARD-1", GUARDS, LEASES, Capability.HOLDS)
def check_guard_1_call_that_the_engine_fails_changes_nothing(pool: PoolDriver) -> None:
    """Also when blocks are named twice; the same call succeeds later."""
    engine = UncheckedEngine(8)
    guard = _guard_over(pool, engine)
    pool.call(guard, "touch_blocks", [1, 1, 2, 3, 3, 3])
    held = {1: 2, 2: 1, 3: 3}
    calls: list[tuple[str, list[Any], dict[int, int]]] = [
        ("touch_blocks", [[1, 4, 4]], {4: 2, 1: 3, 2: 1, 3: 3}),
        ("lease", [[5, 5, 1]], {4: 2, 1: 4, 2: 1, 3: 3, 5: 2}),
        ("free_blocks", [[2, 3, 1, 3]], {4: 2, 1: 3, 3: 1, 5: 2}),
        ("give_back_blocks", [[1, 4, 1, 0]], {4: 1, 1: 1, 3: 1, 5: 2}),
        ("free_blocks_with_notice", [[4, 3], id], {1: 1, 5: 2}),
    ]
    for method, args, after in calls:
        name = "touch_blocks" if method == "lease" else method
        engine.fails_at = name
        pool.line(f"engine.fails_at = {name!r}")
        pool.refused(RuntimeError, guard, method, *args)
        _compare(pool, guard, engine, held)
        engine.fails_at = ""
        pool.line("engine.fails_at = ''")
        pool.call(guard, method, *args)
        held = after
        _compare(pool, guard, engine, held)


@pool_check("GUARD-5", GUARDS)
def check_guard_5_what_was_held_before_counts(pool: PoolDriver) -> None:
    """A budget that comes later counts what is held already, each block once."""
    engine = UncheckedEngine(pool.num_blocks)
    pool.give_name(
        engine,
        "engine",
        f"from {__name__} import UncheckedEngine; engine = UncheckedEngine({pool.num_blocks})",
    )
    first, second, third, fourth, fifth = pool.blocks[1:6]
    for view in (pool.view, engine):
        below = view
        if view is engine:  # which keeps no account of what is held: a guard does
            below = pool.call(pool.harness, "guard_over", engine, None)
            pool.name(below, "below")
        pool.call(below, "touch_blocks", [first, second, first])
        guards = []
        for name in ("one", "two"):
            guards.append(pool.call(pool.harness, "guard_over", view, 4))
            pool.name(guards[-1], name)
            left = pool.call(guards[-1], "num_pinnable_blocks")
            pool.equal(left, 2, "two blocks of four are held")
        pool.refused(PinBudgetExceeded, guards[0], "touch_blocks", [third, fourth, fifth])
        pool.call(guards[0], "touch_blocks", [third, fourth, first])
        pool.call(below, "free_blocks", [first, first])
        left = pool.call(guards[1], "num_pinnable_blocks")
        pool.equal(left, 0, "another holds the block still")
        pool.call(guards[0], "free_blocks", [first])
        left = pool.call(guards[1], "num_pinnable_blocks")
        pool.equal(left, 1, "nobody holds the block any more")
        pool.call(guards[0], "free_blocks", [third, fourth])
        pool.call(below, "free_blocks", [second])
    pool.check_free(first, second, third, fourth, fifth)


@pool_check("GUARD-6", Capability.ONE_THREAD, LEASES)
def check_guard_6_forked_process_is_refused(pool: PoolDriver) -> None:
    """What came by a fork refuses every call; the first process's guard goes on."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return
    first, second = pool.blocks[1:3]
    pool.touch([first])
    lease = pool.call(pool.view, "lease", [second])
    pool.name(lease, "lease")
    calls: list[tuple[str, Callable[[], object]]] = [
        (f"view.touch_blocks([{second}])", lambda: pool.view.touch_blocks([second])),
        (f"view.free_blocks([{first}])", lambda: pool.view.free_blocks([first])),
        ("lease.release()", lease.release),
    ]
    for code, call in calls:
        code = f"__import__({__name__!r}, fromlist=['x']).in_a_fork(lambda: {code})"
        error = pool.refuses(WrongThreadError, code, lambda call=call: in_a_fork(call))  # type: ignore[misc]
        pool.true(str(error).startswith("GUARD-6: "), "the error names its law", error, "GUARD-6")
    pool.equal(pool.call(lease, "release"), True, "the lease is the first process's")
    pool.free([first])
    pool.check_free(first, second)


def in_a_fork(call: Callable[[], object]) -> None:
    """Run a call in a forked process, and raise here what it raised there."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        try:
            call()
        except Exception as error:
            theirs.send(error)
        else:
            theirs.send(None)

    process = context.Process(target=run)
    process.start()
    raised = ours.recv()
    process.join()
    if raised is not None:
        raise raised


@pool_check("GUARD-2", LEASES)
def check_guard_2_released_lease_does_not_expire(pool: PoolDriver) -> None:
    """However it ended, its deadline ends with it: what is held since is another's."""
    block = pool.blocks[1]
    for end in ("release", "exit"):
        short = pool.call(pool.view, "lease", [block], ttl=5)
        pool.name(short, "short")
        if end == "release":
            pool.call(short, "release")
        else:
            pool.call(short, "__enter__")
            pool.call(short, "__exit__", None, None, None)
        long = pool.call(pool.view, "lease", [block], ttl=50)
        pool.name(long, "long")
        pool.held.update([block])
        pool.call(pool.harness, "advance", 6)
        pool.touch([])
        pool.check_held(block)
        pool.equal(pool.read(long, "is_active"), True, "its own deadline is not here yet")
        pool.equal(pool.call(long, "release"), True, "a lease that is active is released")
        del pool.held[block]
        pool.check_free(block)


@pool_check("GUARD-2", LEASES)
def check_guard_2_lease_tells_what_it_holds(pool: PoolDriver) -> None:
    """Its blocks, one entry a reference and no null block, its job, whether it is active."""
    first, second = pool.blocks[1:3]
    null = [] if pool.null is None else [pool.null]
    for job, ttl in (("job", None), (None, 5), (7, 9)):
        lease = pool.call(pool.view, "lease", [first, *null, second, first], job=job, ttl=ttl)
        pool.name(lease, "lease")
        told = tuple(pool.read(lease, "block_ids"))
        pool.equal(told, (first, second, first), "a lease names each reference")
        pool.equal(pool.read(lease, "job"), job, "a lease names its job")
        pool.equal(pool.read(lease, "is_active"), True, "a lease that was taken is active")
        pool.call(lease, "release")
        pool.equal(pool.read(lease, "is_active"), False, "a lease that was released is not")
        pool.check_free(first, second)


@pool_check("GUARD-11", Capability.STATS, Capability.PIN_BUDGET, LEASES)
def check_guard_11_stats_count_what_was_done(pool: PoolDriver) -> None:
    """References taken and given back, leases, expiries, the peak, and calls refused."""
    pool.use(pool.call(pool.harness, "budgeted", 4), "view")
    stats = dict.fromkeys(("touched", "freed", "leases", "expired", "refused", "peak_held"), 0)

    def check(**more: int) -> None:
        for name, number in more.items():
            stats[name] += number
        told = {name: number for name, number in asdict(pool.view.stats).items() if name in stats}
        pool.derive()
        pool.equal(told, stats, "stats count what was done through the guard")
        held = pool.view.stats.touched - pool.view.stats.freed
        pool.equal(pool.view.stats.held, held, "stats tell what is held now")

    first, second, third = pool.blocks[:3]
    null = [] if pool.null is None else [pool.null]
    check()
    pool.touch([first, second, first, *null])
    check(touched=3, peak_held=3)
    pool.refuse(BlockNotHeldError, "free_blocks", [third])
    pool.refuse(UnknownBlockError, "touch_blocks", [third, pool.num_blocks])
    pool.refuse(PinBudgetExceeded, "touch_blocks", pool.blocks)
    check(refused=3)
    pool.free([first])
    check(freed=1)
    pool.touch([third])
    check(touched=1)
    pool.free([third, first])
    check(freed=2)
    pool.call(pool.view, "lease", [first, third], ttl=5)
    pool.call(pool.view, "lease", [first], ttl=9)
    told = pool.view.stats
    told_of_leases = (told.leases, told.active_leases, told.expired)
    pool.equal(told_of_leases, (2, 2, 0), "leases are counted, and those that are active")
    pool.call(pool.harness, "advance", 6)
    pool.touch([])
    told_of_leases = (told.leases, told.active_leases, told.expired)
    pool.equal(told_of_leases, (2, 1, 1), "leases that expire are counted, and active no more")
    if pool.can(Capability.CACHE) and pool.can(Capability.BLOCK_KEYS):
        block = pool.hashed(1)
        stale = [b"another" + pool.hashes[block[0]][0]]
        pool.refused(StaleBlockError, pool.view, "lease", block, expected_keys=stale)
        pool.equal(told.refused, 4, "a lease that is refused is counted once")


@pool_check("GUARD-11", Capability.ENGINE_SIDE, GUARDS, LEASES, Capability.LEAKS, Capability.STATS)
def check_guard_11_engine_is_told_and_takes_all_back(pool: PoolDriver) -> None:
    """For whom a block was taken, who counts what, who is over it; in the end all is given back."""
    first, second, third = pool.blocks[1:4]
    pool.call(pool.view, "speak_of", "r1")
    pool.call(pool.view, "touch_blocks", [first])
    pool.call(pool.view, "speak_of", None)
    lease = pool.call(pool.view, "lease", [second])
    pool.name(lease, "lease")
    named = {leak.block_ids: leak.request_id for leak in pool.call(pool.view, "leaks")}
    pool.derive()
    pool.equal(named, {(first,): "r1", (second,): None}, "a leak names the request")
    over = pool.call(pool.harness, "guard_over", pool.view, None)
    pool.name(over, "over")
    pool.call(over, "touch_blocks", [third])
    guards = pool.call(pool.view, "guards")
    are_all = len(guards) == 2 and pool.view in guards and over in guards
    pool.true(are_all, "a guard tells those over it", guards, "itself and one more")
    pool.true(pool.call(over, "guards") == [over], "and none below", "others", "itself")
    accounts = pool.call(pool.view, "accounts")
    found = [[stats is pool.view.stats for stats in some] for some in accounts.values()]
    pool.equal(found, [[True], [False]], "accounts tell each guard once, the one asked first")
    pool.call(pool.view, "free_all")
    pool.equal(pool.view.stats.active_leases, 0, "no lease is active after free_all")
    pool.check_free(first, second, third)


@pool_check("GUARD-11", Capability.ENGINE_SIDE)
def check_guard_11_engine_may_take_back_what_was_closed(pool: PoolDriver) -> None:
    """A guard that somebody closed while it held blocks is no error to an engine that ends it."""
    pool.touch(pool.blocks[1:3])
    pool.call(pool.view, "close")
    pool.call(pool.view, "free_all")
    pool.call(pool.view, "free_all")


@pool_check("GUARD-11", Capability.TRACE, Capability.LEAKS, LEASES)
def check_guard_11_traced_leak_names_the_line(pool: PoolDriver) -> None:
    """With a trace each leak tells file, line and function of whoever took it."""
    pool.use(pool.call(pool.harness, "traced"), "view")
    first, second, third = pool.blocks[:3]

    def take_plain() -> None:
        pool.view.touch_blocks([first])

    def take_lease() -> Any:
        return pool.view.lease([second], job="job")

    take_plain()
    lease = take_lease()
    pool.touch([third])  # by the recorder
    pool.line(f"view.touch_blocks([{first}]); lease = view.lease([{second}])")
    told = {leak.block_ids: leak.taken_at or "" for leak in pool.call(pool.view, "leaks")}
    for block, function in ((first, take_plain), (second, take_lease)):
        code = function.__code__
        line = f"{code.co_filename}:{code.co_firstlineno + 1}"
        where = told.get((block,), "")
        is_named = line in where and function.__name__ in where
        pool.true(is_named, "a leak names the line that took it", where, line)
    pool.true(
        __file__ not in told.get((third,), __file__),
        "a leak names the line next to the guard, not one further away",
        told,
        "the recorder's",
    )
    lease.release()
