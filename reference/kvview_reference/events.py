"""The log of events of a pool or a manager, and the merge of events of several connectors.

Laws: EVENT-1 to EVENT-3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from kvview import OffloadingEvent, OffloadKey

EventT = TypeVar("EventT")


class EventLog(list[EventT]):
    """The events since the last call of :meth:`take`, in the order of the changes (EVENT-3)."""

    def take(self) -> list[EventT]:
        """Return the events since the last call."""
        events = list(self)
        self.clear()
        return events


class EventMerger:
    """A merge of the events of several sources.

    If two sources hold a key in one medium, its removal is reported only when both sources have
    dropped the key (EVENT-1, EVENT-2).
    """

    def __init__(self) -> None:
        self._holders: Counter[tuple[str, OffloadKey]] = Counter()

    def merge(self, events: Iterable[OffloadingEvent]) -> list[OffloadingEvent]:
        """Return the events without keys that another source still holds, or held before."""
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
