"""A guard over a faulty store, played on the guard and on the models (TIER-12).

Calls of the store run on a thread of the guard, so every result is awaited, and nothing that is
drawn depends on results. The clock of the guard advances only when a rule or a wait moves it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override

from kvview.testing.suites.conformance import Promises
from kvview.testing.tier.model import TierModel, bytes_of
from kvview.tier import GuardedTier, Namespace
from kvview.tier.guard.checksum import CHECKSUMS
from tests.tier.faulty_store import FAULTS, FaultyStore
from tests.tier.guard_model import GET_FAULTS, LOOKUP_FAULTS, PUT_FAULTS, TierGuardModel

DEADLINE, LOOKUP_DEADLINE, RETRY_AFTER, TRIP_AFTER = 5.0, 1.0, 10.0, 3
PATIENCE = 10.0  # real seconds
HERE = Namespace("m", weights="1")
SIZES = {b"key %d" % n: size for n, size in enumerate((1, 300, 511, 4096, 4097, 9001, 65_536))}
EMPTY, REUSED = b"\xa5", b"\x11"

some_keys = st.lists(st.sampled_from(sorted(SIZES)), max_size=5, unique=True)


class ManualClock:
    """A clock that advances on request."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def await_that(
    what: str, is_so: Callable[[], object], step: Callable[[], None] | None = None
) -> None:
    """Repeat a step until a condition is true."""
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end, f"TIER-12: {what}"
        if step is not None:
            step()
        time.sleep(0.0005)


class GuardedStore:
    """A guard over a new store without a fault, and the calls of an engine."""

    def __init__(self, **options: Any) -> None:
        self.clock, self.under, self.model = ManualClock(), FaultyStore(), TierModel()
        given: dict[str, Any] = {
            "deadline": DEADLINE,
            "lookup_deadline": LOOKUP_DEADLINE,
            "trip_after": TRIP_AFTER,
            "retry_after": RETRY_AFTER,
            "clock": self.clock,
            **options,
        }
        self.guard = GuardedTier(self.under, HERE, **given)
        self.num_jobs = 0
        self.pages: dict[int, list[bytearray]] = {}
        self.reported: list[bytearray] = []
        self.next_step = 0.0

    def judge(self, promises: Promises) -> None:
        for law, promise, is_kept in promises:
            assert is_kept, f"TIER-12: {promise} ({law})"

    def submit(self, method: str, sizes: dict[bytes, int]) -> int:
        self.num_jobs += 1
        pages = [
            bytearray(bytes_of(key, size) if method == "put" else EMPTY * size)
            for key, size in sizes.items()
        ]
        getattr(self.guard, method)(self.num_jobs, [*sizes], [memoryview(page) for page in pages])
        self.model.start(self.num_jobs, sizes, is_get=method == "get")
        self.pages[self.num_jobs] = pages
        return self.num_jobs

    def poll(self) -> dict[int, list[bool]]:
        """Take the reports, and let the engine reuse the pages of the reported jobs."""
        reports = dict(self.guard.poll())
        for job, flags in reports.items():
            known = self.model.jobs.get(job)
            self.judge(self.model.report(job, flags))
            assert known is not None, "the model knows the job"
            for key, page, flag in zip(known.sizes, self.pages[job], flags, strict=True):
                is_exact = page == bytes_of(key, len(page))
                assert is_exact or (known.is_get and not flag), f"TIER-12: wrong bytes of {key!r}"
                page[:] = REUSED * len(page)
            self.reported += self.pages.pop(job)
        return reports

    def wait(self) -> dict[int, list[bool]]:
        """Poll until every job is reported."""
        reports: dict[int, list[bool]] = {}

        def poll() -> None:
            reports.update(self.poll())
            self.pass_time()

        poll()
        await_that("every job is reported", lambda: not self.model.jobs, poll)
        return reports

    def pass_time(self) -> None:
        """Let the deadlines of a faulty store come, but not before the store could work."""
        if self.model.is_faulty and time.monotonic() > self.next_step:
            self.clock.seconds += DEADLINE / 3
            self.next_step = time.monotonic() + 0.01

    def look(self, keys: Sequence[bytes]) -> list[bool]:
        """Look up keys until every result is known."""
        flags: list[bool | None] = [None]

        def ask() -> None:
            flags[:] = self.guard.lookup(keys)
            if None in flags:
                self.pass_time()

        ask()
        await_that("every lookup is answered", lambda: None not in flags, ask)
        for key, flag in zip(keys, flags, strict=True):
            self.judge(self.model.answer(key, bool(flag)))
        return [bool(flag) for flag in flags]

    def close(self) -> None:
        self.under.heal()
        self.guard.close()


