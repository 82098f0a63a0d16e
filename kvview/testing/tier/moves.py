"""The calls of an engine, which run on a store and on its model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields
from functools import partial
from random import Random
from typing import Any, ClassVar

from typing_extensions import override

from kvview.errors import TierJobError
from kvview.testing.harness import Capability as C
from kvview.testing.harness import Factory
from kvview.testing.search import Plan, Player, observable, operation
from kvview.testing.tier.io_watch import watching_io
from kvview.testing.tier.model import TierModel, bytes_of
from kvview.testing.tier.store_harness import tier_factory
from kvview.tier import Namespace

_SIZES = (1, 2, 300, 511, 1500, 4096, 4097, 9001)
_LARGE_SIZES = (65_536, 400_000, 1_000_003)
_SPECIAL = (b"..", b"/", b"a/a", b"\0", b"a\0", b"\n", b" ", b"%61", b"\xff", b"*", b"-", b"a.tmp")
_JOBS = (0, -7, 1 << 40)
_SENTINEL, _REUSED = b"\xa5", b"\x11"
_MOST_KNOWN, _MOST_REPORTED = 60, 60


def size_of(key: bytes) -> int:
    """Return the number of bytes of a key's page, which is the same in every put."""
    sizes = Random(key)
    return sizes.choice(_LARGE_SIZES if sizes.random() < 0.06 else _SIZES)


def finished(store: Any, seconds: float) -> list[bool]:
    """Drain a store that has one job, and return the flags of the job."""
    store.drain(seconds)
    return [bool(flag) for _, flags in store.poll() for flag in flags]


