"""Checks of a guarded tier that the models cannot state: time that passes, and whose pages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvview.testing.harness import Capability as C
from kvview.testing.search import example
from kvview.testing.tier.guard_player import DEADLINE, TierGuardPlayer
from kvview.testing.tier.model import bytes_of

_OLD = {b"old %d" % number: 4096 for number in range(8)}


def _comes(guard: TierGuardPlayer, what: str, is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + guard.patience
    while not is_so() and time.monotonic() < end:
        time.sleep(0.001)
    guard.true(is_so(), what, "nothing", "a call of the store")


@example(TierGuardPlayer, "TIER-12", C.TIER_GUARD)
def check_tier_12_notices(guard: TierGuardPlayer) -> None:
    """Threads: uses and deletes reach the store, and its wake-up reaches the engine."""
    subject, woken = guard.subject, threading.Event()
    if hasattr(subject, "on_wake_up"):
        subject.on_wake_up(woken.set)
        guard.submit("put", _OLD)
        guard.true(woken.wait(guard.patience), "a job that ended wakes up", "nothing", "a call")
        guard.drain()
    if hasattr(subject, "touch"):
        guard.call(subject, "touch", [*_OLD][:2])
        _comes(guard, "touch reaches the store", lambda: guard.under.touched == [*_OLD][:2])
    if hasattr(subject, "delete"):
        guard.call(subject, "delete", [*_OLD][:1])
        guard.model.delete([*_OLD][:1])
        _comes(guard, "delete reaches the store", lambda: b"old 0" not in guard.under._held)
        guard.look([*_OLD])


@example(TierGuardPlayer, "TIER-12", C.TIER_GUARD)
def check_tier_12_close(guard: TierGuardPlayer) -> None:
    """Time: a store that hangs holds up no shutdown, and its jobs have failed."""
    for fault in ("put blocks", "lookup blocks", "never reports", "poll blocks"):
        guard.guard_new_store()
        guard.submit("put", _OLD)
        guard.drain()
        guard.under.fault = fault
        guard.model.spoil()
        guard.submit("get", _OLD)
        guard.call(guard.subject, "lookup", [b"unknown"])
        began = time.monotonic()
        guard.close()
        took, most = time.monotonic() - began, guard.patience / 2 + 1
        guard.true(took < most, "close waits for no store that hangs", f"{took:.1f} s", "less")
        guard.under.heal()


@example(TierGuardPlayer, "TIER-12", C.TIER_GUARD)
def check_tier_12_pages_of_the_engine(guard: TierGuardPlayer) -> None:
    """Memory: with ``zero_copy`` the store has the engine's pages until it reports their job."""
    try:
        guard.guard_new_store(zero_copy=True, checksum="none", trip_after=99)
    except TypeError:
        return
    key, size = b"old 0", 4096
    guard.submit("put", _OLD)
    guard.drain()
    guard.under.fault = "reports late"
    mine = memoryview(bytearray(size))
    guard.line("guard.get(900, [b'old 0'], [mine]); the store reports late")
    guard.subject.get(900, [key], [mine])
    late = guard.under._late_pages
    _comes(guard, "a get reaches the store", lambda: bool(late))
    is_mine = late[0].obj is mine.obj
    guard.true(is_mine, "the store is given the engine's page", "a copy", "the page")
    guard.clock.seconds += 9 * DEADLINE
    time.sleep(0.03)
    reports = list(guard.subject.poll())
    guard.equal(reports, [], "no job is reported while its pages are the store's")
    late.clear()  # else they would be written to now
    guard.under.heal()
    guard.true(guard.subject.drain(guard.patience), "it is reported then", "nothing", "a report")
    guard.equal([*guard.subject.poll()], [(900, [True])], "it is reported then")
    guard.equal(bytes(mine), bytes_of(key, size), "the page is filled")
    guard.under.fault = "never reports"
    guard.model.spoil()
    guard.submit("get", _OLD)
    _comes(guard, "a get reaches the store", lambda: guard.under.num_jobs > 2)
    guard.close()
