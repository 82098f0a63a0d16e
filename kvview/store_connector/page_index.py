"""The place of each page (memory, store), and the changes of place for the worker half."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import compress

from kvview.events import MEDIUM_CPU, MEDIUM_STORAGE, OffloadingEvent
from kvview.geometry import CacheGeometry
from kvview.keys import OffloadKey, get_offload_group_idx
from kvview.store_connector.behaviour import Behaviour
from kvview.store_connector.level import Level
from kvview.store_connector.store_plan import EPOCH_BYTES, PagePlace

_LONGEST_WAIT = 0.001  # seconds per step to wait for lookups; most requests then wait no step
_MAX_FAILED = 1 << 16  # keys that are remembered because a job of the key failed


class PageIndex:
    """The keys of both levels.

    1. The name of a page is its key and an epoch. Each run and each reset has its own epoch, so
       that pages of other weights are never read.
    2. Places change immediately in this index; the worker half moves the pages with the next plan.
    3. A page that is being loaded keeps its place. If a load of a page failed, lookups of the page
       miss at once, and the page loses its place when its last load has ended.

    Args:
        geometry: Geometry of the engine.
        behaviour: Choices of the author and the user.
    """

    def __init__(self, geometry: CacheGeometry, behaviour: Behaviour) -> None:
        self._geometry = geometry
        self._behaviour = behaviour
        self._targets = behaviour.targets
        self._page_bytes: Sequence[int] = ()
        self._epoch = os.urandom(EPOCH_BYTES)
        self._pins: Counter[OffloadKey] = Counter()
        level = partial(Level, pins=self._pins, records=behaviour.events)
        in_memory = self._bytes_of if behaviour.is_in_bytes else _one_block_each
        self.memory = level(MEDIUM_CPU, behaviour.policy(), behaviour.memory, in_memory)
        self.store = level(MEDIUM_STORAGE, behaviour.policy(), behaviour.store, _one_block_each)
        self._in_memory, self._in_store = self.memory.held, self.store.held
        self._storing = (self.memory if self._targets[0] else self.store).reserved
        self._failed: dict[OffloadKey, None] = {}
        self._moved: dict[OffloadKey, None] = {}
        self._places: list[PagePlace] = []
        self._answered = threading.Event()
        self._has_waited = False  # whether a lookup was waited for in this step
        if behaviour.shared is not None:
            behaviour.shared.on_wake_up(self._answered.set)

    def start(self, page_bytes: Sequence[int]) -> None:
        """Receive the page size of each group in bytes, before any page is stored."""
        self._page_bytes = page_bytes
        if self._behaviour.shared is not None:
            layout = repr((self._geometry, tuple(page_bytes)))
            self._epoch = hashlib.blake2b(layout.encode(), digest_size=EPOCH_BYTES).digest()

    def names(self, keys: Iterable[OffloadKey]) -> list[bytes]:
        """Return the current names of pages."""
        epoch = self._epoch
        return [key + epoch for key in keys]

    def _bytes_of(self, keys: Sequence[OffloadKey]) -> list[int]:
        most = list(map(self._behaviour.max_bytes, self._page_bytes))
        return [most[get_offload_group_idx(key)] for key in keys]

    @property
    def num_blocks(self) -> int:
        """Number of blocks for which both levels together certainly have room."""
        behaviour, memory = self._behaviour, self._behaviour.memory
        if behaviour.is_in_bytes:
            memory //= max(map(behaviour.max_bytes, self._page_bytes))
        return memory + behaviour.store

    # --- lookups ---

    def __contains__(self, key: object) -> bool:
        return key in self._in_memory or key in self._in_store

    def new(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that may be stored: no level holds them, and no job stores or loads them.

        A key occurs once in the result.
        """
        in_memory, in_store, storing = self._in_memory, self._in_store, self._storing
        new = [
            key
            for key in dict.fromkeys(keys)
            if key not in in_memory and key not in in_store and key not in storing
        ]
        if self._failed:
            new = [key for key in new if not (key in self._failed and key in self._pins)]
        return new

    def look_up(self, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        """Look keys up in a shared store; returns the keys whose results are still unknown."""
        shared = self._behaviour.shared
        if shared is None:
            return set()
        asked = [key for key in keys if not (key in self._in_memory or key in self._failed)]
        names = self.names(asked)
        self._answered.clear()
        flags = shared.lookup(names)
        if None in flags and not self._has_waited:
            self._has_waited = True
            self._answered.wait(_LONGEST_WAIT)
            flags = shared.lookup(names)
        found = list(zip(asked, flags, strict=True))
        self.store.remove(key for key, flag in found if flag is False and key not in self._pins)
        self._commit_in_store(self.new(key for key, flag in found if flag))
        return {key for key, flag in found if flag is None}

    # --- pages that requests use ---

    def use(self, keys: Sequence[OffloadKey]) -> None:
        """Count a use of a prefix, so that its last key is evicted before its first key."""
        for level in (self.memory, self.store):
            level.use(reversed(keys))

    def pin(self, keys: Iterable[OffloadKey]) -> None:
        """Protect pages from eviction until as many calls of :meth:`unpin`."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        """End one :meth:`pin` of the keys."""
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                if key in self._failed:
                    self._moved[key] = None
                    if self._behaviour.shared is None:
                        del self._failed[key]

    def fetch(self, keys: Iterable[OffloadKey]) -> None:
        """Move pinned pages of the store into memory, as far as there is room for them."""
        behaviour = self._behaviour
        if not behaviour.memory or not behaviour.store:
            return
        absent = [key for key in dict.fromkeys(keys) if key not in self._in_memory]
        fetched = self._reserve_in_memory(absent)
        self.memory.commit(fetched)
        self._moved.update(dict.fromkeys(fetched))
        if behaviour.mode == "exclusive" and behaviour.can_delete:
            self.store.remove(fetched)

    def leave_memory(self, keys: Iterable[OffloadKey]) -> None:
        """Forget the pages in memory that were loaded, because the GPU now has their KV."""
        self._moved.update(
            dict.fromkeys(self.memory.remove(key for key in keys if key not in self._pins))
        )

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Make pinned keys a miss until they are stored again, because a load failed."""
        keys = dict.fromkeys(keys)
        self.memory.remove(keys)
        self.store.remove(keys)
        self._fail(keys)

    def _fail(self, keys: Iterable[OffloadKey]) -> None:
        """Make keys a miss, although a shared store may have their pages."""
        self._failed.update(dict.fromkeys(keys))
        while len(self._failed) > _MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    # --- pages that are stored ---

    def reserve(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Reserve places for new pages; returns the first of the keys, as many as fit."""
        in_memory, in_store = self._targets
        fitting = self._reserve_in_memory(keys) if in_memory else keys
        if in_store:
            keys, fitting = fitting, self._reserve_in_store(fitting)
            if in_memory:
                self.memory.cancel(keys[len(fitting) :])
        return fitting

    def end_store(
        self, keys: Sequence[OffloadKey], lost: Collection[OffloadKey], num_bytes: int | None
    ) -> None:
        """End the store of reserved keys.

        Args:
            keys: All keys of the store, in prefix order.
            lost: The keys whose pages were not written.
            num_bytes: Bytes of the stored pages in memory, or None if unknown.
        """
        kept = [key for key in keys[::-1] if key not in lost] if lost else keys[::-1]
        self._moved.update(dict.fromkeys(lost))
        if self._behaviour.shared is not None:
            self._fail(lost)
        in_memory, in_store = self._targets
        if in_memory:
            share = 1.0
            if self._behaviour.is_in_bytes and num_bytes is not None and kept:
                share = num_bytes / sum(map(self.memory.reserved.__getitem__, kept))
            self.memory.commit(kept, share)
            self.memory.cancel(lost)
        if in_store:
            self.store.commit(kept)
            self.store.cancel(lost)
            if (shared := self._behaviour.shared) is not None:
                shared.note(self.names(kept), is_stored=True)
        for key in kept if self._failed else ():
            self._failed.pop(key, None)

    def _reserve_in_memory(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Reserve places in memory; displaced pages move to the store, if there is one."""
        fitting, displaced = self.memory.reserve(keys)
        self._moved.update(dict.fromkeys(displaced))
        if self._behaviour.store:
            self._commit_in_store([key for key in displaced if key not in self._in_store])
        return fitting

    def _commit_in_store(self, keys: Sequence[OffloadKey]) -> None:
        self.store.commit(self._reserve_in_store(keys))

    def _reserve_in_store(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        fitting, displaced = self.store.reserve(keys)
        self._moved.update(dict.fromkeys(displaced))
        return fitting

    # --- the rest ---

    def reset(self) -> None:
        """Forget everything."""
        for level in (self.memory, self.store):
            self._moved.update(dict.fromkeys(level.remove(list(level.held))))
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
        moved = self._moved
        names, in_store = self.names(moved), [key in self._in_store for key in moved]
        in_memory = map(self._in_memory.__contains__, moved)
        self._places += zip(names, in_memory, in_store, strict=True)
        moved.clear()
        if (shared := self._behaviour.shared) is not None:
            if self._behaviour.can_delete:
                shared.note(names, is_stored=False)
            shared.note([*compress(names, in_store)], is_stored=True)

    def take_events(self) -> list[OffloadingEvent]:
        """Return the changes since the last call, if they are recorded."""
        return self.memory.take_events() + self.store.take_events()

    def close(self) -> None:
        """Close the store that lookups use."""
        if self._behaviour.shared is not None:
            self._behaviour.shared.close()


def _one_block_each(keys: Sequence[OffloadKey]) -> list[int]:
    return [1] * len(keys)
