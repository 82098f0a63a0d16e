"""The tier contract: pages of bytes by key, kept below the host's memory.

A key names its bytes: who puts a key again puts the same bytes, so a store may keep those
that it has. Keys are 1 to 100 bytes; what they mean (hash, group, salt) is the engine's
affair. Pages are one-dimensional contiguous memoryviews of bytes, of any size from 1 on.

- TIER-1 Bytes **must** be exact or the key failed: a get that reports a key has filled its
  page with exactly what was put. What was damaged, cut, swapped with another entry, or put
  in another size is a failed key, never other bytes.
- TIER-2 Each job **must** be reported exactly once, by ``poll``: one flag a key, in the order
  of the keys, a job without keys included. A put that fails says so.
- TIER-3 No page **may** be touched after its job was reported, and the pages of a put are
  never written.
- TIER-4 A failed get **must** make its key a miss until it is stored again; a put then makes
  it loadable again.
- TIER-5 No call but ``drain`` and ``close`` **may** wait for I/O: they are made on the
  scheduler's thread. What ``lookup`` does not know yet it says, and knows when it is asked
  again.
- TIER-6 No call **may** raise for I/O: a full disk or a server that is gone is a failed key or
  a miss. Only misuse raises :class:`~kvview.TierJobError`, and then nothing was started.
- TIER-7 ``lookup`` **must** say True only of keys whose put succeeded, here or in a process
  before, in this namespace; and of those it says True unless they were evicted or failed.
- TIER-8 A store with a budget (``max_bytes``) **must never** occupy more bytes than it, what is
  being written included; it evicts to make room, and fails a page that can have none. A store
  that could not keep one, since others write where it does, refuses it. One with ``touch``
  evicts what was used longest ago before what was used just now; one with ``on_evicted``
  names every key that it evicts, and no other.
- TIER-9 Reopened after an end of the process at any moment, a store **must** have whole
  entries only: what was reported stored and was not evicted, and nothing left over.
- TIER-10 Two namespaces **must** share nothing. What was written for another one is refused
  with both named (:class:`~kvview.NamespaceMismatchError`).
- TIER-11 After ``drain`` said True, every job **must** have been reported or be reported by
  the next ``poll``. ``close`` ends what is in flight, may be called twice, and makes every
  later job fail.
- TIER-12 Whatever a store does (raises, blocks, is late, never reports, reports twice, too few
  flags or jobs that nobody gave it, lies, damages bytes), a guarded tier **must** keep TIER-1
  to TIER-6, report each job within its deadline, leave a store alone for a while that fails
  again and again, and use a store again that works again. What it counts (``stats``) is so.

Source: vLLM ``SecondaryTierManager`` (0.22 to 0.33), LMCache's L2 adapters, SGLang's
``HiCacheStorage``: three seams, one store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvview.errors import TierJobError


@runtime_checkable
class TierStore(Protocol):
    """Keeps pages by key; made with ``Store(namespace, **options)``.

    All calls come from one thread. Pages stay valid until their job is reported.
    """

    def lookup(self, keys: Sequence[bytes], /) -> Sequence[bool | None]:
        """Which keys can be loaded; None for what is not known yet: ask again (TIER-5).

        Returns:
            One flag a key, in their order.
        """
        ...

    def put(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        """Start to store a page a key.

        Args:
            job: Any int that is not in flight: a job is, until it is reported.
            keys: No key twice.
            pages: One a key; they are read only, and only until the job is reported.

        Raises:
            TierJobError: The job is in flight, the lengths differ, a key is empty or named
                twice, or a page is no view of bytes in one row; nothing was started.
        """
        ...

    def get(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        """Start to load a page a key.

        Args:
            job: As for ``put``, and not the number of a put in flight either.
            keys: No key twice; any key, held or not.
            pages: One a key, writable, of the size that was put. What is in the page of a
                key that failed is anything.

        Raises:
            TierJobError: As ``put``, or a page cannot be written.
        """
        ...

    def poll(self) -> Sequence[tuple[int, Sequence[bool]]]:
        """Jobs that ended since the last call, each with a flag a key (TIER-2)."""
        ...

    def drain(self, timeout: float, /) -> bool:
        """Block until all jobs have ended, at most ``timeout`` seconds; whether they have."""
        ...

    def close(self) -> None:
        """End what is in flight and let go of everything; callable twice (TIER-11)."""
        ...


MAX_KEY_BYTES = 100

_METHODS = ("lookup", "put", "get", "poll", "drain", "close")


@runtime_checkable
class SupportsDelete(Protocol):
    """The store can drop keys."""

    def delete(self, keys: Sequence[bytes], /) -> None:
        """Make keys a miss from now on; those that are not held are ignored."""
        ...


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a store occupies.

    Args:
        used_bytes: On its medium now, of this namespace or more; None when nobody counts.
        max_bytes: Its budget, None without one (TIER-8).
    """

    used_bytes: int | None
    max_bytes: int | None


