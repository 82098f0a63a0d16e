"""A connector whose tier is not host memory, in a file of its own."""

from __future__ import annotations

from dataclasses import replace

from kvview import OffloadingEvent
from kvview_reference.store_connector.planning.store_scheduler import StoreScheduler
from tests.connector.halves import WithHalves


class DiskScheduler(StoreScheduler):
    """The scheduler half."""

    def take_events(self) -> list[OffloadingEvent]:
        return [replace(event, medium="DISK") for event in super().take_events()]


class DiskConnector(WithHalves):
    """``StoreConnector`` with the medium DISK."""

    scheduler = DiskScheduler


class SilentScheduler(DiskScheduler):
    """The scheduler half."""

    def take_events(self) -> list[OffloadingEvent]:
        return [event for event in super().take_events() if not event.removed]


class HidesEvictions(WithHalves):
    """Keeps evicted blocks advertised."""

    scheduler = SilentScheduler
