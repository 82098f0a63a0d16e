"""Where each page is, and the moves between memory and the store that keep it so."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvview.events import MEDIUM_CPU, MEDIUM_STORAGE, OffloadingEvent
from kvview.geometry import CacheGeometry
from kvview.keys import OffloadKey, get_offload_group_idx
from kvview.store_connector.levels import Level
from kvview.store_connector.page_policy import Policy
from kvview.store_connector.store_plan import EPOCH_BYTES, Move
from kvview.tier import GuardedTier

Mode = Literal["eager", "finish", "victim", "exclusive"]

_LONGEST_WAIT = 0.001  # seconds in each step for lookups, which saves most of them a step
_MAX_FAILED = 1 << 16  # keys of a shared store that are remembered because they did not load


@dataclass(frozen=True)
class Behaviour:
    """The choices of one connector.

    Args:
        mode: The moment at which blocks are stored.
        prefetch: Whether pages go from the store to memory when they are promised.
        memory: Budget of the level in memory; 0 for no such level.
        is_in_bytes: Whether that is bytes, not blocks.
        store: Budget of the store in blocks; 0 for no store.
        can_delete: Whether pages are deleted from the store.
        policy: Makes the policy of a level.
        max_bytes: The most bytes that a page of so many bytes needs.
        shared: Lookups in a store that other runs use as well; None for a store of this run.
        events: Whether events are recorded.
    """

    mode: Mode
    prefetch: bool
    memory: int
    is_in_bytes: bool
    store: int
    can_delete: bool
    policy: Callable[[], Policy]
    max_bytes: Callable[[int], int]
    shared: GuardedTier | None
    events: bool

    @property
    def targets(self) -> tuple[bool, bool]:
        """Whether a block is stored in memory, and in the store."""
        writes_through = self.mode in ("eager", "finish")
        in_memory = self.memory > 0
        return in_memory, self.store > 0 and (writes_through or not in_memory)


class PageIndex:
    """The keys of both levels.

    1. A page has a name besides its key: it ends with the epoch, which is another one in each
       run and after each reset, so that no page of other weights is ever read.
    2. Moves take effect here at once; the worker half makes them in the same order.

    Args:
        geometry: Of the engine.
        behaviour: Choices of the author and the user.
    """

    def __init__(self, geometry: CacheGeometry, behaviour: Behaviour) -> None:
        self._geometry = geometry
        self._behaviour = behaviour
        self._targets = behaviour.targets
        self._page_bytes: Sequence[int] = ()
        self._epoch = os.urandom(EPOCH_BYTES)
        self._pins: Counter[OffloadKey] = Counter()
        size = self._bytes_of if behaviour.is_in_bytes else None
        level = partial(Level, pins=self._pins, records=behaviour.events)
        self.memory = level(MEDIUM_CPU, behaviour.policy(), behaviour.memory, size)
        self.store = level(MEDIUM_STORAGE, behaviour.policy(), behaviour.store, None)
        self._storing: set[OffloadKey] = set()
        self._failed: dict[OffloadKey, None] = {}
        self._moves: list[tuple[Move, bytes]] = []
        self._answered = threading.Event()
        self._has_waited = False  # in this step
        if behaviour.shared is not None:
            behaviour.shared.on_wake_up(self._answered.set)

    def start(self, page_bytes: Sequence[int]) -> None:
        """Receive the bytes of a page, per group, before anything is stored."""
        self._page_bytes = page_bytes
        if self._behaviour.shared is not None:
            layout = repr((self._geometry, tuple(page_bytes)))
            self._epoch = hashlib.blake2b(layout.encode(), digest_size=EPOCH_BYTES).digest()

    def name(self, key: OffloadKey) -> bytes:
        """The name of a page now."""
        return key + self._epoch

    def _bytes_of(self, key: OffloadKey) -> int:
        return self._behaviour.max_bytes(self._page_bytes[get_offload_group_idx(key)])

    # --- lookups ---

    def __contains__(self, key: object) -> bool:
        return key in self.memory or key in self.store

    def is_new(self, key: OffloadKey) -> bool:
        """Whether a key is held nowhere, and no store of it is in flight."""
        return key not in self and key not in self._storing

    def look_up(self, keys: Sequence[OffloadKey]) -> Mapping[OffloadKey, bool | None]:
        """Ask a shared store for the keys that memory does not hold; None is not known yet."""
        shared = self._behaviour.shared
        if shared is None:
            return {}
        keys = [key for key in keys if key not in self.memory]
        names = [self.name(key) for key in keys]
        self._answered.clear()
        flags = shared.lookup(names)
        if None in flags and not self._has_waited:
            self._has_waited = True
            self._answered.wait(_LONGEST_WAIT)
            flags = shared.lookup(names)
        found = dict(zip(keys, flags, strict=True))
        self.store.remove([key for key, flag in found.items() if flag is False])
        return found | {key: False for key in keys if key in self._failed}

    # --- pages that requests use ---

    def use(self, keys: Sequence[OffloadKey]) -> None:
        """Count a use of a prefix; its head is the most recent, because chains lose their tail."""
        for level in (self.memory, self.store):
            level.use(reversed(keys))

    def pin(self, keys: Iterable[OffloadKey]) -> None:
        """Keep keys from being evicted, once for each call."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        """End one :meth:`pin` of the keys."""
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def fetch(self, keys: Iterable[OffloadKey]) -> None:
        """Have memory hold pinned pages of the store, where there is room for them."""
        behaviour = self._behaviour
        if not behaviour.memory or not behaviour.store:
            return
        leaves = behaviour.mode == "exclusive" and behaviour.can_delete
        for key in keys:
            if key not in self.memory and self._reserve_in_memory(key):
                self._moves.append((Move.RAISE if leaves else Move.FETCH, self.name(key)))
                self.memory.commit([key])
                if leaves:
                    self.store.remove([key])

    def loaded(self, keys: Iterable[OffloadKey], *, leave_memory: bool) -> None:
        """Pages were loaded; those that another run has stored are held from now on."""
        for key in keys:
            if self.is_new(key) and self._reserve_in_store(key):
                self.store.commit([key])
        if leave_memory:
            self._drop(key for key in keys if not self._pins[key])

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Make keys a miss until they are stored again, because a page of theirs did not load."""
        keys = list(dict.fromkeys(keys))
        self._drop(keys)
        gone = self.store.remove(keys)
        if self._behaviour.shared is None:
            self._delete(gone)
            return
        self._failed.update(dict.fromkeys(keys))
        while len(self._failed) > _MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    # --- pages that are stored ---

    def reserve(self, key: OffloadKey) -> bool:
        """Reserve the places of a new page; False, and nothing is reserved, without room."""
        in_memory, in_store = self._targets
        if in_memory and not self._reserve_in_memory(key):
            return False
        if in_store and not self._reserve_in_store(key):
            if in_memory:
                self.memory.cancel([key])
            return False
        self._storing.add(key)
        return True

    def end_store(
        self, keys: Sequence[OffloadKey], moved: set[OffloadKey], num_bytes: int | None
    ) -> None:
        """End the store of reserved keys.

        Args:
            keys: All of them, in the order of their prefix.
            moved: The keys that are held from now on.
            num_bytes: Of their pages in memory, where that is known.
        """
        lost = [key for key in keys if key not in moved]
        kept = [key for key in reversed(keys) if key in moved]
        self._storing.difference_update(keys)
        in_memory, in_store = self._targets
        if in_memory:
            self.memory.commit(kept, num_bytes)
            self.memory.cancel(lost)
            self._moves += [(Move.DROP, self.name(key)) for key in lost]
        if in_store:
            self.store.commit(kept)
            self.store.cancel(lost)
            self._delete(lost)
        for key in kept:
            self._failed.pop(key, None)

    def _reserve_in_memory(self, key: OffloadKey) -> bool:
        """Reserve a place in memory; the pages that it displaces move down, or are forgotten."""
        victims = self.memory.reserve(key)
        for victim in victims or ():
            moves_down = self._behaviour.store > 0 and victim not in self.store
            if moves_down and self._reserve_in_store(victim):
                self.store.commit([victim])
                self._moves.append((Move.DEMOTE, self.name(victim)))
            else:
                self._moves.append((Move.DROP, self.name(victim)))
        return victims is not None

    def _reserve_in_store(self, key: OffloadKey) -> bool:
        victims = self.store.reserve(key)
        self._delete(victims or ())
        return victims is not None

    # --- the rest ---

    def reset(self) -> None:
        """Forget everything."""
        self._drop(list(self.memory))
        gone = self.store.remove(list(self.store))
        if self._behaviour.shared is None:
            self._delete(gone)
        self._failed.clear()
        self._epoch = os.urandom(EPOCH_BYTES)

    def take_moves(self) -> list[tuple[Move, bytes]]:
        """Moves for the worker half since the last call, once in each step, in order."""
        self._has_waited = False
        moves, self._moves = self._moves, []
        return moves

    def take_events(self) -> list[OffloadingEvent]:
        """Changes since the last call, if they are recorded."""
        return self.memory.take_events() + self.store.take_events()

    def close(self) -> None:
        """Release the store that answers lookups."""
        if self._behaviour.shared is not None:
            self._behaviour.shared.close()

    def _drop(self, keys: Iterable[OffloadKey]) -> None:
        self._moves += [(Move.DROP, self.name(key)) for key in self.memory.remove(keys)]

    def _delete(self, keys: Iterable[OffloadKey]) -> None:
        if self._behaviour.can_delete:
            self._moves += [(Move.DELETE, self.name(key)) for key in keys]
