"""A guarded tier over faulty stores, compared with the models of the tier and of the guard."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar, NoReturn

from typing_extensions import override

from kvview.testing.harness import Capability as C
from kvview.testing.search import Label, check_by_search, observable, operation
from kvview.testing.tier.faulty_store import FAULTS, FaultyStore
from kvview.testing.tier.guard_model import GET_FAULTS, LOOKUP_FAULTS, PUT_FAULTS, TierGuardModel
from kvview.testing.tier.model import TierModel
from kvview.testing.tier.moves import TierMoves, finished
from kvview.tier.checksum import CHECKSUMS

DEADLINE, RETRY_AFTER, TRIP_AFTER = 5.0, 10.0, 3
_MOST_STEPS = 16
_STEP = 0.01  # real seconds to wait for a store before the clock advances


class ManualClock:
    """A clock that advances on request."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.seconds


@check_by_search
class TierGuardPlayer(TierMoves):
    """Plays the calls of an engine on a guard, over a store that is sometimes faulty."""

    labels: ClassVar[Mapping[str, Label]] = {
        "TIER-12": Label(
            "A guarded tier satisfies its laws even if the store does not.", (C.TIER_GUARD,)
        )
    }

    first_moves = ("put", "finish", "break_store")

    @override
    def start(self) -> None:
        super().start()
        self.is_timed_by_hand = False
        """Whether only the current operation advances the clock."""
        self.next_step = 0.0
        if self.can(C.TIER_GUARD):
            self.guard_new_store()

    def guard_new_store(self, **options: Any) -> None:
        """Continue with a new guard over a new store without a fault."""
        self.clock, self.under, self.model = ManualClock(), FaultyStore(), TierModel()
        given = {
            "deadline": DEADLINE,
            "lookup_deadline": 1.0,
            "trip_after": TRIP_AFTER,
            "retry_after": RETRY_AFTER,
            "clock": self.clock,
            "checksum": self.rng.choice(CHECKSUMS),
            **options,
        }
        self.subject = self.harness.guard(self.under, self.harness.namespace, **given)
        self._names[id(self.subject)] = "guard"
        self._kept.append(self.subject)
        self.waits_for_wake_up = False  # no wake-up is called when a deadline passes

    @override
    def num_moves(self, longest: int) -> int:
        return max(longest // 4, 1)

    @override
    def end(self) -> None:
        self.under.heal()
        self.subject.close()
        super().end()

    @override
    def fail(self, what: str, got: str, expected: str, law: str | None = None) -> NoReturn:
        super().fail(what, got, expected, "TIER-12")

    @override
    def blame(self, law: str) -> None:
        super().blame("TIER-12")

    @override
    def passes(self) -> None:
        super().passes()
        if self.model.is_faulty and not self.is_timed_by_hand and time.monotonic() > self.next_step:
            self.clock.seconds += DEADLINE / 3
            self.next_step = time.monotonic() + _STEP

    @override
    def drain(self) -> dict[int, list[bool]]:
        return self.wait() if self.model.is_faulty else super().drain()

    @operation("TIER-12", weight=4)
    def break_store(self) -> None:
        """Start a fault of the store."""
        self.wait()
        self.under.fault = self.rng.choice(FAULTS)
        self.line(f"# the store has a fault: {self.under.fault}")
        self.model.become_faulty()

    @operation("TIER-12", weight=2)
    def heal_store(self) -> None:
        """End the fault of the store; the guard must use the store again, at once or later."""
        self.under.heal()
        self.wait()
        self.line("# the store works again")
        for number in range(8):
            self.clock.seconds += 20 * RETRY_AFTER
            self.model.become_faulty()
            flags = self.move("put", {b"again %d" % number: 4096})
            self.model.is_faulty = False
            if flags == [True]:
                return
        self.fail(
            "the guard uses a store again after its fault has ended", "every put fails", "a success"
        )

    @operation("TIER-12")
    def guard_for_another_namespace(self) -> None:
        """Load keys of the store through a guard of a namespace that differs in one field."""
        self.heal_store()
        name, value = self.another_field()
        keys = self.some({**self.model.held, **self.model.either})
        self.line(f"# a guard of another namespace over the same store: {name}={value!r}")
        other = self.harness.guard(self.under, replace(self.harness.namespace, **{name: value}))
        other.get(1, keys, [memoryview(bytearray(self.model.sizes[key])) for key in keys])
        flags = finished(other, self.patience)
        self.equal(flags, [False] * len(keys), f"another {name} shares no bytes")
        other.close()
        self.model.damage()  # the other guard deleted the pages

    @operation("TIER-12", weight=2)
    def count_faults(self) -> None:
        """Play jobs and lookups one after the other on a new guard, and compare its counts."""
        self.wait()
        before = self.subject, self.under, self.clock, self.model, self.keys, self.reported
        self.guard_new_store()
        self.model.become_faulty()
        self.is_timed_by_hand = True
        self._play_steps()
        self.subject.close()
        self.subject, self.under, self.clock, self.model, self.keys, self.reported = before

    def _play_steps(self) -> None:
        expected = TierGuardModel(TRIP_AFTER, RETRY_AFTER)
        self.fresh: list[bytes] = []
        for number in range(self.rng.randint(0, 2 * TRIP_AFTER)):
            self._play_step(expected, b"early %d" % number)
        self.clock.seconds += 40 * RETRY_AFTER
        self.under.fault = ""
        self.fresh = [b"held %d" % number for number in range(2 * _MOST_STEPS)]
        expected.job("put", "", len(self.fresh), self.clock.seconds)
        self.move("put", dict.fromkeys(self.fresh, 4096))
        for number in range(self.rng.randint(4, _MOST_STEPS)):
            self._play_step(expected, b"%d" % number)
        # Many strikes of one job pause the store.
        self.clock.seconds += 40 * RETRY_AFTER
        self.under.fault = self.rng.choice(("poll raises", "poll is None"))
        self.is_timed_by_hand = False
        self.move("put", {b"polled": 4096})
        before, self.under.fault = self.under.num_jobs, ""
        self.move("put", {b"left alone": 4096})
        reached = self.under.num_jobs - before
        self.equal(reached, 0, "the jobs that reach a store that is left alone")

    def _play_step(self, expected: TierGuardModel, name: bytes) -> None:
        self.clock.seconds += self.rng.choice((0, 0, 0.4, 0.9, 1.1, 2.1, 20)) * RETRY_AFTER
        calls = [("put", PUT_FAULTS), ("lookup", LOOKUP_FAULTS), ("get", GET_FAULTS)]
        method, faults = self.rng.choice(calls if self.fresh else calls[:2])
        fault = self.rng.choice((self.under.fault, "", *faults))
        self.under.fault = fault = fault if fault in faults else ""
        self.line(f"# a {method} at {self.clock.seconds} s, fault: {fault or 'none'}")
        reaches = expected.reaches(self.clock.seconds)
        if method == "lookup":
            self._look_once(b"never put " + name, not reaches)
            expected.lookup(faults[fault], self.clock.seconds)
        else:
            keys = [name + b" a", name + b" b"]
            if method == "get":  # because the guard deletes damaged keys
                keys = [self.fresh.pop(), self.fresh.pop()]
            before = self.under.num_jobs
            job = self.submit(method, dict.fromkeys(keys, 4096))
            if reaches:
                with self.patiently("the job reaches the store", "TIER-12") as wait:
                    while self.under.num_jobs == before:  # a thread of the guard deletes the keys
                        wait("nothing")
                if fault == "never reports":
                    self._pass_deadline()
            flags = self.wait()[job]
            is_good = expected.job(method, faults[fault], len(keys), self.clock.seconds)
            self.equal(flags, [is_good] * len(keys), f"the flags of a {method}, fault: {fault!r}")
            reached = self.under.num_jobs - before
            self.equal(reached, int(reaches), "the jobs that reach the store")
        self._compare_counts(expected, fault)

    def _pass_deadline(self) -> None:
        """Let the deadline of a job pass; before the deadline, the job must not count as late."""
        self.clock.seconds += 0.9 * DEADLINE
        time.sleep(0.002)
        self.equal(self.poll(), {}, "a job is not late before its deadline")
        self.clock.seconds += 0.2 * DEADLINE

    def _look_once(self, key: bytes, is_open: bool) -> None:
        with self.patiently("a lookup is answered in time", "TIER-12") as wait:
            flags = list(self.subject.lookup([key]))
            what = "a lookup in a store that is left alone is a miss at once"
            self.true(not is_open or flags == [False], what, flags, "[False]")
            if self.under.fault == "lookup never knows" and not is_open:
                time.sleep(0.002)
                self.clock.seconds += 0.9
                flags = list(self.subject.lookup([key]))
                self.equal(flags, [None], "a lookup has all of its deadline")
                self.clock.seconds += 0.2
            while None in (flags := list(self.subject.lookup([key]))):
                wait(flags)
        self.equal(flags, [False], "a lookup of a key that was not put")

    def _compare_counts(self, expected: TierGuardModel, fault: str) -> None:
        if not hasattr(self.subject, "stats"):
            return
        end = time.monotonic() + self.patience / 4
        while True:
            got = {name: number for name, number in asdict(self.subject.stats).items() if number}
            if got == dict(+expected.counts) or time.monotonic() > end:
                break
            time.sleep(0.001)  # a second report comes later
        self.equal(got, dict(+expected.counts), f"the counts of the guard, fault: {fault!r}")
        is_healthy = expected.reaches(self.clock.seconds)
        self.equal(self.subject.is_healthy, is_healthy, "a guard is healthy if jobs pass")

    @observable("TIER-12")
    def callers(self) -> None:
        """Check that no blocked call of the store ran on the caller's thread."""
        is_here = threading.get_ident() in self.under.callers
        what = "a store that blocks does not block the caller"
        self.true(not is_here, what, "called on the caller's thread", "on another one")
