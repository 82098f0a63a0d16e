"""The calls of an engine, which run on a store and on its model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from random import Random
from typing import Any

from typing_extensions import override

from kvview.testing.results.law_broken import short_repr
from kvview.testing.suites.capability import Capability as C
from kvview.testing.suites.conformance import ContractMachine, Promises, observable
from kvview.testing.tier.model import FLAT, TWIN, TierModel, bytes_of
from kvview.testing.tier.under_test.io_watch import watching_io
from kvview.testing.tier.under_test.opened_store import OpenedStore

_SIZES = (1, 2, 300, 511, 1500, 4096, 4097, 9001)
_LARGE_SIZES = (65_536, 400_000, 1_000_003)
_NUMBERS = (0, -7, 1 << 40)
_SENTINEL, _REUSED = b"\xa5", b"\x11"
_MOST_REPORTED = 60


def size_of(key: bytes) -> int:
    """Return the number of bytes of a key's page, which is the same in every put."""
    if key.startswith(FLAT):  # compression saves nothing in short pages
        return Random(key).randint(1, 24)
    sizes = Random(TWIN if key.startswith(TWIN) else key)
    return sizes.choice(_LARGE_SIZES if sizes.random() < 0.06 else _SIZES)


def sized(keys: Iterable[bytes], change: int = 0) -> dict[bytes, int]:
    """Return keys with the sizes of their pages, or with other sizes."""
    return {key: max(1, size_of(key) + change) for key in keys}


def finished(store: Any, seconds: float) -> list[bool]:
    """Drain a store that has one job, and return the flags of the job."""
    store.drain(seconds)
    return [bool(flag) for _, flags in store.poll() for flag in flags]


