"""A guarded tier over stores that do what they must not (TIER-12)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvview.testing.harness import Capability
from kvview.testing.tier import faulty_store
from kvview.testing.tier.driver import PAGE_BYTES, TierDriver, bytes_of, tier_check
from kvview.testing.tier.faulty_store import FaultyStore

_DEADLINE = 5.0
_RETRY_AFTER = 10.0
_STRIKES = 3
_OLD = [f"old {number}".encode() for number in range(8)]
_STEP = 0.03  # real seconds that a store has before the clock goes on


class ManualClock:
    """Seconds that go by when it is told."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """What it shows."""
        return self.seconds


class GuardRun:
    """One fault under a guard: before, meanwhile and after.

    Args:
        driver: Its harness makes the guard; it judges all that comes out.
        fault: Of :class:`FaultyStore`.
        options: Of the guard, others than usual.
    """

    def __init__(self, driver: TierDriver, fault: str, **options: Any) -> None:
        self.driver, self.fault = driver, fault
        self.clock, self.under = ManualClock(), FaultyStore()
        driver.line(f"# a guard over a store of which the fault is: {fault}")
        guard = driver.harness.guard(
            self.under,
            driver.harness.namespace,
            **{
                "deadline": _DEADLINE,
                "lookup_deadline": 1.0,
                "trip_after": _STRIKES,
                "retry_after": _RETRY_AFTER,
                "clock": self.clock,
                **options,
            },
        )
        driver.subject = guard
        driver.stored.clear()
        driver.failed.clear()
        driver._names[id(guard)] = "guard"

    def play(self) -> None:
        """All of it."""
        driver = self.driver
        driver.put(*_OLD)
        driver.finish()
        driver.check_held(*_OLD)
        self.under.fault = self.fault
        driver.overwrite_reported()
        for number in range(4):
            driver.put(f"{number} x".encode(), f"{number} y".encode())
            driver.get(_OLD[number], f"never {number}".encode(), _OLD[number + 4])
            self.look(*_OLD, f"{number} x".encode())
            self.wait()
            driver.overwrite_reported()
        for key in driver.failed:
            self.look(key)
        self.under.heal()
        time.sleep(_STEP)
        driver.poll()
        driver.check_untouched()
        is_here = threading.get_ident() in self.under.callers
        what = "a store that blocks does not block the caller"
        driver.true(not is_here, what, "called on the caller's thread", "on another one")
        self.come_back()
        driver.call(driver.store, "close")

    def wait(self) -> None:
        """Poll until every job was reported, the clock going on: none outlives its deadline."""
        driver, end = self.driver, time.monotonic() + self.driver.patience
        next_step = time.monotonic() + _STEP
        while driver.num_in_flight:
            with driver.unrecorded():
                driver.poll()
            if time.monotonic() > next_step:
                self.clock.seconds += _DEADLINE / 2
                next_step += _STEP
            what = "each job is reported within its deadline, whatever the store does"
            driver.true(time.monotonic() < end, what, "nothing", "a report")
            time.sleep(0.0005)

    def look(self, *keys: bytes) -> None:
        """Ask until every key is known; what failed is a miss (TIER-4)."""
        driver, end = self.driver, time.monotonic() + self.driver.patience
        flags: list[bool | None] = [None]
        while None in flags:
            with driver.unrecorded():
                flags = list(driver.call(driver.store, "lookup", list(keys)))
            driver.equal(len(flags), len(keys), "lookup gives one flag a key")
            what = "lookup has an answer in time, whatever the store does"
            driver.true(time.monotonic() < end, what, flags, "True or False")
            if None in flags:
                time.sleep(0.002)
                self.clock.seconds += 0.1
        for key, flag in zip(keys, flags, strict=True):
            if key in driver.failed:
                what = "what failed is a miss until it is stored again, whatever a store says"
                driver.equal(flag, False, what)

    def come_back(self) -> None:
        """A store that works again is used again, if not at once."""
        driver = self.driver
        for number in range(8):
            self.clock.seconds += 20 * _RETRY_AFTER
            key = f"again {number}".encode()
            driver.put(key, *_OLD)
            driver.finish()
            if key in driver.stored:
                driver.check_held(key, *_OLD)
                return
        driver.fail("a store that works again is used again", "every put fails", "a success")


def _bears(store: TierDriver, faults: tuple[str, ...]) -> None:
    for fault in faults:
        GuardRun(store, fault).play()


@tier_check("TIER-12", Capability.TIER_GUARD)
def check_tier_12_guard_bears_what_raises(store: TierDriver) -> None:
    """A store whose calls raise, SystemExit too."""
    _bears(store, faulty_store.RAISING)


@tier_check("TIER-12", Capability.TIER_GUARD)
def check_tier_12_guard_bears_what_blocks(store: TierDriver) -> None:
    """A store whose calls do not come back."""
    _bears(store, faulty_store.BLOCKING)


@tier_check("TIER-12", Capability.TIER_GUARD)
def check_tier_12_guard_bears_what_is_late(store: TierDriver) -> None:
    """Reports and bytes that come late, or never."""
    _bears(store, faulty_store.LATE)


@tier_check("TIER-12", Capability.TIER_GUARD)
def check_tier_12_guard_bears_what_is_no_report(store: TierDriver) -> None:
    """Reports and answers that are none."""
    _bears(store, faulty_store.MALFORMED)


@tier_check("TIER-12", Capability.TIER_GUARD)
def check_tier_12_guard_bears_lies(store: TierDriver) -> None:
    """Wrong answers, wrong bytes, a medium that is full."""
    _bears(store, faulty_store.LYING)


@tier_check("TIER-12", Capability.TIER_GUARD)
def check_tier_12_guard_leaves_a_store_alone_that_fails(store: TierDriver) -> None:
    """After strikes in a row nothing reaches it; then one job does, on trial."""
    run, numbers = GuardRun(store, "put raises"), iter(range(99))

    def jobs_of(num: int) -> int:
        """How many of so many puts reach the store."""
        before = run.under.num_jobs
        for _ in range(num):
            store.put(f"job {next(numbers)}".encode())
        store.finish()
        return run.under.num_jobs - before

    store.equal(jobs_of(1), 1, "a store is used")
    for fault, name in (("", "one that does well in between"), ("put raises", "one that fails")):
        run.under.fault = fault
        for _ in range(_STRIKES - 1):
            store.equal(jobs_of(1), 1, f"{name} is used before {_STRIKES} strikes in a row")
    run.under.fault = ""
    store.equal(jobs_of(1), 1, "strikes are counted in a row")
    run.under.fault = "put raises"
    for _ in range(_STRIKES):
        store.equal(jobs_of(1), 1, f"a store is used before {_STRIKES} strikes in a row")
    what = "a store that is left alone is not asked: a key that is not known yet is a miss at once"
    store.equal(list(store.call(store.store, "lookup", [b"never asked"])), [False], what)
    for seconds, reach in ((0.0, 0), (0.9 * _RETRY_AFTER, 0), (0.2 * _RETRY_AFTER, 1)):
        run.clock.seconds += seconds
        what = f"{run.clock.seconds} s after it was left alone, of two jobs reach the store"
        store.equal(jobs_of(2), reach, what)
    run.clock.seconds += 1.1 * _RETRY_AFTER
    store.equal(jobs_of(2), 0, "after a failed trial it is left alone for longer")
    run.clock.seconds += _RETRY_AFTER
    run.under.fault = ""
    store.equal(jobs_of(1), 1, "it is tried again")
    store.equal(jobs_of(2), 2, "after a trial that went well it is used")
    run.under.fault = "put raises"
    jobs_of(_STRIKES)
    for _ in range(8):
        run.clock.seconds += 20 * _RETRY_AFTER
        store.equal(jobs_of(2), 1, "however often it failed, it is tried again")
    store.call(store.store, "close")


@tier_check("TIER-12", Capability.TIER_GUARD)
def check_tier_12_guard_takes_each_fault_for_a_strike(store: TierDriver) -> None:
    """Whatever is wrong, and however it is told: after some of it the store is left alone."""
    for fault in ("lookup raises", "lookup is None", "lookup never knows", "get raises",
                  "poll raises", "poll is None", "too few flags", "never reports"):  # fmt: skip
        run = GuardRun(store, fault)
        run.under.fault = fault
        for number in range(_STRIKES):
            if fault.startswith("lookup"):
                run.look(f"{fault} {number}".encode())
            else:
                store.get(f"{fault} {number}".encode())
                run.wait()
        run.under.fault, before = "", run.under.num_jobs
        store.put(b"left alone")
        store.finish()
        reached = run.under.num_jobs - before
        store.equal(reached, 0, f"a store of which {fault} is left alone: jobs that reach it")
        store.call(store.store, "close")


@tier_check("TIER-12", Capability.TIER_GUARD)
def check_tier_12_guard_counts_what_it_sees(store: TierDriver) -> None:
    """If it has ``stats``: keys stored, loaded and failed, and what was wrong with the store."""
    run = GuardRun(store, "one after the other")
    if not hasattr(store.store, "stats"):
        return

    def seen(what: str, **more: int) -> None:
        """These have grown by so much, and nothing else has, since it was asked last."""
        now = asdict(store.store.stats)
        grown = {n: now[n] - last.get(n, 0) for n in now if now[n] != last.get(n, 0)}
        last.update(now)
        store.equal(grown, more, f"what stats say of {what}")

    def does(method: str, *keys: bytes, fault: str = "") -> None:
        run.under.fault = fault
        getattr(store, method)(*keys)
        run.wait()
        run.under.fault = ""

    last: dict[str, int] = {}
    store.equal(store.store.is_healthy, True, "a store that does well is healthy")
    does("put", *_OLD)
    seen("a put of eight keys", puts=8)
    does("get", *_OLD[:3], b"never")
    seen("a get of three keys and one that is not there", gets=3, failed=1)
    does("get", *_OLD[3:5], fault="flips a bit")
    seen("two keys whose bytes are damaged", failed=2, damaged=2)
    does("put", b"x", fault="put raises")
    seen("a put that raises", failed=1, raised=1)
    does("put", b"y", fault="too many flags")
    seen("a report with too many flags", failed=1, malformed=1)
    does("put", b"z", fault="reports twice")
    time.sleep(_STEP)
    seen("a report that comes twice", puts=1, unknown=1)
    does("put", b"u", fault="never reports")
    seen("a job that is late", failed=1, late=1)
    run.under.fault = "lookup never knows"
    run.look(b"unknown")
    seen("a lookup that is not answered", unanswered=1)
    run.under.fault = "lookup is None"
    run.look(b"no flags")
    seen("a lookup without flags, the third strike", malformed=1, trips=1)
    store.equal(store.store.is_healthy, False, "a store that is left alone is not healthy")
    does("put", b"a", b"b")
    seen("a job that does not reach the store", failed=2, refused=1)
    store.call(store.store, "close")
    store.equal(store.store.is_healthy, False, "what is closed is not healthy")


@tier_check("TIER-12", Capability.TIER_GUARD)
def check_tier_12_guard_waits_as_long_as_it_says(store: TierDriver) -> None:
    """A job has all of its deadline, and a lookup of its own."""
    run = GuardRun(store, "never reports", trip_after=9)
    store.put(*_OLD)
    store.finish()
    run.under.fault = "never reports"
    jobs = [store.put(b"new"), store.get(*_OLD[:2])]
    for seconds in (0.0, 0.5, 0.4):
        run.clock.seconds += seconds * _DEADLINE
        time.sleep(_STEP)
        store.equal(
            store.poll(), {}, f"{run.clock.seconds} s: a job is not late before its deadline"
        )
    run.clock.seconds += 0.2 * _DEADLINE
    store.equal(sorted(store.poll()), jobs, "a job is late after its deadline")
    late = store.put(b"later")
    run.clock.seconds += 1.1 * _DEADLINE
    is_drained = store.call(store.store, "drain", store.patience)
    store.equal(is_drained, True, "drain waits for no job longer than its deadline")
    store.equal(store.poll(), {late: [False]}, "a job is late after its deadline")
    run.under.fault = "lookup never knows"
    for seconds, answer in ((0.0, None), (0.9, None), (0.2, False)):
        run.clock.seconds += seconds
        time.sleep(_STEP)
        found = store.call(store.store, "lookup", [b"never"])
        store.equal(list(found), [answer], "a lookup without an answer is a miss at its deadline")
    store.call(store.store, "close")


@tier_check("TIER-12", Capability.TIER_GUARD)
def check_tier_12_guard_passes_on_what_it_is_told(store: TierDriver) -> None:
    """Uses and deletes reach the store, and its waking up reaches the engine."""
    run, woken = GuardRun(store, "nothing"), threading.Event()
    guard = store.store
    if hasattr(guard, "on_wake_up"):
        guard.on_wake_up(woken.set)
        store.put(*_OLD)
        store.true(woken.wait(store.patience), "a job that ended wakes up", "nothing", "a call")
    else:
        store.put(*_OLD)
    store.finish()
    if hasattr(guard, "touch"):
        store.call(guard, "touch", _OLD[:2])
        _comes(store, "touch reaches the store", lambda: run.under.touched == _OLD[:2])
    if hasattr(guard, "delete"):
        store.call(guard, "delete", _OLD[:1])
        store.stored.pop(_OLD[0])
        store.failed.add(_OLD[0])
        run.look(*_OLD)
        _comes(store, "delete reaches the store", lambda: _OLD[0] not in run.under._held)
        store.put(_OLD[0])
        store.finish()
    store.check_held(*_OLD)
    store.call(guard, "close")


def _comes(store: TierDriver, what: str, is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + store.patience
    while not is_so() and time.monotonic() < end:
        time.sleep(0.001)
    store.true(is_so(), what, "nothing", "a call of the store")


@tier_check("TIER-12", Capability.TIER_GUARD)
def check_tier_12_guard_closes_over_any_store(store: TierDriver) -> None:
    """A store that hangs holds up no shutdown, and what it was at has failed."""
    for fault in ("put blocks", "lookup blocks", "never reports", "poll blocks"):
        run = GuardRun(store, fault)
        store.put(*_OLD)
        store.finish()
        run.under.fault = fault
        jobs = [store.put(b"new"), store.get(*_OLD[:2])]
        store.call(store.store, "lookup", [b"unknown"])
        began = time.monotonic()
        store.call(store.store, "close")
        took = time.monotonic() - began
        in_time = took < store.patience / 2
        store.true(in_time, "close waits for no store that hangs", f"{took:.1f} s", "less")
        reports = store.poll()
        store.equal(sorted(reports), jobs, "what is in flight ends with close", "TIER-11")
        late = [store.put(b"late"), store.get(_OLD[0])]
        store.equal(store.poll(), {job: [False] for job in late}, "a job after close fails")
        flags = list(store.call(store.store, "lookup", [_OLD[0]]))
        store.equal(flags, [False], "after close everything is a miss", "TIER-11")
        run.under.heal()
        store.call(store.store, "close")


@tier_check("TIER-12", Capability.TIER_GUARD)
def check_tier_12_guard_without_copies(store: TierDriver) -> None:
    """If it takes ``zero_copy``: the store has the engine's pages, until it reports their job."""
    try:
        run = GuardRun(store, "writes late", zero_copy=True, checksum="none", trip_after=99)
    except TypeError:
        return
    store.put(*_OLD)
    store.finish()
    store.check_held(*_OLD)
    run.under.fault = "reports late"
    mine = memoryview(bytearray(PAGE_BYTES))
    store.line("guard.get(900, keys, [mine]); the store reports late")
    store.store.get(900, _OLD[:1], [mine])
    late = run.under._late_pages
    _comes(store, "a get reaches the store", lambda: bool(late))
    is_mine = late[0].obj is mine.obj
    store.true(is_mine, "the store is given the engine's page", "a copy", "the page")
    run.clock.seconds += 9 * _DEADLINE
    time.sleep(_STEP)
    reports = list(store.store.poll())
    store.equal(reports, [], "no job is reported while its pages are the store's", "TIER-3")
    late.clear()  # else they would be written to now
    run.under.heal()
    store.true(store.store.drain(store.patience), "it is reported then", "nothing", "a report")
    store.equal([*store.store.poll()], [(900, [True])], "it is reported then")
    store.equal(bytes(mine), bytes_of(_OLD[0]), "the page is filled", "TIER-1")
    run.under.fault = "never reports"
    job = store.get(*_OLD[:2])
    _comes(store, "a get reaches the store", lambda: run.under.num_jobs > 0)
    store.call(store.store, "close")
    store.equal(store.poll(), {job: [False, False]}, "close ends what is in flight", "TIER-11")
    store.overwrite_reported()
    time.sleep(_STEP)
    store.check_untouched()
