"""The oracle of the tier checks: what was put, and what must come of every job."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvview.errors import TierJobError
from kvview.testing.checks import checks_driving
from kvview.testing.harness import Capability, Factory
from kvview.testing.recorder import Recorder
from kvview.testing.tier.store_harness import tier_factory

PAGE_BYTES = 4096
_SENTINEL = 0xA5


def bytes_of(key: bytes, num_bytes: int = PAGE_BYTES) -> bytes:
    """What a key names in these checks."""
    return random.Random(key).randbytes(num_bytes)


@dataclass
class TierJob:
    """A job in flight, and what its pages were.

    Args:
        keys: Of the job.
        pages: As they were given.
        is_get: Whether it is a get.
        before: Bytes of each page when it was given.
        crossed: Keys that a job of the other direction was at in the meantime.
    """

    keys: list[bytes]
    pages: list[memoryview]
    is_get: bool
    before: list[bytes]
    crossed: set[bytes] = field(default_factory=set)


class TierDriver(Recorder):
    """Calls a store, and judges every report.

    Args:
        factory: Makes the harness, or is a class of stores.
        law: The law that is checked.
    """

    is_timed = True

    def __init__(self, factory: Factory, law: str) -> None:
        super().__init__(tier_factory(factory), law, "store")
        self._factory = factory
        self.patience: float = getattr(self.harness, "patience", 10.0)
        """Seconds after which a call, a job or an answer is taken for one that never comes."""
        self.stored: dict[bytes, int] = {}
        """Keys that can be loaded, and how many bytes they have."""
        self.failed: set[bytes] = set()
        """Keys that are a miss until they are stored again (TIER-4)."""
        self.unsure: set[bytes] = set()
        """Keys of a put and a get that crossed: what came first is the store's affair."""
        self.damaged: set[bytes] = set()
        """Keys whose bytes were spoilt: until that is noticed a put may keep what is there."""
        self._in_flight: dict[int, TierJob] = {}
        self._next_job = 0
        self._harnesses = [self.harness]
        self._reported: list[tuple[memoryview, bytes]] = []

    @property
    def store(self) -> Any:
        """The store under test."""
        return self.subject

    @property
    def num_in_flight(self) -> int:
        """Jobs that were not reported."""
        return len(self._in_flight)

    def damage(self, how: str) -> int:
        """Spoil what is on the medium; returns how many entries."""
        number: int = self.call(self.harness, "damage", how)
        self.damaged |= self.stored.keys()
        self.unsure |= self.damaged
        return number

    def forget_failures(self) -> None:
        """It is another process: what had failed may be a hit again, if it is exact."""
        self.unsure |= self.failed
        self.failed.clear()

    def can(self, capability: Capability) -> bool:
        """Whether the harness declares a capability."""
        return capability in self.harness.capabilities

    def go_on_with(self, harness: Any) -> None:
        """From now on it is another harness's store."""
        self._harnesses.append(harness)
        self.harness, self.subject = harness, harness.store
        self._names |= {id(harness): "h", id(self.subject): "store"}

    # --- jobs ---

    def put(self, *keys: bytes, num_bytes: int = PAGE_BYTES, job: int | None = None) -> int:
        """Start to store what keys name."""
        pages = [memoryview(bytearray(bytes_of(key, num_bytes))) for key in keys]
        return self._start("put", keys, pages, job)

    def put_sizes(self, sizes: Mapping[bytes, int]) -> int:
        """Start to store keys whose pages have different sizes, in one job."""
        pages = [memoryview(bytearray(bytes_of(key, size))) for key, size in sizes.items()]
        return self._start("put", [*sizes], pages, None)

    def get(self, *keys: bytes, num_bytes: int = PAGE_BYTES, job: int | None = None) -> int:
        """Start to load keys into pages of their own."""
        pages = [memoryview(bytearray([_SENTINEL]) * num_bytes) for _ in keys]
        return self._start("get", keys, pages, job)

    def _start(
        self, method: str, keys: Sequence[bytes], pages: list[memoryview], job: int | None
    ) -> int:
        if job is None:
            self._next_job += 1
            job = self._next_job
        new = TierJob([*keys], pages, method == "get", [*map(bytes, pages)])
        shown = f"store.{method}({job}, {_shown(keys)}, pages)"
        self._at_once(shown, lambda: getattr(self.store, method)(job, list(keys), pages))
        for other in self._in_flight.values():
            if other.is_get != new.is_get:
                both = {*other.keys} & {*keys}
                other.crossed |= both
                new.crossed |= both
        self._in_flight[job] = new
        return job

    def _at_once(self, shown: str, call: Callable[[], Any]) -> Any:
        """A call on the scheduler's thread: what may block is not called there (TIER-5)."""
        me, callers = threading.get_ident(), getattr(self.harness, "callers", set[int]())
        callers.discard(me)
        found = self._run(shown, call)
        what = "a blocking call (has, read_into, write) is made on another thread"
        self.true(me not in callers, what, "made on the caller's", "another", "TIER-5")
        return found

    def finish(self) -> dict[int, list[bool]]:
        """Wait for every job; each must be reported now, and once (TIER-2, TIER-11)."""
        drained = self._run(
            f"store.drain({self.patience})", lambda: self.store.drain(self.patience)
        )
        self.equal(drained, True, "drain waits until all jobs have ended", "TIER-11")
        reports = self.poll()
        self.equal(sorted(self._in_flight), [], "drained jobs are reported at once", "TIER-11")
        return reports

    def wait(self) -> dict[int, list[bool]]:
        """Poll until every job was reported."""
        reports: dict[int, list[bool]] = {}
        end = time.monotonic() + self.patience
        while self._in_flight:
            with self.unrecorded():
                reports |= self.poll()
            what = f"jobs {sorted(self._in_flight)} are reported"
            self.true(time.monotonic() < end, what, "not one of them", "all", "TIER-2")
            time.sleep(0.001)
        return reports

    def poll(self) -> dict[int, list[bool]]:
        """What is reported now, judged."""
        reports: dict[int, list[bool]] = {}
        found = list(self._at_once("store.poll()", lambda: self.store.poll()))
        for job, flags in found:
            known = self._in_flight.pop(job, None)
            what = f"job {job} is in flight when it is reported, and reported once"
            self.true(known is not None, what, found, "jobs in flight", "TIER-2")
            assert known is not None, "said so"
            flags = list(flags)
            what = f"job {job} of {len(known.keys)} keys is reported with a flag a key"
            self.equal(len(flags), len(known.keys), what, "TIER-2")
            reports[job] = [bool(flag) for flag in flags]
            self._judge(known, reports[job])
        return reports

    def _judge(self, job: TierJob, flags: list[bool]) -> None:
        for key, page, before, flag in zip(job.keys, job.pages, job.before, flags, strict=True):
            now = bytes(page)
            if not job.is_get:
                self.true(now == before, "the page of a put is not written", "other bytes", "same",
                          "TIER-3")  # fmt: skip
                if flag:
                    self.stored[key] = len(page)
                    self.failed.discard(key)
                    self.unsure.discard(key)
                self.unsure |= {key} & (job.crossed | self.damaged)
                continue
            is_unsure = key in job.crossed or key in self.unsure
            if flag:
                what = f"key {key!r} can be loaded"
                got = "a failed key: it was not stored"
                law = "TIER-4" if key in self.failed else "TIER-7"
                self.true(key in self.stored or is_unsure, what, "a success", got, law)
                self.stored[key] = len(page)
                if now != (expected := bytes_of(key, len(page))):
                    what = f"key {key!r} is loaded as it was put"
                    got = _first_difference(now, expected)
                    self.fail(what, got, "the same bytes, or a failed key", "TIER-1")
            elif key in job.crossed:
                self.unsure.add(key)
            else:
                self.damaged.discard(key)
                self.stored.pop(key, None)
                self.unsure.discard(key)
                self.failed.add(key)
            self._reported.append((page, now))

    def check_untouched(self) -> None:
        """No page has changed since its job was reported (TIER-3)."""
        for page, then in self._reported:
            what = "a page is left alone after its job was reported"
            self.true(bytes(page) == then, what, "other bytes", "same", "TIER-3")

    def overwrite_reported(self) -> None:
        """The engine uses pages of gets again, for something else."""
        self._reported = [(page, b"\x11" * len(page)) for page, _ in self._reported]
        for page, mine in self._reported:
            page[:] = mine

    # --- lookups ---

    def lookup(self, *keys: bytes) -> list[bool]:
        """Ask until everything is known (TIER-5), and judge the answers (TIER-4, TIER-7)."""
        end = time.monotonic() + self.patience
        flags: list[bool | None] = [None]
        while None in flags:
            shown = f"store.lookup({_shown(keys)})"
            flags = list(self._at_once(shown, lambda: self.store.lookup(list(keys))))
            self.equal(len(flags), len(keys), "lookup gives one flag a key")
            what = "lookup knows when it is asked again"
            self.true(time.monotonic() < end, what, flags, "True or False", "TIER-5")
            if None in flags:
                time.sleep(0.001)
        moving = {key for job in self._in_flight.values() for key in job.keys} | self.unsure
        for key, flag in zip(keys, flags, strict=True):
            if flag and key not in moving:
                what, law = f"key {key!r} is a miss", "TIER-4" if key in self.failed else "TIER-7"
                self.true(key in self.stored, what, "True", "False", law)
        return [bool(flag) for flag in flags]

    def check_held(self, *keys: bytes) -> None:
        """Keys that were stored are found and loaded."""
        self.equal(self.lookup(*keys), [True] * len(keys), "what was stored is found", "TIER-7")
        sizes = {self.stored[key] for key in keys}
        for size in sizes:
            chosen = [key for key in keys if self.stored[key] == size]
            job = self.get(*chosen, num_bytes=size)
            flags = self.finish()[job]
            self.equal(flags, [True] * len(chosen), "what is found can be loaded", "TIER-7")

    def refuse(self, method: str, job: int, keys: list[bytes], pages: list[Any]) -> None:
        """A job that must raise, and start nothing."""
        code = f"store.{method}({job}, {keys}, {pages})"
        self.refuses(TierJobError, code, lambda: getattr(self.store, method)(job, keys, pages))

    def end(self) -> None:
        """Close and clean up, also after a failure, which nothing here may hide."""
        for harness in self._harnesses:
            with suppress(Exception):
                harness.end()


def _shown(keys: Sequence[bytes]) -> str:
    text = ", ".join(map(repr, keys[:6]))
    return f"[{text}]" if len(keys) <= 6 else f"[{text}, and {len(keys) - 6} more]"


def _first_difference(got: bytes, expected: bytes) -> str:
    wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    return f"{len(wrong)} of {len(got)} bytes are wrong, the first is number {wrong[0]}"


tier_check = checks_driving(TierDriver, contract="tier")
"""Register a check that drives the harness through :class:`TierDriver`."""