@runtime_checkable
class SupportsUsage(Protocol):
    """The store knows what it occupies."""

    def usage(self) -> TierUsage:
        """Bytes now, and the budget; never waits for I/O.

        Returns:
            Bytes that other processes wrote may be missing until this store's next put.
        """
        ...


@runtime_checkable
class SupportsTouch(Protocol):
    """The store evicts by use."""

    def touch(self, keys: Sequence[bytes], /) -> None:
        """Say that keys were used; those that are not held are ignored."""
        ...


@runtime_checkable
class SupportsEvictions(Protocol):
    """The store says what it evicts, so that nobody is told of it any longer (EVENT-2)."""

    def on_evicted(self, evicted: Callable[[Sequence[bytes]], None], /) -> None:
        """Call ``evicted``, from any thread, with keys that were dropped to make room."""
        ...


@runtime_checkable
class SupportsDamageReports(Protocol):
    """The store verifies its bytes itself, and reports the pages that it finds damaged."""

    def on_damaged(self, damaged: Callable[[Sequence[bytes]], None], /) -> None:
        """Call ``damaged``, from any thread, once per page whose bytes are not those of its put."""
        ...


@runtime_checkable
class SupportsWakeUp(Protocol):
    """The store says when ``poll`` has something new."""

    def on_wake_up(self, wake_up: Callable[[], None], /) -> None:
        """Call ``wake_up``, from any thread, when a job ended or a lookup was answered."""
        ...


def is_tier_store(found: object) -> bool:
    """Whether something is meant for a class of stores, rightly or not."""
    return isinstance(found, type) and all(hasattr(found, name) for name in ("put", "get", "poll"))


def missing_methods(found: object) -> Iterable[str]:
    """What a class of stores, or a store, lacks of :class:`TierStore`."""
    return [name for name in _METHODS if not callable(getattr(found, name, None))]


def require_tier_job(
    keys: Sequence[bytes], pages: Sequence[memoryview], *, is_get: bool, in_flight: bool
) -> None:
    """What every store asks of a job before it starts anything.

    Args:
        keys: Of the job.
        pages: Of the job.
        is_get: Whether the pages will be written.
        in_flight: Whether the job's number belongs to a job that was not reported.

    Raises:
        TierJobError: Something is wrong with it.
    """
    if in_flight:
        raise TierJobError("TIER-6: this job is in flight; wait until poll has reported it")
    if len(keys) != len(pages):
        raise TierJobError(f"TIER-6: one page a key: {len(keys)} keys, {len(pages)} pages")
    if len({*keys}) != len(keys):
        raise TierJobError("TIER-6: a key is named twice in one job")
    for key in keys:
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise TierJobError(
                f"TIER-6: a key has 1 to {MAX_KEY_BYTES} bytes, got {len(key)}: hash longer ones"
            )
    for page in pages:
        if page.ndim != 1 or page.itemsize != 1 or not page.contiguous or not len(page):
            raise TierJobError(
                f"TIER-6: a page must be a row of bytes, got shape {page.shape} of "
                f"{page.format!r}: use .cast('B') of a contiguous view"
            )
        if is_get and page.readonly:
            raise TierJobError("TIER-6: the page of a get cannot be written")
