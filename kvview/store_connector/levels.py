"""The keys of one level, as the scheduler half knows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvview.events import OffloadingEvent
from kvview.keys import OffloadKey
from kvview.store_connector.page_policy import Policy


class Level:
    """Keys, their sizes, and a budget.

    1. Room is reserved before a page is written, and becomes a key when it is.
    2. A pinned key is never a victim.

    Args:
        medium: Name of the level in events.
        policy: Order of eviction.
        budget: Of all keys together: blocks, or bytes.
        size: The most bytes of the page of a key, None if the budget counts blocks.
        pins: Number of loads in flight by key, shared with the other level.
        records: Whether events are recorded; an engine without them never takes any.
    """

    def __init__(
        self,
        medium: str,
        policy: Policy,
        budget: int,
        size: Callable[[OffloadKey], int] | None,
        pins: Counter[OffloadKey],
        *,
        records: bool,
    ) -> None:
        self.policy = policy
        self._medium = medium
        self._budget = budget
        self._size = size or (lambda key: 1)
        self._in_bytes = size is not None
        self._pins = pins
        self._records = records
        self._held: dict[OffloadKey, int] = {}
        self._reserved: dict[OffloadKey, int] = {}
        self._used = 0
        self._events: list[OffloadingEvent] = []

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._held)

    def reserve(self, key: OffloadKey) -> list[OffloadKey] | None:
        """Make room for a key that is not held.

        Returns:
            The keys that were evicted for it; None, and nothing was changed, if there is no room.
        """
        size = self._size(key)
        excess = self._used + size - self._budget
        evicted: list[OffloadKey] = []
        if excess > 0:
            found = self._victims(excess)
            if found is None:
                return None
            evicted = self.remove(found)
        self._reserved[key] = size
        self._used += size
        return evicted

    def _victims(self, excess: int) -> dict[OffloadKey, None] | None:
        """Keys to evict for so many blocks or bytes; None if there are not enough."""
        held, pins = self._held, self._pins
        found: dict[OffloadKey, None] = {}
        for key in self.policy.victims():
            if key in held and key not in found and key not in pins:
                found[key] = None
                excess -= held[key]
                if excess <= 0:
                    return found
        return None

    def commit(self, keys: Sequence[OffloadKey], num_bytes: int | None = None) -> None:
        """The pages of reserved keys are written.

        Args:
            keys: The last one is the most recently used.
            num_bytes: Of all these pages, where they took less than was reserved.
        """
        reserved = sum(self._reserved[key] for key in keys)
        for key in keys:
            size = self._reserved.pop(key)
            self._used -= size
            if self._in_bytes and num_bytes is not None:
                size = size * num_bytes // reserved
            self._used += size
            self._held[key] = size
            self.policy.added(key)
        self._record(keys, removed=False)

    def cancel(self, keys: Iterable[OffloadKey]) -> None:
        """Pages of reserved keys were not written."""
        for key in keys:
            self._used -= self._reserved.pop(key)

    def use(self, keys: Iterable[OffloadKey]) -> None:
        """A request uses those of the keys that are held."""
        if self._held:
            for key in keys:
                if key in self._held:
                    self.policy.used(key)

    def remove(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Forget keys; those that were held are returned."""
        gone = [key for key in keys if key in self._held]
        for key in gone:
            self._used -= self._held.pop(key)
            self.policy.removed(key)
        self._record(gone, removed=True)
        return gone

    def take_events(self) -> list[OffloadingEvent]:
        """Changes since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _record(self, keys: Sequence[OffloadKey], *, removed: bool) -> None:
        if keys and self._records:
            self._events.append(OffloadingEvent(keys, self._medium, removed))