class FaultsMachine(RuleBasedStateMachine):
    """Plays the calls of an engine, while the store has one fault after the other."""

    @initialize(checksum=st.sampled_from(CHECKSUMS))
    def start(self, checksum: str) -> None:
        self.tier = GuardedStore(checksum=checksum)

    @override
    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()

    @rule(keys=some_keys)
    def put(self, keys: list[bytes]) -> None:
        self.tier.submit("put", {key: SIZES[key] for key in keys})

    @rule(keys=some_keys, change=st.sampled_from((0, 0, 0, 7)))
    def get(self, keys: list[bytes], change: int) -> None:
        self.tier.submit("get", {key: SIZES[key] + change for key in keys})

    @rule(keys=some_keys)
    def delete(self, keys: list[bytes]) -> None:
        self.tier.guard.delete(keys)
        self.tier.model.delete(keys)

    @rule()
    def load_all(self) -> None:
        self.tier.wait()
        self.tier.submit("get", self.tier.model.held | self.tier.model.either)
        self.tier.wait()

    @rule()
    def poll(self) -> None:
        self.tier.poll()

    @rule(fault=st.sampled_from(FAULTS))
    def break_store(self, fault: str) -> None:
        self.tier.wait()
        self.tier.under.fault = fault
        self.tier.model.become_faulty()

    @precondition(lambda self: self.tier.model.is_faulty)
    @rule()
    def heal_store(self) -> None:
        """End the fault; the guard must use the store again, at once or after a pause."""
        self.tier.under.heal()
        self.tier.wait()
        for _ in range(8):
            self.tier.clock.seconds += 20 * RETRY_AFTER
            self.tier.model.become_faulty()
            job = self.tier.submit("put", {b"again": 4096})
            flags = self.tier.wait()[job]
            self.tier.model.is_faulty = False
            if flags == [True]:
                return
        raise AssertionError("TIER-12: the guard uses a store again after its fault has ended")

    @invariant()
    def lookups_are_true(self) -> None:
        self.tier.look([*SIZES, b"never put"])

    @invariant()
    def pages_are_left_alone(self) -> None:
        is_left = all(page == REUSED * len(page) for page in self.tier.reported)
        assert is_left, "TIER-12: a page is left alone after its report"

    @invariant()
    def the_caller_is_not_blocked(self) -> None:
        is_here = threading.get_ident() in self.tier.under.callers
        assert not is_here, "TIER-12: a call of the store ran on the caller's thread"


