"""A connector whose tier is not host memory, in a file of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvview import OffloadingEvent, SchedulerConnector
from kvview_reference.store_connector import StoreConnector
from kvview_reference.store_connector.scheduler import StoreScheduler


class DiskConnector(StoreConnector):
    """``StoreConnector`` with the medium DISK."""

    def make_scheduler(self) -> SchedulerConnector:
        return DiskScheduler(self.config, self.options)


class DiskScheduler(StoreScheduler):
    """The scheduler half."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        return [replace(event, medium="DISK") for event in super().take_events()]


class HidesEvictions(DiskConnector):
    """Keeps evicted blocks advertised."""

    def make_scheduler(self) -> SchedulerConnector:
        return SilentScheduler(self.config, self.options)


class SilentScheduler(DiskScheduler):
    """The scheduler half."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        return [event for event in super().take_events() if not event.removed]
