"""A guard between any engine and any store, whatever the store does (TIER-12).

A thread of the guard calls the store with private pages, not with those of the engine (unless
``zero_copy`` is set). So calls that block, late loads, and late writes into pages do no harm.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvview.errors import ConfigError, one_line
from kvview.tier.answers import LookupAnswers
from kvview.tier.guard.breaker import CircuitBreaker
from kvview.tier.guard.checksum import PageSeal
from kvview.tier.guard.private_pages import PrivatePages
from kvview.tier.namespace import Namespace
from kvview.tier.store import (
    SupportsDamageReports,
    SupportsDelete,
    SupportsEvictions,
    SupportsTouch,
    SupportsWakeUp,
    TierStore,
    require_tier_job,
)

_log = logging.getLogger(__name__)
_BETWEEN_POLLS = 0.0005  # seconds, for a store that does not support wake-ups
_LONGEST_SLEEP = 0.05
_LONGEST_CLOSE = 5.0
_MOST_EVICTED = 1 << 20  # maximum of evicted keys that are kept until the engine takes them


@dataclass(slots=True)
class TierStats:
    """The counts of a guarded tier so far.

    Args:
        puts: Keys stored.
        gets: Keys loaded.
        failed: Keys whose put or get failed, for any reason.
        damaged: Failed keys whose bytes differ from the bytes that were put, as found by the guard
            or by a store that reports damage (:class:`~kvview.tier.SupportsDamageReports`).
        refused: Jobs that were not passed to the store, because it was closed or paused.
        raised: Calls of the store that raised.
        late: Jobs that were not reported within their deadline.
        malformed: Results of the store that have the wrong form.
        unknown: Reports of jobs that were not in flight: late, repeated or invented ones.
        unanswered: Lookups whose result did not arrive in time.
        trips: Number of times that the store was paused.
    """

    puts: int = 0
    gets: int = 0
    failed: int = 0
    damaged: int = 0
    refused: int = 0
    raised: int = 0
    late: int = 0
    malformed: int = 0
    unknown: int = 0
    unanswered: int = 0
    trips: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    job: int
    number: int
    keys: list[bytes]
    pages: list[memoryview]
    is_get: bool
    due: float
    private: list[bytearray] = field(default_factory=list)
    deleted: set[bytes] = field(default_factory=set)
    """Keys that were deleted while the job was in flight; they stay a miss."""
    is_copying: bool = False
    """Whether the guard or the store (``zero_copy``) uses the pages, so the job cannot be late."""


class GuardedTier:
    """A guard over a store, which is itself a :class:`~kvview.tier.TierStore` (TIER-12).

    Args:
        store: A store that was made for the same namespace.
        namespace: Namespace of the store.
        deadline: Seconds after which a job that was not reported has failed.
        lookup_deadline: Seconds after which a lookup without a result is a miss.
        checksum: ``"xxh3"``, ``"crc32"``, or ``"none"`` if the store itself satisfies TIER-1.
        trip_after: Number of consecutive faults after which the store is paused.
        retry_after: Seconds until the guard tries the store again.
        zero_copy: Whether the store receives the engine's own pages. The store must then satisfy
            TIER-1 and TIER-3 by itself, and ``checksum`` must be ``"none"``. A job of the store
            then ends when it is reported, not at its deadline, because the store might still write.
        keeps_evicted: Whether the keys that the store evicts are kept for :meth:`take_evicted`.
        clock: Returns seconds.

    Raises:
        ConfigError: A number is not positive, the checksum is unknown, or a checksum is combined
            with ``zero_copy``.
    """

    def __init__(
        self,
        store: TierStore,
        namespace: Namespace,
        *,
        deadline: float = 30.0,
        lookup_deadline: float = 2.0,
        checksum: str = "xxh3",
        trip_after: int = 3,
        retry_after: float = 5.0,
        zero_copy: bool = False,
        keeps_evicted: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        numbers = {"deadline": deadline, "lookup_deadline": lookup_deadline}
        numbers |= {"trip_after": trip_after, "retry_after": retry_after}
        for name, value in numbers.items():
            if not value > 0:
                raise ConfigError(f"{name} must be more than 0, got {value}")
        if zero_copy and checksum != "none":
            raise ConfigError(
                "with zero_copy the guard cannot add its checksum to a page; set checksum to "
                "'none' if the store has its own checksum, or drop zero_copy"
            )
        self.store = store
        self.namespace = namespace
        self._deadline = deadline
        self._is_zero_copy = zero_copy
        self._clock = clock
        seal = None if checksum == "none" else PageSeal(namespace, checksum)
        self._private_pages = PrivatePages(seal)
        self._breaker = CircuitBreaker(clock, trip_after, retry_after)
        self._answers = LookupAnswers(clock, patience=lookup_deadline)
        self._stats = TierStats()
        self._changed = threading.Condition()
        self._jobs: dict[int, _Job] = {}  # in the order of their deadlines
        self._in_store: dict[int, _Job] = {}
        self._done: list[tuple[int, list[bool]]] = []
        self._inbox: deque[Callable[[], object]] = deque()
        self._unanswered: list[bytes] = []
        self._evicted: deque[bytes] = deque(maxlen=_MOST_EVICTED if keeps_evicted else 0)
        self._next_number = 0
        self._is_closed = False
        self._wakes = isinstance(store, SupportsWakeUp)
        self._can_delete = isinstance(store, SupportsDelete)
        self._wake_up: Callable[[], None] = lambda: None
        self._awake = threading.Event()
        self._lane = threading.Thread(target=self._run, name="kvview-tier", daemon=True)
        self._lane.start()

    @property
    def stats(self) -> TierStats:
        """Return a copy of the counts so far."""
        with self._changed:
            trips, unanswered = self._breaker.num_trips, self._answers.num_unanswered
            return replace(self._stats, trips=trips, unanswered=unanswered)

    @property
    def is_healthy(self) -> bool:
        """Whether jobs are passed to the store, which is then neither closed nor paused."""
        with self._changed:
            return not (self._is_closed or self._breaker.is_open)

    def on_wake_up(self, wake_up: Callable[[], None], /) -> None:
        """Call ``wake_up``, which must not call the guard, when a job or a lookup has ended.

        ``wake_up`` is not called when a deadline passes, so also poll from time to time.
        """
        self._wake_up = wake_up

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        """Return the known results; the guard's thread looks up the other keys."""
        with self._changed:
            if self._is_closed or self._breaker.is_open:
                return [False] * len(keys)
            before = self._answers.num_unanswered
            flags, ask = self._answers.flags(keys)
            self._strike_unanswered(before)
        if ask:
            self._run_soon(partial(self._queue_lookup, ask))
        return flags

    def put(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        """Start a store job."""
        self._submit(job, keys, pages, is_get=False)

    def get(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        """Start a load job."""
        self._submit(job, keys, pages, is_get=True)

    def poll(self) -> list[tuple[int, list[bool]]]:
        """Return the jobs that ended, or whose deadline has passed."""
        with self._changed:
            self._expire()
            done, self._done = self._done, []
        return done

    def drain(self, timeout: float, /) -> bool:
        """Wait for all jobs, each at most until its deadline."""
        end = time.monotonic() + timeout
        with self._changed:
            while True:
                self._expire()
                left = end - time.monotonic()
                if not self._jobs or left <= 0:
                    return not self._jobs
                self._changed.wait(min(left, _LONGEST_SLEEP))

    def close(self) -> None:
        """Fail the jobs in flight and close the store; a store whose close hangs is abandoned."""
        with self._changed:
            is_first, self._is_closed = not self._is_closed, True
        self._awake.set()
        self._lane.join(_LONGEST_CLOSE)  # wait for copies, and for the current call of the store
        with self._changed:
            for entry in [*self._jobs.values()]:
                self._finish(entry, [False] * len(entry.keys))
        if is_first and self._lane.is_alive():
            _log.warning("the store %s does not close; it is abandoned", type(self.store).__name__)

    def delete(self, keys: Sequence[bytes], /) -> None:
        """Make keys a miss; the guard hides keys that the store cannot delete."""
        hide = self._answers.deleted if self._can_delete else self._answers.failed
        with self._changed:
            for key in keys:
                hide(key)
            for entry in self._jobs.values():
                entry.deleted.update(keys)
        self._run_soon(partial(self._drop, [*keys]))

    def touch(self, keys: Sequence[bytes], /) -> None:
        """Report the use of keys to the store, if the store supports ``touch``."""
        if isinstance(self.store, SupportsTouch):
            self._run_soon(partial(self._call_store, self.store.touch, [*keys]))

    def note_stored(self, keys: Sequence[bytes]) -> None:
        """Record that another process has stored keys, so that lookups find them at once."""
        with self._changed:
            for key in keys:
                self._answers.stored(key)

    def take_evicted(self) -> list[bytes]:
        """Return the keys that the store reported as evicted since the last call."""
        return [self._evicted.popleft() for _ in range(len(self._evicted))]

    # --- on the caller's thread ---

    def _submit(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], is_get: bool
    ) -> None:
        with self._changed:
            in_flight = job in self._jobs or any(job == done for done, _ in self._done)
            require_tier_job(keys, pages, is_get=is_get, in_flight=in_flight)
            self._next_number += 1
            number, due = self._next_number, self._clock() + self._deadline
            entry = _Job(job, number, [*keys], [*pages], is_get, due)
            self._jobs[job] = entry
            if self._is_closed or not self._breaker.passes(entry.number):
                self._stats.refused += 1
                self._finish(entry, [False] * len(keys))
                return
        self._run_soon(partial(self._start, entry))

    def _run_soon(self, task: Callable[[], object]) -> None:
        self._inbox.append(task)
        self._awake.set()

    def _expire(self) -> None:
        now = self._clock()
        if not self._jobs or next(iter(self._jobs.values())).due > now:
            return
        for entry in [*self._jobs.values()]:
            if entry.due <= now and not entry.is_copying:
                self._stats.late += 1
                self._strike(f"job {entry.job} was not reported within {self._deadline} s")
                self._finish(entry, [False] * len(entry.keys))

    def _finish(self, entry: _Job, flags: list[bool]) -> None:
        """Report a job; the engine may then reuse its pages."""
        del self._jobs[entry.job]
        self._in_store.pop(entry.number, None)
        entry.pages = []
        for key, flag in zip(entry.keys, flags, strict=True):
            if flag and not entry.is_get and key not in entry.deleted:
                self._answers.stored(key)
            elif not flag and entry.is_get:
                self._answers.failed(key)
        num_good = sum(flags)
        self._stats.failed += len(flags) - num_good
        if entry.is_get:
            self._stats.gets += num_good
        else:
            self._stats.puts += num_good
        self._done.append((entry.job, flags))
        self._changed.notify_all()
        self._wake_up()

    def _count_damaged(self, keys: Sequence[bytes]) -> None:
        with self._changed:
            is_first, self._stats.damaged = not self._stats.damaged, self._stats.damaged + len(keys)
        if is_first and keys:
            _log.warning(
                "the store %s has damaged pages, which fail and are computed again; the first "
                "damaged page has key %s, and later ones are only counted",
                type(self.store).__name__,
                bytes(keys[0]).hex(),
            )

    def _strike(self, what: str) -> None:
        trips = self._breaker.num_trips
        self._breaker.strike()
        if self._breaker.num_trips > trips:
            _log.warning("the store %s is paused: %s", type(self.store).__name__, what)

    def _strike_unanswered(self, before: int) -> None:
        if self._answers.num_unanswered > before:
            self._strike("a lookup had no result in time")

    # --- on the guard's thread ---

    def _run(self) -> None:
        if isinstance(self.store, SupportsWakeUp):
            self._call_store(self.store.on_wake_up, self._awake.set)
        if isinstance(self.store, SupportsEvictions):
            self._call_store(self.store.on_evicted, self._evicted.extend)
        if isinstance(self.store, SupportsDamageReports):
            self._call_store(self.store.on_damaged, self._count_damaged)
        while not self._is_closed:
            is_waiting = self._in_store or self._unanswered
            self._awake.wait(_LONGEST_SLEEP if self._wakes or not is_waiting else _BETWEEN_POLLS)
            self._awake.clear()
            self._run_inbox()
            if self._unanswered:
                self._look_up()
            if self._in_store:
                self._collect()
        self._run_inbox()  # so that a key that was deleted before close stays deleted
        self._call_store(self.store.close)

    def _run_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _call_store(self, call: Callable[..., object], *args: object) -> object:
        try:
            return call(*args)
        except BaseException as error:  # no caller can catch an exception on the guard's thread
            with self._changed:
                self._stats.raised += 1
                name = getattr(call, "__name__", "call").strip("_")
                self._strike(f"{name} raised {one_line(error)}")
            return error

    def _queue_lookup(self, keys: list[bytes]) -> None:
        self._unanswered += keys

    def _look_up(self) -> None:
        keys = self._unanswered
        found = self._call_store(self.store.lookup, keys)
        with self._changed:
            flags = _flags(found, len(keys))
            if flags is None:
                self._unanswered = []
                if not isinstance(found, BaseException):
                    self._stats.malformed += 1
                    self._strike("lookup did not return one flag for each key")
                flags = [False] * len(keys)
            pairs = [*zip(keys, flags, strict=True)]
            for key, flag in pairs:
                if flag is not None:
                    self._answers.looked_up(key, flag)
            before, waits_for = self._answers.num_unanswered, self._answers.waits_for
            self._unanswered = [key for key, flag in pairs if flag is None and waits_for(key)]
            self._strike_unanswered(before)
        if len(self._unanswered) < len(keys):
            self._wake_up()

    def _start(self, entry: _Job) -> None:
        """Pass a job to the store, with private pages unless ``zero_copy`` is set."""
        if self._begin_copy(entry):
            raised = self._call_store(self._begin, entry)
            if isinstance(raised, BaseException):
                self._end(entry, [False] * len(entry.keys))

    def _begin(self, entry: _Job) -> None:
        pages, private = entry.pages, self._private_pages
        if not self._is_zero_copy:
            made = private.to_get(pages) if entry.is_get else private.to_put(entry.keys, pages)
            entry.private, pages = made, [memoryview(page) for page in made]
        with self._changed:
            entry.is_copying = self._is_zero_copy
            self._in_store[entry.number] = entry
        if entry.is_get:
            self.store.get(entry.number, [*entry.keys], pages)
        else:
            views = [page.toreadonly() for page in pages]
            self.store.put(entry.number, [*entry.keys], views)

    def _collect(self) -> None:
        found = self._call_store(self.store.poll)
        if isinstance(found, BaseException):
            return
        try:
            reports = [(number, flags) for number, flags in found]  # type: ignore[attr-defined]
            known = [self._in_store.get(number) for number, _ in reports]
        except Exception:
            with self._changed:
                self._stats.malformed += 1
                self._strike("poll did not return a list of jobs and flags")
            return
        for (_, given), entry in zip(reports, known, strict=True):
            if entry is None or self._in_store.pop(entry.number, None) is None:
                self._stats.unknown += 1
                continue
            flags = _flags(given, len(entry.keys))
            if flags is None:
                with self._changed:
                    self._stats.malformed += 1
                    self._strike(f"a job of {len(entry.keys)} keys was reported as {given!r:.80}")
            good = [flag is True for flag in flags or [False] * len(entry.keys)]
            self._end(entry, good, is_well=flags is not None)

    def _end(self, entry: _Job, flags: list[bool], *, is_well: bool = False) -> None:
        """End a job that the store has ended, and copy the loaded bytes into the engine's pages."""
        if not self._begin_copy(entry):
            return
        if entry.is_get and not self._is_zero_copy:
            for number, page in enumerate(entry.pages):
                private = entry.private[number]
                copy_out = self._private_pages.copy_out
                if flags[number] and not copy_out(entry.keys[number], private, page):
                    flags[number] = False
                    self._count_damaged([entry.keys[number]])
                    self._drop([entry.keys[number]])  # otherwise a put may keep the wrong bytes
        with self._changed:
            entry.is_copying = False
            if is_well:
                self._breaker.ended_well(entry.number)
            self._finish(entry, flags)
        self._private_pages.give_back(entry.private)
        entry.private = []

    def _drop(self, keys: list[bytes]) -> None:
        if isinstance(self.store, SupportsDelete):
            self._call_store(self.store.delete, keys)

    def _begin_copy(self, entry: _Job) -> bool:
        with self._changed:
            entry.is_copying = self._jobs.get(entry.job) is entry and not self._is_closed
            return entry.is_copying


def _flags(found: object, num: int) -> list[bool | None] | None:
    """Return the flags that a store reported; None if they have the wrong form."""
    try:
        flags = [
            None if flag is None else bool(flag)
            for flag in found  # type: ignore[attr-defined]
        ]
    except Exception:
        return None
    return flags if len(flags) == num else None
