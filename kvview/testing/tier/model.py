"""The tier contract as an executable model: a dictionary of keys, the jobs in flight, and the laws.

The model calls no store. Each method that receives a result of the store yields ``(law, promise,
whether the promise was kept)``. If a law leaves a choice to the store (which of two jobs on one key
comes first, which key is evicted), the key is in ``either``: it may be held or missing until a
result of the store decides.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from kvview.testing.results.law_broken import short_repr
from kvview.testing.suites.conformance import Promises

OVERHEAD = 512
"""Bytes that a store may occupy for an entry in addition to its page."""


TWIN, FLAT = b"twin", b"flat"
"""Starts of the keys whose pages are equal, as those of equal prefixes under two salts are, and of
the keys whose pages have one byte only and compress well."""

_MOST_REFUSED = 10  # keys; a store that refuses three keys in ten never reaches this number


@lru_cache(maxsize=256)
def bytes_of(key: bytes, num_bytes: int) -> bytes:
    """Return the bytes that the checks put under a key."""
    if key.startswith(FLAT):
        return key[-1:] * num_bytes
    return random.Random(TWIN if key.startswith(TWIN) else key).randbytes(num_bytes)


@dataclass
class KeyJob:
    """A job in flight.

    Args:
        sizes: Number of bytes of the page of each key.
        is_get: Whether the job is a load.
        first: Keys of a put that no earlier put has named; a store may refuse a key each time.
        crossed: Keys that another job or a delete used while this job was in flight.
    """

    sizes: Mapping[bytes, int]
    is_get: bool
    first: set[bytes] = field(default_factory=set)
    crossed: set[bytes] = field(default_factory=set)


class TierModel:
    """The state of a store, as the contract defines it.

    Args:
        max_bytes: The budget in bytes, or None.
        evicts_by_use: Whether recently used keys are evicted after other keys (TIER-8).
        names_evicted: Whether the store names the keys that it evicts (TIER-8).
        finds: Whether lookups find keys.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        *,
        evicts_by_use: bool = False,
        names_evicted: bool = False,
        finds: bool = True,
    ) -> None:
        self.finds = finds
        self.max_bytes = max_bytes
        self.evicts_by_use = evicts_by_use
        self.names_evicted = names_evicted
        self.held: dict[bytes, int] = {}
        """Keys that can be loaded, with the number of bytes of their pages."""
        self.either: dict[bytes, int] = {}
        """Keys that may be held or missing."""
        self.failed: set[bytes] = set()
        """Keys whose last get failed, which are misses until they are stored again (TIER-4)."""
        self.gone: set[bytes] = set()
        """Keys that the store reported as evicted, although a lookup may still find them."""
        self.damaged: set[bytes] = set()
        """Keys whose bytes were damaged; a put may keep the damaged bytes until a get fails."""
        self.used: dict[bytes, int] = {}
        """The time at which each key was last stored, loaded or touched, if it is known."""
        self.now = 0
        """The time, which the engine sets before it takes reports."""
        self.sizes: dict[bytes, int] = {}
        """For each key, the number of bytes of the page that was put."""
        self.jobs: dict[int, KeyJob] = {}
        self.is_closed = False
        self.has_deleted = False
        """Whether deleted keys may still occupy bytes."""
        self.refused: set[bytes] = set()
        """Keys whose puts failed without a reason since the last put that succeeded."""
        self.refused_again: set[bytes] = set()
        """Those of them whose last get had failed (TIER-4)."""
        self.has_stored = False
        self.is_faulty = False
        """Whether the medium is missing or full, or the store has a fault, so that any key may
        fail."""

    # --- the calls of an engine ---

    def start(self, job: int, sizes: Mapping[bytes, int], *, is_get: bool) -> None:
        """Start a job; two jobs on the same key may run in any order."""
        new = KeyJob(sizes, is_get)
        for other in self.jobs.values():
            both = {key for key in sizes if key in other.sizes}
            if is_get == other.is_get:  # then only a page of a wrong size has an effect
                both = {key for key in both if sizes[key] != other.sizes[key]}
            other.crossed |= both
            new.crossed |= both
        self.jobs[job] = new
        if not is_get:
            new.first.update(key for key in sizes if key not in self.sizes)
            self.sizes |= sizes

    def report(self, number: int, flags: Sequence[bool]) -> Promises:
        """End a job, which must be in flight and have one flag for each key (TIER-2)."""
        job = self.jobs.pop(number, None)
        yield "TIER-2", f"job {number} is in flight, and is reported once", job is not None
        assert job is not None, "the promise was kept"
        yield "TIER-2", "a report has one flag for each key", len(flags) == len(job.sizes)
        for key, flag in zip(job.sizes, flags, strict=True):
            if self.is_closed:
                yield "TIER-11", "no job succeeds after close", not flag
            yield from (self._loaded if job.is_get else self._stored)(job, key, flag)

    def _stored(self, job: KeyJob, key: bytes, flag: bool) -> Promises:
        size, most = job.sizes[key], self.max_bytes
        if most is not None and size > most:
            yield "TIER-8", f"a page of {size} bytes fails in a budget of {most}", not flag
        elif not flag and self.has_room(size) and key in job.first - job.crossed:
            yield from self._refused(key)
        if not flag:
            self._doubt([key])
            if self.is_faulty or key in job.crossed:
                self.either[key] = size
            return
        self.has_stored = True
        self.refused.clear()
        if key in self.failed:
            self.refused_again.clear()
        self.failed.discard(key)
        self.gone.discard(key)
        self._forget(key)
        self.held[key] = size
        self._use(key)
        if self.is_faulty or key in job.crossed or key in self.damaged:
            self._doubt([key])
        self._make_room()

    def _refused(self, key: bytes) -> Promises:
        """Refuse a page that has room, which a store may do with some keys but not with all."""
        if self.is_closed or self.is_faulty or key in self.either:
            return  # the store may have refused a key in either before
        self.refused.add(key)
        self.refused_again |= {key} & self.failed
        what = "a store that has stored a page also stores one of"
        law = "TIER-7" if self.max_bytes is None else "TIER-8"
        is_right = len(self.refused) < _MOST_REFUSED or not self.has_stored
        yield law, f"{what} {_MOST_REFUSED} pages in a row", is_right
        is_right = len(self.refused_again) < _MOST_REFUSED or not self.has_stored
        yield "TIER-4", f"{what} {_MOST_REFUSED} keys whose loads had failed", is_right

    def _loaded(self, job: KeyJob, key: bytes, flag: bool) -> Promises:
        is_sure = self._is_sure(job, key)
        if not flag:
            may_fail = not self._must_load(job, key)
            yield "TIER-7", f"key {short_repr(key)}, which is held, is loaded", may_fail
            if is_sure:
                self._forget(key)
                self.damaged.discard(key)  # the next put replaces the bytes
                self.gone.discard(key)
                self.failed.add(key)
            else:
                self._doubt([key])
            return
        is_right = job.sizes[key] == self.sizes.get(key, job.sizes[key])
        yield (
            "TIER-1",
            f"key {short_repr(key)} is not loaded in a size in which it was not put",
            is_right,
        )
        is_there = key in self.held or key in self.either or key in job.crossed
        is_there |= key in self.sizes and (self.is_faulty or key in self.failed)
        yield "TIER-7", f"key {short_repr(key)}, which was not stored, is not loaded", is_there
        if is_sure:
            self.damaged.discard(key)
            self._use(key)

    def _use(self, key: bytes) -> None:
        """Use a key now; its time is unknown if a put in flight may have evicted it before."""
        if all(job.is_get for job in self.jobs.values()):
            self.used[key] = self.now
        else:
            self.used.pop(key, None)

    def _must_load(self, job: KeyJob, key: bytes) -> bool:
        is_held = self.held.get(key) == job.sizes[key] and not self.is_faulty
        return is_held and self._is_sure(job, key)

    def _is_sure(self, job: KeyJob, key: bytes) -> bool:
        return key not in job.crossed and not self.is_closed

    def lacks(self, number: int, flags: Sequence[bool]) -> bool:
        """Whether a report lacks a key that must be loaded, unless the key has been evicted."""
        job = self.jobs.get(number)
        if job is None or not job.is_get:
            return False
        failed = [key for key, flag in zip(job.sizes, flags, strict=False) if not flag]
        return any(self._must_load(job, key) for key in failed)

    def has_room(self, size: int) -> bool:
        """Return whether a page fits in addition to all other pages in flight."""
        return self.max_bytes is None or size <= self.max_bytes // 10

    def must_be_found(self, key: bytes) -> bool:
        """Whether a lookup must find a key, because the key is held and no job may change this."""
        is_sure = self.finds and key in self.held and not self.is_faulty and not self.is_closed
        return is_sure and not self._moves(key)

    def answer(self, key: bytes, flag: bool) -> Promises:
        """Check the result of a lookup (TIER-4, TIER-7)."""
        if self.is_closed:
            yield "TIER-11", "after close every key is a miss", not flag
        elif flag and not self._moves(key):
            is_there = any(key in some for some in (self.held, self.either, self.gone))
            may_be_found = (is_there or self.is_faulty) and key not in self.failed
            law = "TIER-4" if key in self.failed else "TIER-7"
            what = f"key {short_repr(key)} is a miss, because it was not stored or was deleted"
            yield law, f"{what} (Threaded: by remove_later)", may_be_found
        elif not flag:
            what = f"key {short_repr(key)}, which is held, is found (by default, has finds no key)"
            yield "TIER-7", what, not self.must_be_found(key)

    def _moves(self, key: bytes) -> bool:
        return any(key in job.sizes for job in self.jobs.values())

    def delete(self, keys: Iterable[bytes]) -> None:
        """Make keys a miss; a job in flight may take effect before or after the delete (TIER-7)."""
        self.has_deleted = True
        for key in keys:
            self._forget(key)
            self.gone.discard(key)
            for job in self.jobs.values():
                if key in job.sizes:
                    job.crossed.add(key)

    def use(self, keys: Iterable[bytes]) -> None:
        """Use keys, which are now held, and are the last to be evicted (TIER-8)."""
        for key in keys:
            self.used[key] = self.now
            if key in self.either:
                self.held[key] = self.either.pop(key)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Use those of some keys that are held; the time of a key that may be held is unknown."""
        for key in keys:
            if key in self.held:
                self.used[key] = self.now
            else:
                self.used.pop(key, None)

    def close(self) -> None:
        """End the jobs in flight; each of their keys may then be stored or not (TIER-11)."""
        for job in self.jobs.values():
            job.crossed.update(job.sizes)

    def reopen(self) -> None:
        """Continue like a new process, which finds only complete entries (TIER-9)."""
        self.is_closed = False
        self.either |= {key: self.sizes[key] for key in self.failed if key in self.sizes}
        self.failed.clear()

    # --- the medium ---

    def damage(self) -> None:
        """Damage every entry; a get then returns the right bytes or fails (TIER-1)."""
        self.damaged |= {*self.held, *self.either}
        self._doubt([*self.held])

    def share(self) -> None:
        """Let another process write into the same folder or database, and evict any key."""
        if self.max_bytes is not None:
            self._doubt([*self.held])

    def become_faulty(self) -> None:
        """Let the medium or the store fail for any key."""
        self.is_faulty = True
        self._doubt([*self.held])

    def kept(self) -> set[bytes]:
        """Return the held keys that must not be evicted: all, if they fit, or those used last."""
        assert self.max_bytes is not None, "only a store with a budget evicts"
        if self.has_deleted:
            return set()
        coming = [job.sizes.values() for job in self.jobs.values() if not job.is_get]
        total = sum(size + OVERHEAD for sizes in coming for size in sizes)
        present = {key: size + OVERHEAD for key, size in (self.held | self.either).items()}
        if total + sum(present.values()) <= self.max_bytes // 2:
            return {*self.held}
        kept: set[bytes] = set()
        total += sum(size for key, size in present.items() if key not in self.used)
        for time in sorted({*self.used.values()}, reverse=True):
            together = [key for key in present if self.used.get(key) == time]
            total += sum(present[key] for key in together)
            if total > self.max_bytes // 3 or not self.evicts_by_use:
                break
            kept.update(together)
        return kept & self.held.keys()

    def evicted(self, keys: Iterable[bytes]) -> Promises:
        """Evict the keys that the store reports as evicted (TIER-8)."""
        for key in keys:
            is_known = key in self.held or key in self.either or key in self.sizes
            yield "TIER-8", f"key {short_repr(key)}, which was evicted, had been stored", is_known
            moving = [job for job in self.jobs.values() if key in job.sizes]
            may_go = bool(moving) or key not in self.kept()
            what = f"key {short_repr(key)}, which was used just now, is not evicted"
            yield "TIER-8", what, may_go
            for job in moving:
                job.crossed.add(key)
            if moving:
                self._doubt([key])
            else:
                self._forget(key)
                self.gone.add(key)

    def _make_room(self) -> None:
        if self.max_bytes is not None and not self.names_evicted:
            self._doubt({*self.held} - self.kept())

    def _doubt(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self.held:
                self.either[key] = self.held.pop(key)

    def _forget(self, key: bytes) -> None:
        self.held.pop(key, None)
        self.either.pop(key, None)
