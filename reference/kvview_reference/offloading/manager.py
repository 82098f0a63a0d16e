"""The manager of one tier, which tracks pages, pins and events and has a replacement policy.

Only stores and touches change the recency of keys; lookups, loads and completions do not. Keys are
processed by batched dict operations, because the scheduler waits for these calls.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, filterfalse, islice
from operator import indexOf
from typing import TYPE_CHECKING

from kvview import (
    MEDIUM_CPU,
    ConfigError,
    CPULoadStoreSpec,
    KeyNotLoadableError,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    TransferNotInFlightError,
)
from kvview_reference.events import EventLog
from kvview_reference.offloading.leftovers import Leftovers
from kvview_reference.offloading.policies import (
    InFlight,
    PolicyFactory,
    SupportsLeftovers,
    policy_factory,
)

if TYPE_CHECKING:
    from kvview import OffloadingManager

_DROPPED_PER_KEY = 4  # entries that a reset leaves per block, at most 3 for a policy with ghosts

_MISS, _HIT, _HIT_PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING


class CPUOffloadingManager:
    """Tracks the keys that a tier of equal pages holds, and their pages.

    1. If ``prepare_store`` returns None, it has changed nothing: neither the eviction order, nor
       the ghosts of the policy, nor the counts of the store threshold.
    2. A completion of a key that is not in flight raises
       :class:`TransferNotInFlightError` and changes nothing. After ``reset``,
       keys in flight are still completed once for each transfer (OFF-8).
    3. With ``store_threshold=N`` a key is stored from its N-th offer on, if the manager still
       remembers the earlier offers; one call is one offer.

    Args:
        num_blocks: Capacity, in offloaded blocks; pages have the numbers 0 to num_blocks - 1.
        cache_policy: A name known to :func:`~kvview_reference.offloading.policies.register_policy`,
            the target of a policy, or a callable that makes a policy from the capacity.
        enable_events: Whether to gather events for ``take_events``.
        store_threshold: Number of offers that a key needs before it is stored; with 1, all keys are
            stored.
        max_tracked_keys: Number of keys whose offers are counted; the count of the least recently
            offered key is dropped first.
        medium: Name of the tier in events.

    Raises:
        ConfigError: A size is not a positive int, or the policy is unknown (OFF-7).
    """

    def __init__(
        self,
        num_blocks: int,
        cache_policy: str | PolicyFactory = "lru",
        enable_events: bool = False,
        *,
        store_threshold: int = 1,
        max_tracked_keys: int = 64_000,
        medium: str = MEDIUM_CPU,
    ) -> None:
        self._medium = medium
        self._num_blocks = _positive_int("num_blocks", num_blocks)
        self._store_threshold = _positive_int("store_threshold", store_threshold)
        self._max_tracked_keys = _positive_int("max_tracked_keys", max_tracked_keys)
        self._make_policy = policy_factory(cache_policy)
        self._policy = self._make_policy(num_blocks)
        self._pages: dict[OffloadKey, int] = {}  # of keys held: stored or being stored
        self._storing: set[OffloadKey] = set()
        self._loading: dict[OffloadKey, int] = {}  # to the number of loads
        self._in_flight = InFlight(self._loading.keys(), self._storing)
        self._late_pages: dict[OffloadKey, int] = {}  # of transfers older than a reset
        self._late_loads: dict[OffloadKey, int] = {}
        self._free_pages: list[int] = []  # released; the last is taken first
        self._fresh_pages: Iterator[int] = iter(range(num_blocks))  # not used since the last reset
        self._num_fresh_pages = num_blocks
        self._leftovers = Leftovers()
        self._offers: OrderedDict[OffloadKey, int] = OrderedDict()
        self._events: EventLog[OffloadingEvent] | None = EventLog() if enable_events else None

    @property
    def num_blocks(self) -> int:
        """Capacity, in offloaded blocks."""
        return self._num_blocks

    def num_free_blocks(self) -> int:
        """Blocks that a store may take without an eviction."""
        return len(self._free_pages) + self._num_fresh_pages

    def num_protected_blocks(self) -> int:
        """Blocks that transfers use now, including transfers that started before a reset."""
        return len(self._loading) + len(self._storing) + len(self._late_pages)

    def is_in_flight(self, key: OffloadKey) -> bool:
        """Return whether a transfer uses the page of a key, even a page that was dropped since."""
        return key in self._loading or key in self._storing or key in self._late_pages

    def num_storable(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of the first of these new keys a store has room for now."""
        return min(len(keys), self._num_blocks - self.num_protected_blocks())

    def loadable_keys(self) -> list[OffloadKey]:
        """Return all keys for which ``lookup`` returns HIT."""
        return [key for key in self._pages if key not in self._storing]

    def pages_of(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Return the pages of keys that are held or being stored, in the given order."""
        return list(map(self._pages.__getitem__, keys))

    def page_of(self, key: OffloadKey) -> int | None:
        """Return the page of a loadable key, or None."""
        return None if key in self._storing else self._pages.get(key)

    def lookup(self, key: OffloadKey, ctx: ReqContext | None = None, /) -> LookupResult:
        """Return whether a key is held and loadable now (OFF-6); its recency does not change."""
        if key not in self._pages:
            return _MISS
        return _HIT_PENDING if key in self._storing else _HIT

    def missing(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that are neither held nor being stored, in the given order."""
        pages = self._pages
        return [key for key in keys if key not in pages]

    def num_leading_hits(self, keys: Sequence[OffloadKey]) -> int:
        """Return the number of leading keys for which ``lookup`` returns HIT."""
        # This runs in C, because one call of lookup per key takes three times as long.
        num_held = indexOf(chain(map(self._pages.__contains__, keys), (False,)), False)
        if not self._storing:
            return num_held
        storing = map(self._storing.__contains__, keys[:num_held])
        return indexOf(chain(storing, (True,)), True)

    def prepare_load(
        self, keys: Collection[OffloadKey], ctx: ReqContext | None = None, /
    ) -> CPULoadStoreSpec:
        """Protect keys until ``complete_load``, one load for each occurrence.

        Returns:
            One page for each key, in the given order.

        Raises:
            KeyNotLoadableError: A key is not held or not ready; nothing was
                protected (OFF-2).
        """
        pages, loading = self._pages, self._loading
        try:
            spec = CPULoadStoreSpec([pages[key] for key in keys])
            if not self._storing.isdisjoint(keys):
                raise KeyError(*self._storing.intersection(keys))
        except KeyError as error:
            key, state = error.args[0], "not held" if error.args[0] not in pages else "not ready"
            raise KeyNotLoadableError(
                f"OFF-2: key {key.hex()} is {state}; only load keys for which lookup returns HIT"
            ) from None
        for key in keys:
            loading[key] = loading.get(key, 0) + 1
        return spec

    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext | None = None, /) -> None:
        """End one load for each occurrence of a key, whether it succeeded or not.

        Raises:
            TransferNotInFlightError: More loads would end than were prepared.
        """
        loading = self._loading
        released = keys
        if list(map(loading.get, keys)).count(1) == len(keys) == len(set(keys)):
            for key in keys:
                del loading[key]
        else:
            released = self._end_shared_loads(keys)
        self._policy.release(released)

    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext | None = None, /) -> None:
        """Count a use of each held key, in flight or not; the first key becomes the most recent."""
        self._policy.touch(list(keys), self._in_flight)

    def prepare_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext | None = None, /
    ) -> PrepareStoreOutput | None:
        """Make room for new keys and protect them until ``complete_store`` (OFF-3).

        Keys that are held, keys below the store threshold, and keys that a transfer older
        than a reset still uses (OFF-8) are skipped.

        Returns:
            The keys to store and their pages, or None if too many keys are in flight to
            make room; then nothing has changed.
        """
        pages = self._pages
        new = self._new_of(keys)
        fresh = set(new)
        if len(fresh) < len(new):
            new = list(dict.fromkeys(new))
        has_held = len(new) < len(keys)
        num_victims = len(new) - self.num_free_blocks()
        kept: list[OffloadKey] = []
        if num_victims > 0:
            loading, storing = self._in_flight
            if has_held:
                kept = [key for key in dict.fromkeys(keys) if key in pages]
                kept = [key for key in kept if key not in loading and key not in storing]
            if num_victims > len(pages) - len(loading) - len(storing) - len(kept):
                return None
        if self._store_threshold > 1:
            offers = self._offers
            for key in reversed(dict.fromkeys(keys)):
                offers[key] = min(offers.pop(key, 0) + 1, self._store_threshold)
            while len(offers) > self._max_tracked_keys:
                offers.popitem(last=False)
        # Offers of keys that are not stored count, too.
        self._leftovers.drop(_DROPPED_PER_KEY * len(keys))
        if not new:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])

        if kept:  # OFF-3: protect them during this call
            self._loading.update(dict.fromkeys(kept, 1))
        victims = self._policy.admit(new, max(num_victims, 0), self._in_flight)
        if kept:
            self.complete_load(kept)
        if victims:
            self._free_pages.extend(map(pages.pop, victims))
            if self._events is not None:
                self._emit(victims, removed=True)
        new_pages = self._take_pages(len(new))
        pages.update(zip(new, new_pages, strict=True))
        self._storing |= fresh
        return PrepareStoreOutput(new, CPULoadStoreSpec(new_pages), victims)

    def _new_of(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the offered keys that a store takes, if there is room."""
        pages = self._pages
        new = [key for key in keys if key not in pages]
        if self._late_pages:
            new = [key for key in new if key not in self._late_pages]
        if self._store_threshold > 1:
            offers, enough = self._offers, self._store_threshold - 1
            new = [key for key in new if offers.get(key, 0) >= enough]
        return new

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext | None = None,
        /,
        success: bool = True,
    ) -> None:
        """End stores; the keys are then loadable or, after a failure, no longer held (OFF-4).

        Raises:
            TransferNotInFlightError: A key is not being stored.
        """
        storing = self._storing
        if not storing.issuperset(keys):
            keys = self._end_late_stores(keys)
        storing.difference_update(keys)
        if success:
            self._policy.release(keys)
            if self._events is not None:
                self._emit(dict.fromkeys(keys), removed=False)
        else:
            failed = dict.fromkeys(keys)
            self._policy.remove(failed)
            self._free_pages.extend(map(self._pages.pop, failed))

    def evict(self, num_keys: int) -> list[OffloadKey]:
        """Evict at most this number of keys that no transfer uses, and return them in order."""
        num_free = len(self._pages) - len(self._loading) - len(self._storing)
        if (num_keys := min(num_keys, num_free)) < 1:
            return []
        victims = self._policy.admit([], num_keys, self._in_flight)
        self._free_pages.extend(map(self._pages.pop, victims))
        self._emit(victims, removed=True)
        return victims

    def discard(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Drop loadable keys whose bytes are lost or no longer needed.

        Loads of these keys continue and are completed as usual. Until then, the keys are neither
        held nor stored again.

        Returns:
            The keys that were held, in the given order.
        """
        gone = [key for key in dict.fromkeys(keys) if self.page_of(key) is not None]
        for key in gone:
            page = self._pages.pop(key)
            if (num_loads := self._loading.pop(key, 0)) > 0:
                self._late_pages[key], self._late_loads[key] = page, num_loads
            else:
                self._free_pages.append(page)
        self._policy.remove(gone)
        self._emit(gone, removed=True)
        return gone

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events since the last call, in order; empty if events are off."""
        return [] if self._events is None else self._events.take()

    def reset(self) -> None:
        """Drop every key, the state of the policy and all counts of offers (OFF-8)."""
        if self._events is not None:
            self._emit([key for key in self._pages if key not in self._storing], removed=True)
        self._late_pages.update((key, self._pages[key]) for key in chain(*self._in_flight))
        self._late_loads.update(self._loading)
        self._storing.clear()
        self._loading.clear()
        late_pages = set(self._late_pages.values())
        self._free_pages.clear()
        self._fresh_pages = filterfalse(late_pages.__contains__, range(self._num_blocks))
        self._num_fresh_pages = self._num_blocks - len(late_pages)
        self._leftovers.add((self._pages, self._offers))
        self._pages, self._offers = {}, OrderedDict()
        if isinstance(self._policy, SupportsLeftovers):
            self._leftovers.add(self._policy.leftovers())
        self._policy = self._make_policy(self._num_blocks)

    def shutdown(self) -> None:
        """Drop every key, like ``reset``; a second call does nothing."""
        self.reset()
        self._leftovers.clear()

    def _take_pages(self, number: int) -> list[int]:
        """Take pages for new keys from the free pages, of which there must be enough."""
        pages = self._free_pages[: -number - 1 : -1]
        del self._free_pages[-number:]
        if (missing := number - len(pages)) > 0:
            pages += islice(self._fresh_pages, missing)
            self._num_fresh_pages -= missing
        return pages

    def _end_shared_loads(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """End loads, even loads older than a reset; return the keys that no load uses now."""
        ended = Counter(keys)
        for key, times in ended.items():
            if (self._loading.get(key) or self._late_loads.get(key, 0)) < times:
                raise _not_in_flight(key, "load")
        released = []
        for key, times in ended.items():
            loads = self._loading if key in self._loading else self._late_loads
            if loads[key] > times:
                loads[key] -= times
                continue
            del loads[key]
            if loads is self._loading:
                released.append(key)
            else:
                self._free_pages.append(self._late_pages.pop(key))
        return released

    def _end_late_stores(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """End the stores that are older than the last reset, and return the other keys."""
        late, loads = self._late_pages, self._late_loads
        for key in keys:
            if key not in self._storing and (key not in late or key in loads):
                raise _not_in_flight(key, "store")
        ended = dict.fromkeys(keys)
        self._free_pages.extend(late.pop(key) for key in ended if key in late)
        return [key for key in ended if key in self._storing]

    def _emit(self, keys: Collection[OffloadKey], *, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(tuple(keys), self._medium, removed))


def _not_in_flight(key: OffloadKey, direction: str) -> TransferNotInFlightError:
    return TransferNotInFlightError(
        f"OFF-9: no {direction} of key {key.hex()} is in flight; complete each transfer once"
    )


def _positive_int(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} must be a positive int, got {value!r}")
    return value


if TYPE_CHECKING:
    _: OffloadingManager = CPUOffloadingManager(1)
