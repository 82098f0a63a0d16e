"""The keys of one level: budget, order of eviction and events."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from kvview.events import OffloadingEvent
from kvview.keys import OffloadKey
from kvview.store_connector.page_policy import Policy


class Level:
    """Keys, their sizes, and a budget.

    1. Room is reserved before a page is written. The key is held when the page is written.
    2. A pinned key is never evicted.

    Args:
        medium: Name of the level in events.
        policy: Order of eviction.
        budget: Budget of all keys together, in blocks or bytes.
        size: Returns the most blocks or bytes that the page of a key takes.
        pins: Keys of the pages that are being loaded.
        records: Whether events are recorded; an engine without events never takes them.
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
        evicted = self._victims(self._used + size - self._budget)
        if evicted is not None:
            self.remove(evicted)
            self._reserved[key] = size
            self._used += size
        return evicted

    def _victims(self, excess: int) -> list[OffloadKey] | None:
        """Return keys to evict for so many blocks or bytes; None if there are not enough."""
        if excess <= 0:
            return []
        found: dict[OffloadKey, None] = {}
        for key in self.policy.victims():
            if key in self._held and key not in found and key not in self._pins:
                found[key] = None
                excess -= self._held[key]
                if excess <= 0:
                    return list(found)
        return None

    def commit(self, keys: Sequence[OffloadKey], share: float = 1.0) -> None:
        """Hold reserved keys, whose pages are written.

        Args:
            keys: The last one is the most recently used.
            share: Fraction of the reserved size that the pages take.
        """
        for key in keys:
            reserved = self._reserved.pop(key)
            self._held[key] = size = int(reserved * share)
            self._used += size - reserved
            self.policy.added(key)
        self._record(keys, removed=False)

    def reserved(self, keys: Iterable[OffloadKey]) -> int:
        """Return the size that is reserved for keys."""
        return sum(self._reserved[key] for key in keys)

    def cancel(self, keys: Iterable[OffloadKey]) -> None:
        """Return the room of reserved keys, whose pages were not written."""
        for key in keys:
            self._used -= self._reserved.pop(key)

    def use(self, keys: Iterable[OffloadKey]) -> None:
        """Count a use of those of the keys that are held."""
        held, used = self._held, self.policy.used
        for key in keys if held else ():
            if key in held:
                used(key)

    def remove(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Forget keys, and return those that were held."""
        gone = [key for key in keys if key in self._held]
        for key in gone:
            self._used -= self._held.pop(key)
            self.policy.removed(key)
        self._record(gone, removed=True)
        return gone

    def take_events(self) -> list[OffloadingEvent]:
        """Return the changes since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _record(self, keys: Sequence[OffloadKey], *, removed: bool) -> None:
        if keys and self._records:
            self._events.append(OffloadingEvent(keys, self._medium, removed))
