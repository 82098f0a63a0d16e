"""The keys of one level, with their budget, order of eviction and events."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

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
        sizes: Returns the maximum of blocks or bytes that the page of each key takes.
        pins: Keys of the pages that are being loaded.
        records: Whether events are recorded. False if the engine does not call ``take_events``.
    """

    def __init__(
        self,
        medium: str,
        policy: Policy,
        budget: int,
        sizes: Callable[[Sequence[OffloadKey]], list[int]],
        pins: Container[OffloadKey],
        *,
        records: bool,
    ) -> None:
        self.policy = policy
        self._medium = medium
        self._budget = budget
        self._sizes = sizes
        self._pins = pins
        self._records = records
        self.held: dict[OffloadKey, int] = {}
        """The size of each key that is held."""
        self.reserved: dict[OffloadKey, int] = {}
        """The size of each key whose page is being written."""
        self._used = 0
        self._events: list[OffloadingEvent] = []

    def reserve(self, keys: Sequence[OffloadKey]) -> tuple[Sequence[OffloadKey], list[OffloadKey]]:
        """Make room for keys that are not held.

        Returns:
            The first of the keys, as many as fit, and the evicted keys.
        """
        sizes, held, pins = self._sizes(keys), self.held, self._pins
        lacking = self._used + sum(sizes) - self._budget
        evicted: dict[OffloadKey, None] = {}
        for key in self.policy.victims() if lacking > 0 else ():
            if key in held and key not in pins and key not in evicted:
                evicted[key] = None
                lacking -= held[key]
                if lacking <= 0:
                    break
        while lacking > 0 and sizes:
            lacking -= sizes.pop()
        keys = keys[: len(sizes)]
        self.reserved.update(zip(keys, sizes, strict=True))
        self._used += sum(sizes)
        return keys, self.remove(evicted)

    def commit(self, keys: Sequence[OffloadKey], share: float = 1.0) -> None:
        """Hold reserved keys whose pages were written.

        Args:
            keys: The last key becomes the most recently used.
            share: Fraction of the reserved size that the pages take.
        """
        reserved = list(map(self.reserved.pop, keys))
        sizes = reserved if share == 1.0 else [int(size * share) for size in reserved]
        self.held.update(zip(keys, sizes, strict=True))
        self._used += sum(sizes) - sum(reserved)
        self.policy.added(keys)
        self._record(keys, removed=False)

    def cancel(self, keys: Iterable[OffloadKey]) -> None:
        """Release the room of reserved keys whose pages were not written."""
        self._used -= sum(map(self.reserved.pop, keys))

    def use(self, keys: Iterable[OffloadKey]) -> None:
        """Count a use of the keys; keys that are not held are ignored."""
        held = self.held
        if held and (used := [key for key in keys if key in held]):
            self.policy.used(used)

    def remove(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Forget keys, and return the keys that were held."""
        gone = [key for key in keys if key in self.held]
        self._used -= sum(map(self.held.pop, gone))
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