class CountsMachine(RuleBasedStateMachine):
    """Plays jobs and lookups one after the other, and compares the counts and the pauses."""

    @initialize()
    def start(self) -> None:
        self.tier = GuardedStore()
        self.expected = TierGuardModel(TRIP_AFTER, RETRY_AFTER)
        self.fresh = {b"held %d" % number: 4096 for number in range(40)}
        self.tier.submit("put", dict(self.fresh))
        self.tier.wait()
        self.expected.job("put", "", len(self.fresh), 0.0)
        self.number = 0

    @override
    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()

    @rule(factor=st.sampled_from((0.4, 0.9, 1.1, 2.1, 20)))
    def pass_time(self, factor: float) -> None:
        self.tier.clock.seconds += factor * RETRY_AFTER

    @rule(fault=st.sampled_from(sorted(PUT_FAULTS)))
    def put(self, fault: str) -> None:
        self.number += 1
        keys = [b"%d a" % self.number, b"%d b" % self.number]
        self.run_job("put", keys, fault, PUT_FAULTS[fault])

    @precondition(lambda self: len(self.fresh) > 1)
    @rule(fault=st.sampled_from(sorted(GET_FAULTS)))
    def get(self, fault: str) -> None:
        keys = [self.fresh.popitem()[0] for _ in "ab"]  # because the guard deletes damaged keys
        self.run_job("get", keys, fault, GET_FAULTS[fault])

    def run_job(self, method: str, keys: list[bytes], fault: str, count: str) -> None:
        tier = self.tier
        tier.under.fault, before = fault, tier.under.num_jobs
        tier.model.become_faulty()
        reaches = self.expected.reaches(tier.clock.seconds)
        job = tier.submit(method, dict.fromkeys(keys, 4096))
        if reaches:
            await_that("the job reaches the store", lambda: tier.under.num_jobs > before)
            if fault == "never reports":
                tier.clock.seconds += 0.9 * DEADLINE
                time.sleep(0.002)
                assert not tier.poll(), "TIER-12: a job is not late before its deadline"
                tier.clock.seconds += 0.2 * DEADLINE
        tier.next_step = float("inf")  # only this rule moves the clock
        is_good = self.expected.job(method, count, len(keys), tier.clock.seconds)
        flags = tier.wait()[job]
        assert flags == [is_good] * 2, f"TIER-12: the flags of a {method}, {fault}: {flags}"
        reached = tier.under.num_jobs - before
        assert reached == reaches, f"TIER-12: {reached} jobs reached the store, not {reaches}"

    @rule(fault=st.sampled_from(sorted(LOOKUP_FAULTS)))
    def lookup(self, fault: str) -> None:
        tier, reaches = self.tier, self.expected.reaches(self.tier.clock.seconds)
        self.number += 1
        tier.under.fault, keys = fault, [b"never put %d" % self.number]
        flags = tier.guard.lookup(keys)
        assert reaches or flags == [False], "TIER-12: a paused store is a miss at once"
        if fault == "lookup never knows" and reaches:
            time.sleep(0.002)
            tier.clock.seconds += 0.9 * LOOKUP_DEADLINE
            assert tier.guard.lookup(keys) == [None], "TIER-12: a lookup has all of its deadline"
            tier.clock.seconds += 0.2 * LOOKUP_DEADLINE
        self.expected.lookup(LOOKUP_FAULTS[fault], tier.clock.seconds)
        # A second lookup of the key, before the first one has ended, may reach the store and count.
        self.counts_are_true()
        await_that("a lookup is answered", lambda: None not in tier.guard.lookup(keys))
        assert tier.guard.lookup(keys) == [False], "TIER-12: the key was never put"

    @precondition(lambda self: self.expected.reaches(self.tier.clock.seconds))
    @rule(fault=st.sampled_from(("poll raises", "poll is None")))
    def strike_out(self, fault: str) -> None:
        """Let one job have many strikes, which pause the store, and continue with a new guard."""
        self.tier.under.fault = fault
        self.tier.model.become_faulty()
        self.tier.submit("put", {b"polled": 4096})
        await_that("many strikes pause the store", lambda: not self.tier.guard.is_healthy)
        self.tier.next_step = 0.0
        self.tier.wait()
        before, self.tier.under.fault = self.tier.under.num_jobs, ""
        self.tier.submit("put", {b"left alone": 4096})
        self.tier.wait()
        reached = self.tier.under.num_jobs - before
        assert not reached, f"TIER-12: {reached} jobs reached a store that is left alone"
        self.tier.close()
        self.start()

    @invariant()
    def counts_are_true(self) -> None:
        def counts() -> dict[str, int]:
            return {name: n for name, n in asdict(self.tier.guard.stats).items() if n}

        expected = dict(+self.expected.counts)
        end = time.monotonic() + PATIENCE / 4  # because a second report comes later
        while counts() != expected and time.monotonic() < end:
            time.sleep(0.001)
        assert counts() == expected, f"TIER-12: the counts are {counts()}, not {expected}"
        is_healthy = self.expected.reaches(self.tier.clock.seconds)
        assert self.tier.guard.is_healthy is is_healthy, f"TIER-12: is_healthy is not {is_healthy}"