class TierMoves(Player):
    """Plays the calls of one engine on a store; the model checks every result."""

    contract = "tier"
    subject_name = "store"
    is_timed = True
    max_shrink_runs = 40  # fewer moves, because a run may wait for the store
    first_moves: ClassVar[tuple[str, ...]] = ("put", "finish")

    def __init__(self, factory: Factory, plan: Plan, *, is_recording: bool = False) -> None:
        self.keys: dict[bytes, int] = {}
        """Drawn keys, with the sizes of their pages."""
        self.pages: dict[int, tuple[list[bytes], list[bytearray]]] = {}
        """Pages of the jobs in flight."""
        self.reported: list[bytearray] = []
        self.harnesses: list[Any] = []
        self.evicted: list[bytes] = []
        self.next_job = 0
        self.woken = threading.Event()
        super().__init__(tier_factory(factory), plan, is_recording=is_recording)

    @override
    def start(self) -> None:
        self.harnesses.append(self.harness)
        self.patience: float = getattr(self.harness, "patience", 10.0)
        """Seconds to wait for a result before it counts as missing."""
        self.model = TierModel()
        self.wire()

    def continue_with(self, harness: Any) -> None:
        """Continue with the store of another harness."""
        self.harnesses.append(harness)
        self.harness, self.subject = harness, harness.store
        self._names |= {id(harness): "h", id(self.subject): "store"}
        self.wire()

    def wire(self) -> None:
        """Subscribe to the notices of the store, and sometimes wait for its wake-ups."""
        if hasattr(self.subject, "on_evicted"):
            self.subject.on_evicted(self.evicted.extend)
        self.waits_for_wake_up = hasattr(self.subject, "on_wake_up") and self.rng.random() < 0.5
        if self.waits_for_wake_up:
            self.subject.on_wake_up(self.woken.set)

    @override
    def num_moves(self, longest: int) -> int:
        return max(longest // 2, 1)

    @override
    def end(self) -> None:
        for harness in self.harnesses:
            with suppress(Exception):
                harness.end()

    # --- draws ---

    def new_key(self) -> bytes:
        """Draw a key of any length, a special key, or a key that is similar to an earlier key."""
        key, known = self.rng.randbytes(self.rng.randint(1, 100)), [*self.keys]
        kind = self.rng.random()
        if kind < 0.1:
            key = self.rng.choice(_SPECIAL)
        elif kind < 0.4:
            key = b"key %d" % self.rng.randrange(1000)
        elif known and kind < 0.6:
            other = self.rng.choice(known)
            alike = (other[:-1], other + b"\0", other.swapcase(), other.hex().encode(), other[::-1])
            key = self.rng.choice(alike)[:100] or b"k"
        self.keys[key] = size_of(key)
        return key

    def some(self, among: Iterable[bytes], most: int | None = None) -> list[bytes]:
        """Draw some keys, sometimes none."""
        keys = [*among]
        return self.rng.sample(keys, self.rng.randint(0, min(most or self.most, len(keys))))

    def sized(self, keys: Iterable[bytes], change: int = 0) -> dict[bytes, int]:
        """Return keys with the sizes of their pages, or with other sizes."""
        return {key: max(1, self.keys[key] + change) for key in keys if key in self.keys}

    def draw_job(self) -> int:
        """Draw the number of a job: any int that no job in flight has."""
        self.next_job += 1
        free = [job for job in (*_JOBS, self.next_job - 1) if job not in self.model.jobs]
        return self.rng.choice(free) if free and self.rng.random() < 0.2 else self.next_job

    def another_field(self) -> tuple[str, Any]:
        """Draw a field of the namespace, with a value of another namespace."""
        name = self.rng.choice(fields(Namespace)).name
        value = getattr(self.harness.namespace, name)
        return name, value + (1 if isinstance(value, int) else "x")

    # --- calls of the scheduler ---

    def ask(self, method: str, *args: Any, shown: str = "") -> Any:
        """Call the store like a scheduler, and require that this thread does no I/O (TIER-5)."""
        me, callers = threading.get_ident(), getattr(self.harness, "callers", set[int]())
        callers.discard(me)
        watch: AbstractContextManager[list[str]] = (
            watching_io(str(self.harness.folder)) if self.can(C.GONE) else nullcontext([])
        )
        start = time.monotonic()
        with watch as seen:
            code = f"store.{method}({shown or ', '.join(map(repr, args))})"
            found = self._run(code, lambda: getattr(self.subject, method)(*args))
        took = time.monotonic() - start
        what = f"{method} does no I/O on the caller's thread"
        self.true(not seen and me not in callers, what, seen[:3], "another thread", "TIER-5")
        what = f"{method} does not wait"
        self.true(took < self.patience / 2, what, f"{took:.1f} s", "it returns", "TIER-5")
        return found

    def submit(self, method: str, sizes: Mapping[bytes, int]) -> int:
        """Start a job with these keys, each with a page of its size."""
        job, is_get, keys = self.draw_job(), method == "get", [*sizes]
        pages = [
            bytearray(_SENTINEL * size if is_get else bytes_of(key, size))
            for key, size in sizes.items()
        ]
        self.ask(
            method,
            job,
            keys,
            [memoryview(page) for page in pages],
            shown=f"{job}, {_shown(keys)}, pages",
        )
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
            self.judge(self.model.report(job, list(flags)), flags)
            assert known is not None, "the model knows the outcome"
            keys, pages = self.pages.pop(job)
            for key, page, flag in zip(keys, pages, flags, strict=True):
                if flag or not known.is_get:
                    law = "TIER-1" if known.is_get else "TIER-3"
                    what = f"the page of {key!r} has the bytes that were put"
                    is_exact = page == bytes_of(key, len(page))
                    self.true(is_exact, what, "other bytes", "the same", law)
                page[:] = _REUSED * len(page)
            self.reported = [*self.reported, *pages][-_MOST_REPORTED:]
            reports[job] = [bool(flag) for flag in flags]
        return reports

    def learn_evictions(self) -> None:
        """Take the evicted keys from the store, and check them."""
        evicted = [self.evicted.pop(0) for _ in range(len(self.evicted))]
        if hasattr(self.subject, "take_evicted"):
            evicted += self.subject.take_evicted()
        if self.model.max_bytes is not None:
            self.judge(self.model.evicted(evicted), evicted)

    def await_evictions(self, is_needed: Callable[[], bool]) -> None:
        """Take the evicted keys, including those that the store reports a moment later.

        Args:
            is_needed: Whether a result is wrong unless another key was evicted.
        """
        self.learn_evictions()
        end = time.monotonic() + self.patience / 4
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
        occupied = self.harness.occupied_bytes()
        self.true(True, what, occupied, reason)
        if occupied > most:
            got = f"{occupied:,} bytes{self.files_in_words()}"
            self.fail(what, got, f"at most {most:,} bytes ({reason})")

    def files_in_words(self) -> str:
        """List the files of the store with their sizes in parentheses; empty if unknown."""
        list_files = getattr(self.harness, "files_in_words", str)
        files = list_files()
        return f" ({files})" if files else ""

    def passes(self) -> None:
        """Let some time pass, so that the store can work."""
        time.sleep(0.0005)

    @contextmanager
    def patiently(self, what: str, law: str) -> Iterator[Any]:
        """Yield a function that waits a moment, and that fails if all waits add up to too long."""
        end = time.monotonic() + self.patience

        def wait(got: object) -> None:
            if self.waits_for_wake_up and not self.woken.wait(self.patience):
                self.fail(f"the store wakes up the caller: {what}", "no call", "a call", "TIER-5")
            self.woken.clear()
            self.true(time.monotonic() < end, what, got, "it comes", law)
            self.passes()

        with self.unrecorded():
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
        is_drained = self.call(self.subject, "drain", self.patience)
        self.equal(is_drained, True, "drain waits until all jobs have ended", "TIER-11")
        reports = self.poll()
        left = sorted(self.model.jobs)
        self.equal(left, [], "the next poll reports all that was drained", "TIER-11")
        return reports

    def move(self, method: str, sizes: Mapping[bytes, int]) -> list[bool]:
        """Run one job to its end; returns its flags."""
        job = self.submit(method, sizes)
        return self.drain()[job]

    def look(self, keys: Sequence[bytes]) -> list[bool]:
        """Look up keys until every result is known, and check the results."""
        with self.patiently("every lookup is answered", "TIER-5") as wait:
            while True:
                flags = list(self.ask("lookup", list(keys), shown=_shown(keys)))
                self.equal(len(flags), len(keys), "lookup gives one flag for each key", "TIER-7")
                if None not in flags:
                    break
                wait(flags)
        for key, flag in zip(keys, flags, strict=True):
            if flag:
                self.learn_evictions()
            else:
                self.await_evictions(partial(self.model.must_be_found, key))
            self.judge(self.model.answer(key, bool(flag)), flag)
        return [bool(flag) for flag in flags]

    # --- operations ---

    @operation("TIER-7", weight=5)
    def put(self) -> None:
        """Store keys, both new and known."""
        keys = self.some(self.keys)
        keys += [self.new_key() for _ in range(self.rng.randint(0, self.most))]
        sizes = self.sized(keys)
        most = self.model.max_bytes
        if most is not None and self.rng.random() < 0.3:  # at any place, one page that cannot fit
            items = [*sizes.items()]
            items.insert(self.rng.randint(0, len(items)), (b"too large %d" % most, 2 * most))
            sizes = dict(items)
        self.submit("put", sizes)
        for key in [*self.keys][:-_MOST_KNOWN]:
            del self.keys[key]

    @operation("TIER-7", weight=4)
    def get(self) -> None:
        """Load keys, including missing keys."""
        keys = self.some([*self.keys, b"never put"])
        self.submit("get", {key: self.keys.get(key, 4096) for key in keys})

    @operation("TIER-1")
    def get_in_another_size(self) -> None:
        """Load keys into pages of another size."""
        self.submit("get", self.sized(self.some(self.keys), self.rng.choice((1, 7, -1))))

    @operation("TIER-2")
    def burst(self) -> None:
        """Start many jobs at once."""
        for _ in range(self.rng.randint(20, 120)):
            self.submit("get", self.sized(self.some(self.keys, 2)))

    @operation("TIER-2", weight=2)
    def take_reports(self) -> None:
        """Poll once."""
        self.poll()

    @operation("TIER-11", weight=5)
    def finish(self) -> None:
        """Wait for every job, by ``drain`` or by ``poll``."""
        self.rng.choice((self.drain, self.wait))()

    @operation("TIER-7", weight=2)
    def load_all(self) -> None:
        """Load every key that is held or may be held."""
        self.wait()
        self.look([*self.model.held])
        self.move("get", self.model.held | self.model.either)

    @operation("TIER-3", weight=0.5)
    def rest(self) -> None:
        """Wait for late effects of a store."""
        time.sleep(0.03)

    @operation("TIER-6")
    def be_refused(self) -> None:
        """Submit malformed jobs; later lookups show that none of these jobs was started."""
        self.blame("TIER-6")
        key, other, size = self.new_key(), b"another key", 4096
        job = self.draw_job()
        page, more = memoryview(bytearray(size)), memoryview(bytearray(size))
        wrong: list[tuple[list[bytes], list[memoryview]]] = [
            ([key, other], [page]),
            ([key], [page, more]),
            ([key, b""], [page, more]),
            ([key, b"k" * 101], [page, more]),
            ([key, key], [page, more]),
            ([key], [page.cast("B", (64, 64))]),
            ([key], [page.cast("I")]),
            ([key], [page[::2]]),
            ([key], [page[:0]]),
        ]
        for method in ("put", "get"):
            for keys, pages in wrong:
                self.refused(TierJobError, self.subject, method, job, keys, pages)
            for number in [*self.model.jobs][:1]:
                self.refused(TierJobError, self.subject, method, number, [key], [page])
        readonly = memoryview(bytes(size))
        self.refused(TierJobError, self.subject, "get", job, [key], [readonly])

    @operation("TIER-7", C.DELETE, weight=1.5)
    def delete(self) -> None:
        """Delete keys, sometimes while they are being put, and put them again at once."""
        keys = self.some([*self.keys, b"never put"])
        if self.rng.random() < 0.5:
            self.submit("put", self.sized(keys))
        self.ask("delete", keys, shown=_shown(keys))
        self.model.delete(keys)
        if self.rng.random() < 0.5:
            self.submit("put", self.sized(keys))

    @operation("TIER-8", C.TOUCH)
    def touch(self) -> None:
        """Use keys through ``touch``."""
        self.wait()
        keys = self.some([*self.model.held, b"never put"])
        self.ask("touch", keys, shown=_shown(keys))
        time.sleep(0.01)  # a thread of the store may handle the touch
        self.model.use(keys)

    @operation("TIER-11", weight=0.4)
    def close(self) -> None:
        """Close with jobs in flight; every later job fails."""
        self.blame("TIER-11")
        self.model.close()
        self.call(self.subject, "close")
        self.poll()
        left = sorted(self.model.jobs)
        self.equal(left, [], "close ends every job")
        self.model.is_closed = True
        self.waits_for_wake_up = False
        for method in ("put", "get"):
            self.submit(method, self.sized([*self.keys][:3]))
        self.wait()
        self.look([*self.keys])
        self.call(self.subject, "close")
        self.pages_are_left_alone()
        self.is_over = True

    # --- observables ---

    @observable("TIER-3")
    def pages_are_left_alone(self) -> None:
        """Compare the pages of reported jobs, which the engine has reused."""
        is_left = all(page == _REUSED * len(page) for page in self.reported)
        self.true(is_left, "a page is left alone after its report", "other bytes", "the engine's")

    @observable("TIER-7")
    def lookups(self) -> None:
        """Compare every recently drawn key, and similar keys."""
        rng = Random(self.plan.seed)
        known = [*self.keys]
        alike = [key[:-1] + b"." for key in known[-4:]] + [key[:99] + b"!" for key in known[:4]]
        keys = dict.fromkeys([*known, *(key for key in alike if key not in self.model.sizes)])
        self.look(rng.sample([*keys], min(len(keys), 40)))


def _shown(keys: Sequence[bytes]) -> str:
    text = ", ".join(map(repr, keys[:6]))
    return f"[{text}]" if len(keys) <= 6 else f"[{text}, and {len(keys) - 6} more]"
