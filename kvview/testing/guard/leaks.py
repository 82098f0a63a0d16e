"""GUARD-11: the report of what is held is right after everything that can happen to a hold."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvview.errors import PinBudgetExceeded, UnknownBlockError
from kvview.testing.harness import Capability
from kvview.testing.pool.driver import PoolDriver, pool_check

LEAKS = Capability.LEAKS

Held = tuple[object, int, float]
"""A reference: the job that holds it, the block, and since when, in seconds."""


class _Report:
    """What ``leaks`` of one guard must tell.

    Args:
        pool: Whose guard it is, unless ``guard`` says otherwise.
        guard: The guard that is asked.
    """

    def __init__(self, pool: PoolDriver, guard: Any = None) -> None:
        self.pool = pool
        self.guard = pool.view if guard is None else guard
        self.now = 0.0
        self.held: Counter[Held] = Counter()

    def advance(self, seconds: float) -> None:
        """Time passes; the guard hears of it with its next call."""
        self.pool.call(self.pool.harness, "advance", seconds)
        self.now += seconds

    def touch(self, *blocks: int) -> None:
        """Hold blocks; of several touches of a block the first one counts."""
        self.pool.call(self.guard, "touch_blocks", list(blocks))
        for block in blocks:
            since = [at for job, b, at in self.held if (job, b) == (None, block)]
            self.held[None, block, since[0] if since else self.now] += 1

    def lease(self, job: str, *blocks: int, ttl: float | None = None) -> Any:
        """Hold blocks for a job."""
        lease = self.pool.call(self.guard, "lease", list(blocks), job=job, ttl=ttl)
        self.pool.name(lease, job)
        self.held.update((job, block, self.now) for block in blocks)
        return lease

    def ended(self, *ended: object) -> None:
        """Nothing is held for these jobs any more; ``None`` is for plain touches."""
        self.held = Counter({one: n for one, n in self.held.items() if one[0] not in ended})

    def check(self) -> None:
        """Compare, reference by reference; then the order, and the filter by age."""
        leaks = list(self.pool.call(self.guard, "leaks"))
        self.pool.derive()
        told = Counter((leak.job, b, self.now - leak.age) for leak in leaks for b in leak.block_ids)
        what = "leaks tells each reference held, with its job and its age"
        self.pool.equal(sorted(told.elements(), key=repr), self._sorted(), what)
        ages = [leak.age for leak in leaks]
        self.pool.equal(ages, sorted(ages, reverse=True), "what is held longest comes first")
        for age in {*ages, 0.5}:
            some = self.pool.call(self.guard, "leaks", age)
            old = [leak.age for leak in some]
            self.pool.derive()
            self.pool.equal(old, [a for a in ages if a >= age], "younger ones are left out")

    def _sorted(self) -> list[Held]:
        return sorted(self.held.elements(), key=repr)


@pool_check("GUARD-11", LEAKS)
def check_guard_11_leaks_follow_every_path(pool: PoolDriver) -> None:
    """Touches, leases, releases, renewals, expiry, ``with``, and calls that raise."""
    report = _Report(pool)
    first, second, third, fourth = pool.blocks[:4]
    report.check()
    report.touch(first, second, first)
    report.check()
    report.advance(3)
    report.touch(second, third)
    one = report.lease("one", first, second, second, ttl=10)
    report.check()
    report.advance(4)
    two = report.lease("two", fourth)
    pool.refused(UnknownBlockError, pool.view, "lease", [third, pool.num_blocks], job="wrong")
    pool.refused(UnknownBlockError, pool.view, "touch_blocks", [fourth, -1])
    pool.call(one, "renew", 20)
    report.check()
    pool.call(pool.view, "free_blocks", [first, second])
    report.held -= Counter([(None, first, 0.0), (None, second, 0.0)])
    report.check()
    pool.call(pool.view, "free_blocks", [first])
    del report.held[None, first, 0.0]
    report.check()
    report.touch(first)  # held anew
    report.check()
    pool.call(two, "release")
    pool.call(two, "release")
    report.ended("two")
    report.check()
    report.advance(30)
    report.touch()
    report.ended("one")
    report.check()
    pool.call(pool.view, "free_blocks", [first, second, third])
    report.ended(None)
    report.check()


@pool_check("GUARD-11", LEAKS)
def check_guard_11_leaks_end_with_the_block(pool: PoolDriver) -> None:
    """Inside a ``with`` block the lease is told, and after it, however left, it is not."""
    report = _Report(pool)
    first, second = pool.blocks[:2]
    for error in (None, ZeroDivisionError):
        lease = report.lease("job", first, second)
        pool.call(lease, "__enter__")
        report.check()
        raised = None if error is None else error()
        pool.call(lease, "__exit__", error, raised, None)
        report.ended("job")
        report.check()


@pool_check("GUARD-11", LEAKS, Capability.PIN_BUDGET)
def check_guard_11_refused_hold_is_no_leak(pool: PoolDriver) -> None:
    """What the budget refused is not told, and what was held before is, as old as it is."""
    pool.use(pool.call(pool.harness, "budgeted", 3), "view")
    report = _Report(pool)
    blocks = pool.blocks[:5]
    report.touch(blocks[0])
    report.lease("job", blocks[1])
    report.advance(2)
    for wrong in (blocks[:4], [*blocks[2:4]], [blocks[4], blocks[0], blocks[3]]):
        pool.refused(PinBudgetExceeded, pool.view, "touch_blocks", wrong)
        pool.refused(PinBudgetExceeded, pool.view, "lease", wrong, job="wrong", ttl=1)
        report.check()


@pool_check("GUARD-11", LEAKS, Capability.GUARDS)
def check_guard_11_leaks_name_the_owner(pool: PoolDriver) -> None:
    """A guard over another one is told with it, under a name of its own."""
    report = _Report(pool)
    first, second = pool.blocks[:2]
    above = pool.call(pool.harness, "guard_over", pool.view, None)
    pool.name(above, "above")
    other = _Report(pool, above)
    report.touch(first)
    other.touch(second)
    other.check()
    leaks = pool.call(pool.view, "leaks")
    told = {leak.owner: leak.block_ids for leak in leaks}
    pool.equal(sorted(told.values()), sorted([(first,), (second,)]), "each owner is told apart")
    (owned,) = pool.call(above, "leaks")
    pool.equal(told.get(owned.owner), (second,), "a guard above has a name of its own")
    pool.call(above, "free_blocks", [second])
    other.ended(None)
    other.check()
    report.check()


@pool_check("GUARD-11", LEAKS, Capability.CLOSE)
def check_guard_11_leaks_outlive_the_guard(pool: PoolDriver) -> None:
    """What was held at the end is told after ``close`` still."""
    report = _Report(pool)
    report.touch(pool.blocks[0])
    report.lease("job", pool.blocks[1])
    report.advance(2)
    pool.call(pool.harness, "close")
    leaks = pool.call(pool.view, "leaks")
    told = [(leak.job, block) for leak in leaks for block in leak.block_ids]
    wanted: list[tuple[object, int]] = [(None, pool.blocks[0]), ("job", pool.blocks[1])]
    pool.equal(sorted(told, key=repr), sorted(wanted, key=repr), "leaks tells what was held")
