"""The CPU manager, in any order of calls, against an oracle of dicts and sets."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvview import (
    KeyNotLoadableError,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    TransferNotInFlightError,
    fold_events,
)
from kvview_reference.offloading import CPUOffloadingManager
from tests.offloading.test_offloading import CTX, KEYS, hits, pages

MISS, HIT, HIT_PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING


class _Oracle(RuleBasedStateMachine):
    """What a manager may do, told with lists, dicts and sets."""

    policy = ""
    keys = st.lists(st.sampled_from(KEYS[:8]), max_size=4)
    pick = st.integers(0, 99)

    @initialize(capacity=st.integers(1, 5), threshold=st.sampled_from([1, 1, 2]))
    def start(self, capacity: int, threshold: int) -> None:
        self.capacity, self.threshold = capacity, threshold
        self.manager = CPUOffloadingManager(
            capacity, self.policy, enable_events=True, store_threshold=threshold
        )
        self.ready: dict[OffloadKey, int] = {}
        self.storing: dict[OffloadKey, int] = {}
        self.loads: Counter[OffloadKey] = Counter()
        self.late: dict[OffloadKey, int] = {}
        self.late_loads: Counter[OffloadKey] = Counter()
        self.offers: Counter[OffloadKey] = Counter()
        self.order: list[OffloadKey] = []  # oldest first
        self.advertised: set[OffloadKey] = set()
        self.events: list[OffloadingEvent] = []
        self.store_jobs: list[list[OffloadKey]] = []
        self.load_jobs: list[list[OffloadKey]] = []

    def free(self) -> int:
        return self.capacity - len(self.ready) - len(self.storing) - len(self.late)

    @rule(keys=keys)
    def store(self, keys: list[OffloadKey]) -> None:
        new = []
        for key in dict.fromkeys(keys):
            wanted = self.offers[key] + 1 >= self.threshold
            if wanted and not (key in self.ready or key in self.storing or key in self.late):
                new.append(key)
        evictable = [
            key
            for key in self.order
            if key in self.ready and not self.loads[key] and key not in keys
        ]
        needed = max(0, len(new) - self.free())
        output = self.manager.prepare_store(keys, CTX)
        if needed > len(evictable):
            assert output is None
            return
        assert output is not None
        self.offers.update(set(keys))
        assert list(output.keys_to_store) == new
        victims = list(output.evicted_keys)
        assert len(victims) == len(set(victims)) == needed
        if self.policy == "lru":
            assert victims == evictable[:needed]
        assert set(victims) <= set(evictable)
        for key in victims:
            del self.ready[key]
        self.order = [key for key in self.order if key not in victims] + new[::-1]
        self.storing.update(zip(new, pages(output.store_spec), strict=True))
        if new:
            self.store_jobs.append(new)

    @rule(pick=pick, success=st.booleans())
    def end_store(self, pick: int, success: bool) -> None:
        if not self.store_jobs:
            return
        keys = self.store_jobs.pop(pick % len(self.store_jobs))
        self.manager.complete_store(keys, CTX, success=success)
        for key in keys:
            if key in self.late:
                del self.late[key]
            elif success:
                self.ready[key] = self.storing.pop(key)
            else:
                del self.storing[key]
                self.order.remove(key)

    @rule(picks=st.lists(pick, max_size=3))
    def load(self, picks: list[int]) -> None:
        keys = [sorted(self.ready)[pick % len(self.ready)] for pick in picks if self.ready]
        spec = self.manager.prepare_load(keys, CTX)
        assert pages(spec) == [self.ready[key] for key in keys]
        self.loads.update(keys)
        self.load_jobs.append(keys)

    @rule(keys=keys)
    def load_what_may_be_missing(self, keys: list[OffloadKey]) -> None:
        if any(key not in self.ready for key in keys):
            with pytest.raises(KeyNotLoadableError):
                self.manager.prepare_load(keys, CTX)

    @rule(pick=pick)
    def end_load(self, pick: int) -> None:
        if not self.load_jobs:
            return
        keys = self.load_jobs.pop(pick % len(self.load_jobs))
        self.manager.complete_load(keys, CTX)
        for key in keys:
            if key not in self.late:
                self.loads[key] -= 1
                continue
            self.late_loads[key] -= 1
            if not self.late_loads[key]:
                del self.late[key]

    @rule(keys=keys)
    def end_what_was_not_begun(self, keys: list[OffloadKey]) -> None:
        loading = self.loads + self.late_loads
        if any(times > loading[key] for key, times in Counter(keys).items()):
            with pytest.raises(TransferNotInFlightError):
                self.manager.complete_load(keys, CTX)
        storing = set(self.storing) | {key for key in self.late if not self.late_loads[key]}
        if not storing.issuperset(keys):
            with pytest.raises(TransferNotInFlightError):
                self.manager.complete_store(keys, CTX, success=len(keys) % 2 == 0)

    @rule(keys=keys)
    def touch(self, keys: list[OffloadKey]) -> None:
        self.manager.touch(keys, CTX)
        for key in reversed(keys):
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.late.update(self.storing)
        self.late.update((key, self.ready[key]) for key in self.loads if self.loads[key])
        self.late_loads += self.loads
        self.ready, self.storing, self.order = {}, {}, []
        self.loads.clear()
        self.offers.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "manager"):
            return
        for key in KEYS:
            expected = HIT if key in self.ready else HIT_PENDING if key in self.storing else MISS
            assert self.manager.lookup(key, CTX) is expected
        in_use = [*self.ready.values(), *self.storing.values(), *self.late.values()]
        assert len(in_use) == len(set(in_use)) <= self.capacity
        assert set(in_use) <= set(range(self.capacity))
        assert self.manager.num_free_blocks() == self.free() == self.capacity - len(in_use)
        loading = sum(times > 0 for times in self.loads.values())
        protected = loading + len(self.storing) + len(self.late)
        assert self.manager.num_protected_blocks() == protected
        for event in self.manager.take_events():
            assert event.keys
            assert event.medium == "CPU"
            assert len(set(event.keys)) == len(event.keys)
            assert self.advertised.issuperset(event.keys) is event.removed
            assert self.advertised.isdisjoint(event.keys) is not event.removed
            self.advertised ^= set(event.keys)
            self.events.append(event)
        assert self.advertised == set(self.ready)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            assert fold_events(self.events).get("CPU", set()) == hits(self.manager)


class _LRUOracle(_Oracle):
    policy = "lru"


class _ARCOracle(_Oracle):
    policy = "arc"


_SETTINGS = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestLRUAgainstOracle = _LRUOracle.TestCase
TestLRUAgainstOracle.settings = _SETTINGS
TestARCAgainstOracle = _ARCOracle.TestCase
TestARCAgainstOracle.settings = _SETTINGS


@pytest.mark.parametrize("oracle_type", [_LRUOracle, _ARCOracle])
@pytest.mark.parametrize("capacity", [2, 3, 5])
def test_long_runs_against_the_oracle(oracle_type: type[_Oracle], capacity: int) -> None:
    """The same rules for thousands of steps: what needs a long history shows here."""
    rng = random.Random(capacity)
    oracle = oracle_type()
    oracle.start(capacity, 1)

    def some(limit: int) -> list[OffloadKey]:
        return rng.choices(KEYS[:8], k=rng.randint(1, limit))

    for _ in range(3000):
        step = rng.randrange(100)
        if step < 30:
            oracle.store(some(3))
        elif step < 55:
            oracle.end_store(rng.randrange(99), rng.random() < 0.8)
        elif step < 70:
            oracle.load([rng.randrange(99) for _ in range(rng.randint(1, 2))])
        elif step < 87:
            oracle.end_load(rng.randrange(99))
        elif step < 97:
            oracle.touch(some(4))
        elif step < 99:
            oracle.end_what_was_not_begun(some(2))
        else:
            oracle.reset()
        oracle.agrees()
    oracle.teardown()
