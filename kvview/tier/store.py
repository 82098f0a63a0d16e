"""The tier contract: pages of bytes, stored by key below the host memory.

A key determines its bytes. A second put of a key has the same bytes, so a store may keep the old
bytes, unless these failed to load (TIER-4). Keys have 1 to 100 bytes, and a store does not
interpret them. Pages are one-dimensional contiguous memoryviews of bytes, of any size from 1 on.

Laws: TIER-1 to TIER-12 in ``kvview/laws.toml``.

Source: vLLM ``SecondaryTierManager`` (0.22 to 0.33), LMCache's L2 adapters, SGLang's
    ``HiCacheStorage``.
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

    Examples:
        Store a page and load it again:

        >>> store.put(1, [b"key"], [memoryview(b"page")])
        >>> store.drain(10.0), store.poll()  # an engine polls in each step instead of waiting
        (True, [(1, [True])])
        >>> page = bytearray(4)
        >>> store.get(2, [b"key"], [memoryview(page)])
        >>> store.drain(10.0), store.poll(), page
        (True, [(2, [True])], bytearray(b'page'))
    """

    def lookup(self, keys: Sequence[bytes], /) -> Sequence[bool | None]:
        """Return for each key whether it can be loaded; None if this is not known yet (TIER-5).

        Returns:
            One flag for each key, in the order of the keys.
        """
        ...

    def put(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        """Start a job that stores one page for each key.

        Args:
            job: Number of the job: any int that no job in flight has. A job is in flight until it
                is reported.
            keys: The keys, without duplicates.
            pages: One page for each key. The store only reads the pages, and only until the job is
                reported.

        Raises:
            TierJobError: The job is in flight, the lengths differ, a key is empty or named
                twice, or a page is not a contiguous row of bytes; nothing was started.
        """
        ...

    def get(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        """Start a job that loads one page for each key.

        Args:
            job: Number of the job, as for ``put``; a put and a get in flight must have different
                numbers.
            keys: The keys, without duplicates; a key need not be held.
            pages: One writable page for each key, with the size that was put. After a failure, the
                page of the key may have any bytes.

        Raises:
            TierJobError: The job is refused as by ``put``, or a page is read-only.
        """
        ...

    def poll(self) -> Sequence[tuple[int, Sequence[bool]]]:
        """Return the jobs that ended since the last call, with a flag for each key (TIER-2)."""
        ...

    def drain(self, timeout: float, /) -> bool:
        """Wait at most ``timeout`` seconds for all jobs to end; returns whether all have ended."""
        ...

    def close(self) -> None:
        """End the jobs in flight and release all resources; may be called twice (TIER-11)."""
        ...


MAX_KEY_BYTES = 100

_METHODS = ("lookup", "put", "get", "poll", "drain", "close")


@runtime_checkable
class SupportsDelete(Protocol):
    """The store can drop keys.

    Examples:
        Drop a key whose page must not be loaded again:

        >>> if isinstance(store, SupportsDelete):
        ...     store.delete(keys[:1])
        >>> store.lookup(keys[:1])
        [False]
    """

    def delete(self, keys: Sequence[bytes], /) -> None:
        """Make keys a miss from now on; keys that are not held are ignored."""
        ...


@dataclass(frozen=True, slots=True)
class TierUsage:
    """The bytes that a store occupies.

    Args:
        used_bytes: Bytes on the medium now, of this namespace or of several; None if they are not
            counted.
        max_bytes: Budget of the store; None if it has no budget (TIER-8).
    """

    used_bytes: int | None
    max_bytes: int | None


@runtime_checkable
class SupportsUsage(Protocol):
    """The store counts the bytes that it occupies.

    Examples:
        Warn before the store evicts pages:

        >>> usage = store.usage()
        >>> if usage.used_bytes is not None and usage.max_bytes is not None:
        ...     print("full" if usage.used_bytes > 0.9 * usage.max_bytes else "room")
        room
    """

    def usage(self) -> TierUsage:
        """Return the bytes in use and the budget, without waiting for I/O.

        Returns:
            The usage. Bytes that other processes wrote may be missing until this store's next put.
        """
        ...


@runtime_checkable
class SupportsTouch(Protocol):
    """The store evicts the keys that were used least recently.

    Examples:
        Move used keys to the end of a dictionary, whose first key is evicted next:

        >>> class RecentlyUsed(dict):
        ...     def touch(self, keys):
        ...         self.update({key: self.pop(key) for key in keys if key in self})
        >>> pages = RecentlyUsed(a=b"page", b=b"page")
        >>> pages.touch(["a", "c"])
        >>> list(pages)
        ['b', 'a']
    """

    def touch(self, keys: Sequence[bytes], /) -> None:
        """Report the use of keys; keys that are not held are ignored."""
        ...


@runtime_checkable
class SupportsEvictions(Protocol):
    """The store names the keys that it evicts, so that they are no longer advertised (EVENT-2).

    Examples:
        Withdraw the events of keys that a full store evicts:

        >>> evicted = []
        >>> store.on_evicted(evicted.extend)
        >>> store.put(1, keys[1:], [memoryview(b"new"), memoryview(b"new")])
        >>> store.drain(10.0), evicted == keys[:1]
        (True, True)
    """

    def on_evicted(self, evicted: Callable[[Sequence[bytes]], None], /) -> None:
        """Call ``evicted``, from any thread, with keys that were dropped to make room."""
        ...


@runtime_checkable
class SupportsDamageReports(Protocol):
    """The store verifies its bytes itself, and reports damaged pages.

    Examples:
        Count pages that the medium has changed:

        >>> damaged = []
        >>> store.on_damaged(damaged.extend)
        >>> num_bytes = page_file.write_bytes(bytes(page_file.stat().st_size))
        >>> store.get(1, keys[:1], [memoryview(bytearray(4))])
        >>> store.drain(10.0), len(damaged)
        (True, 1)
    """

    def on_damaged(self, damaged: Callable[[Sequence[bytes]], None], /) -> None:
        """Call ``damaged``, from any thread, once per page whose bytes differ from its put."""
        ...


@runtime_checkable
class SupportsWakeUp(Protocol):
    """The store calls the engine when ``poll`` has new results.

    Examples:
        Sleep until a job has ended, rather than poll at intervals:

        >>> from threading import Event
        >>> has_ended = Event()
        >>> store.on_wake_up(has_ended.set)
        >>> store.put(1, keys[1:2], [memoryview(b"page")])
        >>> has_ended.wait(10.0), store.poll()
        (True, [(1, [True])])
    """

    def on_wake_up(self, wake_up: Callable[[], None], /) -> None:
        """Call ``wake_up``, from any thread, when a job or a lookup has ended."""
        ...


def is_tier_store(found: object) -> bool:
    """Whether an object looks like a class of stores; the class may still lack methods."""
    return isinstance(found, type) and all(hasattr(found, name) for name in ("put", "get", "poll"))


def missing_methods(found: object) -> Iterable[str]:
    """Return the methods of :class:`TierStore` that a class or a store lacks."""
    return [name for name in _METHODS if not callable(getattr(found, name, None))]


def require_tier_job(
    keys: Sequence[bytes], pages: Sequence[memoryview], *, is_get: bool, in_flight: bool
) -> None:
    """Refuse a malformed job; every store calls this function before it starts a job.

    Args:
        keys: Keys of the job.
        pages: Pages of the job.
        is_get: Whether the pages will be written.
        in_flight: Whether the job's number belongs to a job that was not reported.

    Raises:
        TierJobError: The job is malformed.
    """
    if in_flight:
        raise TierJobError(
            "TIER-6: a job with this number is in flight; wait until poll has reported it"
        )
    if len(keys) != len(pages):
        raise TierJobError(
            f"TIER-6: a job needs one page for each key, got {len(keys)} keys and {len(pages)} "
            f"pages"
        )
    if len({*keys}) != len(keys):
        raise TierJobError("TIER-6: a job names a key twice; pass each key once")
    for key in keys:
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise TierJobError(
                f"TIER-6: a key must have 1 to {MAX_KEY_BYTES} bytes, got {len(key)}; hash "
                f"longer keys"
            )
    for page in pages:
        if page.ndim != 1 or page.itemsize != 1 or not page.contiguous or not len(page):
            raise TierJobError(
                f"TIER-6: a page must be a row of bytes, got shape {page.shape} of "
                f"{page.format!r}; use .cast('B') of a contiguous view"
            )
        if is_get and page.readonly:
            raise TierJobError("TIER-6: a page of a get is read-only; pass writable pages")
