"""The guard before a tier: random faults against its models, the laws of a tier, and the rest."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from kvview import ConfigError
from kvview.testing import TierConformance
from kvview.testing.tier.model import bytes_of
from kvview.tier import GuardedTier, Namespace, TierStore
from kvview_reference.tier import FileStore
from tests.tier.faulty_store import FaultyStore
from tests.tier.guard_machines import (
    DEADLINE,
    HERE,
    PATIENCE,
    CountsMachine,
    FaultsMachine,
    GuardedStore,
    ManualClock,
    await_that,
)
from tests.tier.jobs import moved

pytest.importorskip("xxhash")
OLD = {b"old %d" % number: 4096 for number in range(8)}


TestFaults = FaultsMachine.TestCase
TestCounts = CountsMachine.TestCase
TestFaults.settings = TestCounts.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None
)


class TestGuardedFiles(TierConformance):
    """The tier of files behind a guard."""

    store = FileStore
    options = {"root": "{tmp}", "checksum": "none"}
    # Entries that a killed process wrote without a guard have no seal.
    lacks = {"kill", "usage"}
    settings = settings(max_examples=6, stateful_step_count=20)

    def make(self, store: type[TierStore], namespace: Namespace, **options: Any) -> TierStore:
        return GuardedTier(super().make(store, namespace, **options), namespace)


def test_a_guard_names_the_keys_that_its_store_evicts(tmp_path: Path) -> None:
    guard = GuardedTier(FileStore(HERE, root=str(tmp_path), max_bytes=20_000), HERE)
    keys = [b"%d" % number for number in range(30)]
    for key in keys:
        assert moved(guard, "put", key) == [True]
    evicted: list[bytes] = []
    await_that("evictions are named", lambda: evicted, lambda: evicted.extend(guard.take_evicted()))
    assert {*evicted} <= {*keys[:25]}, "TIER-8: the keys stored last stay"
    guard.close()


def test_touches_are_passed_on() -> None:
    tier = GuardedStore()
    tier.guard.touch([*OLD])
    await_that("touch reaches the store", lambda: tier.under.touched == [*OLD])
    tier.close()


def test_with_zero_copy_the_store_has_the_pages_of_the_engine_until_its_report() -> None:
    tier = GuardedStore(zero_copy=True, checksum="none", trip_after=99)
    tier.submit("put", OLD)
    tier.wait()
    tier.under.fault = "reports late"
    mine = memoryview(bytearray(4096))
    tier.guard.get(900, [b"old 0"], [mine])
    late = tier.under.late_pages
    await_that("a get reaches the store", lambda: late)
    assert late[0].obj is mine.obj, "TIER-12: the store is given the page of the engine"
    tier.clock.seconds += 9 * DEADLINE
    time.sleep(0.03)
    assert tier.guard.poll() == [], "TIER-12: no job is reported while the store has its pages"
    late.clear()  # otherwise the store would write into the page now
    tier.under.heal()
    assert tier.guard.drain(PATIENCE)
    assert tier.guard.poll() == [(900, [True])]
    assert mine == bytes_of(b"old 0", 4096)
    tier.close()


def test_a_lookup_without_a_result_counts_when_the_thread_of_the_guard_notices_it() -> None:
    clock, store = ManualClock(), FaultyStore()
    store.fault = "lookup never knows"
    guard = GuardedTier(store, HERE, trip_after=1, clock=clock)
    assert guard.lookup([b"key"]) == [None]
    clock.seconds += 3.0
    # No further call tells the guard the time.
    await_that("a lookup is late", lambda: guard.stats.unanswered)
    assert not guard.is_healthy
    guard.close()


@pytest.mark.parametrize("name", ["deadline", "lookup_deadline", "trip_after", "retry_after"])
def test_the_guard_refuses_numbers_that_are_not_positive(name: str) -> None:
    wrong: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=f"{name} must be more than 0, got 0"):
        GuardedTier(FaultyStore(), HERE, **wrong)