class TierCalls(ContractMachine):
    """Makes the calls of one engine on a store; the model checks every result."""

    suite: Any  # a TierConformance, whose module imports this one
    opened: OpenedStore
    model: TierModel

    def __init__(self) -> None:
        super().__init__()
        self.all_opened: list[OpenedStore] = []
        self.pages: dict[int, tuple[list[bytes], list[bytearray]]] = {}
        """Pages of the jobs in flight."""
        self.reported: list[bytearray] = []
        self.evicted: list[bytes] = []
        self.num_jobs = 0
        self.max_bytes: int | None = None
        """The budget that the kit has set; the model also knows a budget by default."""
        self.woken = threading.Event()
        self.waits_for_wake_up = False

    @property
    def store(self) -> Any:
        """The store under test."""
        return self.opened.store

    def open(self, max_bytes: int | None) -> None:
        """Start with a new store in a new place."""
        self.max_bytes = max_bytes
        self.pages.clear()
        self.evicted.clear()
        self.continue_with(self.call(self.suite, "open", max_bytes))
        names_evicted = any(hasattr(self.store, n) for n in ("on_evicted", "take_evicted"))
        budget = max_bytes or self.suite.budget
        self.model = TierModel(
            budget,
            evicts_by_use=self.can(C.TOUCH),
            names_evicted=names_evicted and budget is not None,
            finds=self.can(C.LOOKUPS),
        )

    def continue_with(self, opened: OpenedStore) -> None:
        """Continue with another store, and subscribe to its notices."""
        self.all_opened.append(opened)
        self.opened = opened
        if hasattr(self.store, "on_evicted"):
            self.store.on_evicted(self.evicted.extend)
        if self.waits_for_wake_up and hasattr(self.store, "on_wake_up"):
            self.store.on_wake_up(self.woken.set)

    @override
    def teardown(self) -> None:
        self.begin_operation("TIER-11")
        while self.all_opened:
            opened = self.all_opened.pop(0)
            opened.resume()
            with suppress(Exception):  # but not the error of a call that does not return
                self.call(opened.store, "close")
            opened.remove()

    # --- calls of the scheduler ---

    def ask(self, method: str, *args: Any) -> Any:
        """Call the store like a scheduler, and require that this thread does no I/O (TIER-5)."""
        me, callers = threading.get_ident(), self.opened.callers
        callers.discard(me)
        watch: AbstractContextManager[list[str]] = (
            watching_io(str(self.opened.folder)) if self.can(C.GONE) else nullcontext([])
        )
        start = time.monotonic()
        with watch as seen:
            found = self.call(self.store, method, *args)
        took = time.monotonic() - start
        what = f"{method} does no I/O on the caller's thread"
        self.true(not seen and me not in callers, what, seen[:3], "another thread", "TIER-5")
        what = f"{method} does not wait"
        self.true(took < self.suite.patience / 2, what, f"{took:.1f} s", "it returns", "TIER-5")
        return found

    def next_number(self) -> int:
        """Return the number of the next job, any int that no job in flight has."""
        self.num_jobs += 1
        special = _NUMBERS[self.num_jobs // 5 % len(_NUMBERS)]
        is_special = self.num_jobs % 5 == 0 and special not in self.model.jobs
        return special if is_special else self.num_jobs

    def submit(self, method: str, sizes: Mapping[bytes, int]) -> int:
        """Start a job with these keys, each with a page of its size."""
        job, is_get, keys = self.next_number(), method == "get", [*sizes]
        pages = [
            bytearray(_SENTINEL * size if is_get else bytes_of(key, size))
            for key, size in sizes.items()
        ]
        self.ask(method, job, keys, [memoryview(page) for page in pages])
        self.model.start(job, dict(sizes), is_get=is_get)
        self.pages[job] = keys, pages
        return job

    def poll(self) -> dict[int, list[bool]]:
        """Take the reports, and let the engine reuse the pages of the reported jobs."""
        reports = {}
        self.model.now += 1
        for job, flags in list(self.ask("poll")):
            known = self.model.jobs.get(job)
            self.await_evictions(partial(self.model.lacks, job, list(flags)))
            self._count(job, flags)
            self.judge(self.model.report(job, list(flags)), flags)
            assert known is not None, "the model knows the outcome"
            keys, pages = self.pages.pop(job)
            for key, page, flag in zip(keys, pages, flags, strict=True):
                if flag or not known.is_get:
                    law = "TIER-1" if known.is_get else "TIER-3"
                    what = f"the page of {short_repr(key)} has the bytes that were put"
                    is_exact = page == bytes_of(key, len(page))
                    self.true(is_exact, what, "other bytes", "the same", law)
                page[:] = _REUSED * len(page)
            self.reported = [*self.reported, *pages][-_MOST_REPORTED:]
            reports[job] = [bool(flag) for flag in flags]
        return reports

    def _count(self, number: int, flags: Sequence[bool]) -> None:
        """Count the pages that a reported job has stored."""
        job, kind = self.model.jobs.get(number), type(self.suite)
        if job is not None and not job.is_get:
            kind.num_stored[self.max_bytes is not None] += sum(map(bool, flags))
            kind.first_error = kind.first_error or self.opened.first_error

    @override
    def judge(self, promises: Promises, got: object) -> None:
        """Break the law of the first promise that was not kept, and name the first exception."""
        error = self.opened.first_error
        super().judge(((law, what + error, kept) for law, what, kept in promises), got)

    @observable("TIER-3")
    def pages_are_left_alone(self) -> None:
        """Compare the pages of reported jobs, which the engine has reused."""
        is_left = all(page == _REUSED * len(page) for page in self.reported)
        what = "a page is left alone after its report"
        self.true(is_left, what, "other bytes", "the engine's", "TIER-3")

    def learn_evictions(self) -> None:
        """Take the evicted keys from the store, and check them."""
        evicted = [self.evicted.pop(0) for _ in range(len(self.evicted))]
        if hasattr(self.store, "take_evicted"):
            evicted += self.store.take_evicted()
        if self.model.max_bytes is not None:
            self.judge(self.model.evicted(evicted), evicted)

    def await_evictions(self, is_needed: Callable[[], bool]) -> None:
        """Take the evicted keys, including those that the store reports a moment later.

        Args:
            is_needed: Whether a result is wrong unless another key was evicted.
        """
        self.learn_evictions()
        end = time.monotonic() + self.suite.patience / 4
        while self.model.names_evicted and is_needed() and time.monotonic() < end:
            time.sleep(0.0005)
            self.learn_evictions()

    def occupies_at_most(self, most: int, what: str, reason: str) -> None:
        """Break the law if the files of the store are larger than a limit.

        Args:
            most: The limit in bytes.
            what: The promise.
            reason: The parts of the limit, for the message.
        """
        occupied = self.opened.occupied_bytes()
        if occupied > most:
            self.fail(what, f"{occupied:,} bytes", f"at most {most:,} bytes ({reason})")

    @contextmanager
    def patiently(self, what: str, law: str) -> Iterator[Any]:
        """Yield a function that waits a moment, and that fails if all waits add up to too long."""
        end = time.monotonic() + self.suite.patience
        is_woken = self.waits_for_wake_up and hasattr(self.store, "on_wake_up")

        def wait(got: object) -> None:
            if is_woken and not self.model.is_closed and not self.woken.wait(self.suite.patience):
                self.fail(f"the store wakes up the caller: {what}", "no call", "a call", "TIER-5")
            self.woken.clear()
            is_late = time.monotonic() >= end
            self.true(not is_late, what + self.opened.first_error, got, "it comes", law)
            time.sleep(0.0005)

        yield wait

    def wait(self) -> dict[int, list[bool]]:
        """Poll until every job is reported."""
        reports: dict[int, list[bool]] = {}
        with self.patiently("every job is reported", "TIER-2") as wait:
            while True:
                reports |= self.poll()
                if not self.model.jobs:
                    return reports
                wait(f"{len(self.model.jobs)} jobs are not reported")

    def drain(self) -> dict[int, list[bool]]:
        """Drain, and poll once."""
        is_drained = self.call(self.store, "drain", self.suite.patience)
        what = f"drain waits until all jobs have ended{self.opened.first_error}"
        self.equal(is_drained, True, what, "TIER-11")
        reports = self.poll()
        left = sorted(self.model.jobs)
        self.equal(left, [], "the next poll reports all that was drained", "TIER-11")
        return reports

    def move(self, method: str, sizes: Mapping[bytes, int]) -> list[bool]:
        """Run one job to its end; returns its flags."""
        job = self.submit(method, sizes)
        return self.drain()[job]

    def results(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Look up keys until every result is known."""
        with self.patiently("every lookup is answered", "TIER-5") as wait:
            while True:
                flags = list(self.ask("lookup", list(keys)))
                self.equal(len(flags), len(keys), "lookup gives one flag for each key", "TIER-7")
                if None not in flags:
                    return flags
                wait(flags)

    def look(self, keys: Sequence[bytes]) -> list[bool]:
        """Look up keys until every result is known, and check the results."""
        flags = self.results(keys)
        for key, flag in zip(keys, flags, strict=True):
            if flag:
                self.learn_evictions()
            else:
                self.await_evictions(partial(self.model.must_be_found, key))
            self.judge(self.model.answer(key, bool(flag)), flag)
        return [bool(flag) for flag in flags]
