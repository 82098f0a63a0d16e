"""A guarded tier over stores that do what they must not (TIER-12)."""

from __future__ import annotations

import threading
import time

from kvview.testing.harness import Capability
from kvview.testing.tier import faulty_store
from kvview.testing.tier.driver import TierDriver, tier_check
from kvview.testing.tier.faulty_store import FaultyStore

_DEADLINE = 5.0
_RETRY_AFTER = 10.0
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
    """

    def __init__(self, driver: TierDriver, fault: str) -> None:
        self.driver, self.fault = driver, fault
        self.clock, self.under = ManualClock(), FaultyStore()
        driver.line(f"# a guard over a store of which the fault is: {fault}")
        guard = driver.harness.guard(
            self.under,
            driver.harness.namespace,
            deadline=_DEADLINE,
            lookup_deadline=1.0,
            retry_after=_RETRY_AFTER,
            clock=self.clock,
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
