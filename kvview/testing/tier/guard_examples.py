"""Checks of a guarded tier that the models cannot state: notices, and the engine's own pages."""

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
    with guard.patiently(what, "TIER-12") as wait:
        while not is_so():
            wait("nothing")


@example(TierGuardPlayer, "TIER-12", C.TIER_GUARD)
def check_tier_12_notices(guard: TierGuardPlayer) -> None:
    """Threads: touches and deletes reach the store, and the store's wake-up reaches the engine."""
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
        _comes(guard, "delete reaches the store", lambda: b"old 0" not in guard.under.held)
        guard.look([*_OLD])


@example(TierGuardPlayer, "TIER-12", C.TIER_GUARD)
def check_tier_12_pages_of_the_engine(guard: TierGuardPlayer) -> None:
    """Memory: with ``zero_copy``, the store has the engine's pages until it reports their job."""
    try:
        guard.guard_new_store(zero_copy=True, checksum="none", trip_after=99)
    except TypeError:
        return
    guard.move("put", _OLD)
    guard.under.fault = "reports late"
    mine = memoryview(bytearray(4096))
    guard.line("guard.get(900, [b'old 0'], [mine]); the store reports late")
    guard.subject.get(900, [b"old 0"], [mine])
    late = guard.under.late_pages
    _comes(guard, "a get reaches the store", lambda: bool(late))
    is_mine = late[0].obj is mine.obj
    guard.true(is_mine, "the store is given the engine's page", "a copy", "the page")
    guard.clock.seconds += 9 * DEADLINE
    time.sleep(0.03)
    reports = list(guard.subject.poll())
    guard.equal(reports, [], "no job is reported while its pages are the store's")
    late.clear()  # otherwise the store would write into the pages now
    guard.under.heal()
    guard.true(guard.subject.drain(guard.patience), "it is reported then", "nothing", "a report")
    guard.equal([*guard.subject.poll()], [(900, [True])], "it is reported then")
    guard.equal(bytes(mine), bytes_of(b"old 0", 4096), "the page is filled")
    guard.under.fault = "never reports"
    guard.model.become_faulty()
    guard.submit("get", _OLD)
    _comes(guard, "a get reaches the store", lambda: guard.under.num_jobs > 2)
    guard.close()
