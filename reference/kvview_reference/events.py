"""Events on their way out: gathered by a pool or a manager, merged over several connectors.

The laws are those of :mod:`kvview.events`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from kvview import OffloadingEvent, OffloadKey

EventT = TypeVar("EventT")


class EventLog(list[EventT]):
    """Events in the order in which they happened, until they are taken (EVENT-3)."""

    def take(self) -> list[EventT]:
        """What came since the last call."""
        events = list(self)
        self.clear()
        return events


class EventMerger:
    """Several sources of events seen as one.

    A key held twice in one medium stays advertised until both have dropped it
    (EVENT-1, EVENT-2).
    """

    def __init__(self) -> None:
        self._holders: Counter[tuple[str, OffloadKey]] = Counter()

    def merge(self, events: Iterable[OffloadingEvent]) -> list[OffloadingEvent]:
        """The events with only those keys that a medium as a whole gained or lost."""
        merged = []
        for event in events:
            keys = [key for key in event.keys if self._changes(event, key)]
            if keys:
                merged.append(replace(event, keys=keys))
        return merged

    def _changes(self, event: OffloadingEvent, key: OffloadKey) -> bool:
        held = event.medium, key
        if not event.removed:
            self._holders[held] += 1
            return self._holders[held] == 1
        self._holders[held] -= 1
        if self._holders[held] > 0:
            return False
        del self._holders[held]
        return True
