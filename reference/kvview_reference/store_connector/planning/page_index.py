"""The place of each page (memory, store), and the changes of place for the worker half."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, takewhile
from typing import Literal

from kvview.connector import FullBlock, RequestInfo
from kvview.events import MEDIUM_STORAGE, OffloadingEvent
from kvview.geometry import CacheGeometry
from kvview.keys import OffloadKey, get_offload_group_idx
from kvview.offloading import LookupResult
from kvview.tier import GuardedTier
from kvview.transfer import CPULoadStoreSpec
from kvview_reference.offloading import ByteBudgetManager, CPUOffloadingManager, PolicyFactory
from kvview_reference.store_connector.store_plan import EPOCH_BYTES, PagePlace, StoreSpec

Mode = Literal["eager", "finish", "victim", "exclusive"]

_LONGEST_WAIT = 0.001  # seconds per step to wait for lookups; most requests then wait no step
_MAX_FAILED = 1 << 16  # keys that are remembered because a job of the key failed
_HIT = LookupResult.HIT


@dataclass(frozen=True)
class TierSettings:
    """The choices of the author and the user for both levels.

    Args:
        mode: The moment at which blocks are stored.
        prefetch: Whether pages are copied from the store to memory when their tokens are promised.
        memory_blocks: Blocks in memory; 0 for no pages in memory, or for a budget in bytes.
        memory_bytes: Bytes in memory; 0 for no pages in memory, or for a budget in blocks.
        store_blocks: Budget of the store in blocks; 0 for no store.
        can_delete: Whether pages are deleted from the store.
        policy: Name of a policy, or a callable that makes one; each level has its own.
        store_threshold: Number of times that a block must be computed before it is stored.
        max_bytes: Returns the maximum of bytes that a page of a given size takes after the
            transform.
        shared: Store for lookups of pages that other runs may have stored; None if the store is not
            shared.
        has_names: Whether the worker half finds pages by name; otherwise all are in host pages.
        events: Whether events are recorded.
        admits: Whether a computed block is stored; None to store every block.
    """

    mode: Mode
    prefetch: bool
    memory_blocks: int
    memory_bytes: int
    store_blocks: int
    can_delete: bool
    policy: str | PolicyFactory
    store_threshold: int
    max_bytes: Callable[[int], int]
    shared: GuardedTier | None
    has_names: bool
    events: bool
    admits: Callable[[FullBlock, RequestInfo], bool] | None

    @property
    def targets(self) -> tuple[bool, bool]:
        """Whether a block is stored in memory, and in the store."""
        writes_through = self.mode in ("eager", "finish")
        in_memory = self.memory_blocks + self.memory_bytes > 0
        return in_memory, self.store_blocks > 0 and (writes_through or not in_memory)


Level = CPUOffloadingManager
Pins = list[tuple[Level, Sequence[OffloadKey]]]
"""Keys that are protected from eviction, in the levels that held them."""


class PageIndex:
    """The keys of both levels, each with a manager.

    1. The name of a page is its key and an epoch. Each run and each reset has its own epoch, so
       that pages of other weights are never read. In a shared store, pages of earlier runs and of
       the time before a reset stay until the store evicts them.
    2. Places change immediately in this index; the worker half moves the pages with the next plan.
    3. A page that is being loaded keeps its place. If a load of a page failed, lookups of the page
       miss at once, and the page loses its place when its last load has ended.

    Args:
        geometry: Geometry of the engine.
        settings: Choices of the author and the user.
        page_bytes: Page size of each group in bytes.
    """

    def __init__(
        self, geometry: CacheGeometry, settings: TierSettings, page_bytes: Sequence[int]
    ) -> None:
        self._settings = settings
        self._in_memory, self._in_store = settings.targets
        self._max_bytes = list(map(settings.max_bytes, page_bytes))
        self.memory = self._make_memory()
        self.store: Level | None = None
        if settings.store_blocks:
            self.store = CPUOffloadingManager(
                settings.store_blocks,
                settings.policy,
                settings.events,
                store_threshold=1 if self.memory else settings.store_threshold,
                medium=MEDIUM_STORAGE,
            )
        self._levels = [level for level in (self.memory, self.store) if level is not None]
        self._epoch = os.urandom(EPOCH_BYTES)
        self._failed: dict[OffloadKey, None] = {}
        self._moved: dict[OffloadKey, None] = {}
        self._places: list[PagePlace] = []
        self._answered = threading.Event()
        self._has_waited = False  # whether a lookup was waited for in this step
        if settings.shared is not None:
            settings.shared.on_wake_up(self._answered.set)
            layout = repr((geometry, tuple(page_bytes)))
            self._epoch = hashlib.blake2b(layout.encode(), digest_size=EPOCH_BYTES).digest()

    def _make_memory(self) -> Level | None:
        settings = self._settings
        common = (settings.policy, settings.events)
        if settings.memory_blocks:
            return CPUOffloadingManager(
                settings.memory_blocks, *common, store_threshold=settings.store_threshold
            )
        if not settings.memory_bytes:
            return None
        return ByteBudgetManager(
            settings.memory_bytes,
            lambda keys: [self._max_bytes[get_offload_group_idx(key)] for key in keys],
            max(self._max_bytes),
            *common,
            store_threshold=settings.store_threshold,
        )

    @property
    def num_blocks(self) -> int:
        """Number of blocks for which both levels together certainly have room."""
        settings = self._settings
        in_bytes = settings.memory_bytes // max(self._max_bytes)
        return settings.memory_blocks + in_bytes + settings.store_blocks

    # --- lookups ---

    def num_leading_hits(self, keys: Sequence[OffloadKey]) -> int:
        """Return the number of leading keys whose pages a level holds."""
        num_hits = 0
        while num_hits < len(keys):
            rest = keys[num_hits:] if num_hits else keys
            found = max(level.num_leading_hits(rest) for level in self._levels)
            num_hits += found
            if not found or len(self._levels) == 1:
                break
        return num_hits

    def num_leading_hits_or(self, unknown: set[OffloadKey], keys: Sequence[OffloadKey]) -> int:
        """Return the number of leading keys that a level holds or whose lookup has not ended."""
        is_there = (key in unknown or self.num_leading_hits([key]) > 0 for key in keys)
        return sum(takewhile(bool, is_there))

    def num_leading_in_memory(self, keys: Sequence[OffloadKey]) -> int:
        """Return the number of leading keys whose pages memory holds."""
        return self.memory.num_leading_hits(keys) if self.memory is not None else 0

    def is_in_memory(self, key: OffloadKey) -> bool:
        """Whether memory holds the page of a key."""
        return self.memory is not None and self.memory.lookup(key) is _HIT

    def new(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that may be stored: no level holds them, and no job stores or loads them.

        Args:
            keys: Keys, each named once.
        """
        new = list(keys)
        for level in self._levels:
            new = level.missing(new)
        if self._failed:
            new = [key for key in new if not (key in self._failed and self._is_in_flight(key))]
        return new

    def _is_in_flight(self, key: OffloadKey) -> bool:
        return any(level.is_in_flight(key) for level in self._levels)

    def look_up(self, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        """Look keys up in a shared store; returns the keys whose results are still unknown."""
        shared, store = self._settings.shared, self.store
        if shared is None or store is None:
            return set()
        asked = [key for key in keys if not (self.is_in_memory(key) or key in self._failed)]
        names = self.names(asked)
        self._answered.clear()
        flags = shared.lookup(names)
        if None in flags and not self._has_waited:
            self._has_waited = True
            self._answered.wait(_LONGEST_WAIT)
            flags = shared.lookup(names)
        found = list(zip(asked, flags, strict=True))
        store.discard(k for k, flag in found if flag is False and not self._is_in_flight(k))
        self._commit_in_store(self.new(dict.fromkeys(key for key, flag in found if flag)))
        return {key for key, flag in found if flag is None}

    # --- pages that requests use ---

    def use(self, keys: Sequence[OffloadKey]) -> None:
        """Count a use of a prefix, so that its last key is evicted before its first key."""
        for level in self._levels:
            level.touch(keys)

    def pin(self, keys: Iterable[OffloadKey]) -> Pins:
        """Protect pages from eviction until :meth:`unpin`."""
        pins: Pins = []
        for level in self._levels:
            held = [key for key in keys if level.lookup(key) is _HIT]
            level.prepare_load(held)
            pins.append((level, held))
        return pins

    def unpin(self, pins: Pins) -> None:
        """End the protection of pages."""
        for level, keys in pins:
            level.complete_load(keys)
        if not self._failed:
            return
        for key in dict.fromkeys(key for _, keys in pins for key in keys):
            if key in self._failed and not self._is_in_flight(key):
                self._moved[key] = None
                if self._settings.shared is None:
                    del self._failed[key]

    def prepare_load(self, keys: Sequence[OffloadKey]) -> tuple[StoreSpec | CPULoadStoreSpec, Pins]:
        """Protect pages, move those of the store to memory if it has room, and name them all."""
        if not self._settings.has_names and self.memory is not None:
            return self.memory.prepare_load(keys), [(self.memory, keys)]
        pins = self.pin(keys)
        pins += self.pin_fetched(keys)
        return StoreSpec(self.names(keys)), pins

    def pin_fetched(self, keys: Iterable[OffloadKey]) -> Pins:
        """Move protected pages of the store to memory, as far as it has room, and protect them."""
        memory, store = self.memory, self.store
        if memory is None or store is None:
            return []
        fetched = self._reserve_in_memory(memory.missing(dict.fromkeys(keys)))
        memory.complete_store(fetched)
        memory.prepare_load(fetched)
        self._moved.update(dict.fromkeys(fetched))
        if self._settings.mode == "exclusive" and self._settings.can_delete:
            store.discard(fetched)
        return [(memory, fetched)]

    def leave_memory(self, keys: Iterable[OffloadKey]) -> None:
        """Forget the pages in memory that were loaded, because the GPU now has their KV."""
        if self.memory is not None:
            memory = self.memory
            gone = memory.discard(key for key in keys if not memory.is_in_flight(key))
            self._moved.update(dict.fromkeys(gone))

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Make pinned keys a miss until they are stored again, because a load failed."""
        keys = dict.fromkeys(keys)
        for level in self._levels:
            level.discard(keys)
        self._fail(keys)

    def _fail(self, keys: Iterable[OffloadKey]) -> None:
        """Make keys a miss, although a shared store may have their pages."""
        self._failed.update(dict.fromkeys(keys))
        while len(self._failed) > _MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    # --- pages that are stored ---

    def prepare_store(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Reserve places for new pages; returns the keys that are stored, in order."""
        if self._in_memory:
            keys = self._reserve_in_memory(keys)
        if self._in_store:
            fitting = self._reserve_in_store(keys)
            if self.memory is not None and len(fitting) < len(keys):
                stored = set(fitting)
                lost = [key for key in keys if key not in stored]
                self.memory.complete_store(lost, success=False)
            keys = fitting
        return keys

    def store_spec(self, keys: Sequence[OffloadKey]) -> StoreSpec | CPULoadStoreSpec:
        """Return the names and host pages of keys that :meth:`prepare_store` returned."""
        pages = [] if self.memory is None else self.memory.pages_of(keys)
        if not self._settings.has_names:
            return CPULoadStoreSpec(pages)
        return StoreSpec(self.names(keys), pages, self._in_store)

    def end_store(
        self, keys: Sequence[OffloadKey], lost: Collection[OffloadKey], num_bytes: int | None
    ) -> None:
        """End the store of reserved keys.

        Args:
            keys: All keys of the store, in prefix order.
            lost: The keys whose pages were not written.
            num_bytes: Bytes of the stored pages in memory, or None if unknown.
        """
        kept = [key for key in keys if key not in lost] if lost else keys
        self._moved.update(dict.fromkeys(lost))
        if self._settings.shared is not None:
            self._fail(lost)
        for level, is_target in ((self.memory, self._in_memory), (self.store, self._in_store)):
            if level is not None and is_target:
                level.complete_store(kept)
                if lost:
                    level.complete_store(lost, success=False)
        if isinstance(self.memory, ByteBudgetManager) and num_bytes is not None:
            self.memory.resize(kept, num_bytes)
        if self._in_store and (shared := self._settings.shared) is not None:
            shared.note_stored(self.names(kept))
        for key in kept if self._failed else ():
            self._failed.pop(key, None)

    def _reserve_in_memory(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Reserve places in memory; displaced pages move to the store, if there is one."""
        fitting, displaced = _reserve(self.memory, keys)
        self._moved.update(dict.fromkeys(displaced))
        if (store := self.store) is not None:
            self._commit_in_store(store.missing(reversed(displaced)))
        return fitting

    def _commit_in_store(self, keys: Sequence[OffloadKey]) -> None:
        if self.store is not None:
            self.store.complete_store(self._reserve_in_store(keys))

    def _reserve_in_store(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        fitting, displaced = _reserve(self.store, keys)
        self._moved.update(dict.fromkeys(displaced))
        return fitting

    # --- the rest ---

    def names(self, keys: Iterable[OffloadKey]) -> list[bytes]:
        """Return the current names of pages."""
        epoch = self._epoch
        return [key + epoch for key in keys]

    def reset(self) -> None:
        """Forget everything."""
        for level in self._levels:
            self._moved.update(dict.fromkeys(level.loadable_keys()))
            level.reset()
        self._collect_places()
        self._failed.clear()
        self._epoch = os.urandom(EPOCH_BYTES)

    def take_places(self) -> list[PagePlace]:
        """Return the pages whose place changed since the last call; called once in each step."""
        self._has_waited = False
        self._collect_places()
        places, self._places = self._places, []
        return places

    def _collect_places(self) -> None:
        moved, settings = self._moved, self._settings
        if not settings.has_names:
            moved.clear()  # the specs of jobs name host pages
        if not moved:
            return
        memory, store = self.memory, self.store
        names = self.names(moved)
        in_store = [store is not None and store.lookup(key) is _HIT for key in moved]
        host_pages = [None if memory is None else memory.page_of(key) for key in moved]
        self._places += map(PagePlace, names, host_pages, in_store)
        moved.clear()
        if (shared := settings.shared) is not None:
            shared.note_stored([*compress(names, in_store)])

    def take_events(self) -> list[OffloadingEvent]:
        """Return the changes since the last call, if they are recorded."""
        return [event for level in self._levels for event in level.take_events()]


def _reserve(
    level: Level | None, keys: Sequence[OffloadKey]
) -> tuple[Sequence[OffloadKey], Sequence[OffloadKey]]:
    """Reserve places for the first of some new keys, as many as fit.

    Returns:
        The keys that have a place, and the keys that were evicted for them.
    """
    if level is None or not (fitting := keys[: level.num_storable(keys)]):
        return [], []
    output = level.prepare_store(fitting)
    return (output.keys_to_store, output.evicted_keys) if output else ([], [])
