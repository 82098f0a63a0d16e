"""The log of events of a pool or a manager (EVENT-3)."""

from __future__ import annotations

from typing import TypeVar

EventT = TypeVar("EventT")


class EventLog(list[EventT]):
    """The events since the last call of :meth:`take`, in the order of the changes (EVENT-3)."""

    def take(self) -> list[EventT]:
        """Return the events since the last call."""
        events = list(self)
        self.clear()
        return events
