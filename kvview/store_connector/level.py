"""The keys of one level, with their budget, order of eviction and events."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from kvview.events import OffloadingEvent
from kvview.keys import OffloadKey
from kvview.store_connector.page_policy import Policy


class Level:
    """The keys of one level and their sizes, within a budget.

    1. Room is reserved before a page is written. The level holds the key once the page is written.
    2. A pinned key is never evicted.

    Args:
        medium: Name of the level in events.
        policy: Order of eviction.
        budget: Budget of all keys together, in blocks or bytes.
        size: Returns the maximum of blocks or bytes that the page of a key takes.
        pins: Keys of the pages that are being loaded.
        records: Whether events are recorded. False if the engine does not call ``take_events``.
    """

    def __init__(
        self,
        medium: str,
        policy: Policy,
        budget: int,
        size: Callable[[OffloadKey], int],
        pins: Container[OffloadKey],
        *,
        records: bool,
    ) -> None:
        self.policy = policy
        self._medium = medium
        self._budget = budget
        self._size = size
        self._pins = pins
        self._records = records
        self.held: dict[OffloadKey, int] = {}
        """The size of each key that is held."""
        self._reserved: dict[OffloadKey, int] = {}
        self._used = 0
        self._events: list[OffloadingEvent] = []

    def reserve(self, keys: Sequence[OffloadKey]) -> tuple[Sequence[OffloadKey], list[OffloadKey]]:
        """Make room for keys that are not held.

        Returns:
            The first keys, as many as there is room for, and the evicted keys.
        """
        free, evictable = self._budget - self._used, self._evictable()
        evicted: list[OffloadKey] = []
        for number, key in enumerate(keys):
            size = self._size(key)
            while free < size and (victim := next(evictable, None)) is not None:
                evicted.append(victim)
                free += self.held[victim]
            if free < size:
                keys = keys[:number]
                break
            free -= size
            self._reserved[key] = size
            self._used += size
        return keys, self.remove(evicted)

    def _evictable(self) -> Iterator[OffloadKey]:
        seen: set[OffloadKey] = set()
        for key in self.policy.victims():
            if key in self.held and key not in seen and key not in self._pins:
                seen.add(key)
                yield key

    def commit(self, keys: Sequence[OffloadKey], share: float = 1.0) -> None:
        """Hold reserved keys whose pages were written.

        Args:
            keys: The last one is the most recently used.
            share: Fraction of the reserved size that the pages take.
        """
        for key in keys:
            reserved = self._reserved.pop(key)
            self.held[key] = size = int(reserved * share)
            self._used += size - reserved
        self.policy.added(keys)
        self._record(keys, removed=False)

    def reserved(self, keys: Iterable[OffloadKey]) -> int:
        """Return the size that is reserved for keys."""
        return sum(self._reserved[key] for key in keys)

    def cancel(self, keys: Iterable[OffloadKey]) -> None:
        """Release the room of reserved keys whose pages were not written."""
        for key in keys:
            self._used -= self._reserved.pop(key)

    def use(self, keys: Iterable[OffloadKey]) -> None:
        """Count a use of the keys; keys that are not held are ignored."""
        held = self.held
        if held and (used := [key for key in keys if key in held]):
            self.policy.used(used)

    def remove(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Forget keys, and return the keys that were held."""
        gone = [key for key in keys if key in self.held]
        for key in gone:
            self._used -= self.held.pop(key)
        self.policy.removed(gone)
        self._record(gone, removed=True)
        return gone

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _record(self, keys: Sequence[OffloadKey], *, removed: bool) -> None:
        if keys and self._records:
            self._events.append(OffloadingEvent(keys, self._medium, removed))
