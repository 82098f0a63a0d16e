"""Two connectors of a kind side by side, which need the view."""

from __future__ import annotations

from kvview import (
    ConfigError,
    ConnectorConfig,
    EngineFacts,
    SchedulerConnector,
    ViewNotBoundError,
    WorkerConnector,
)
from kvview_reference.connector import MultiScheduler, MultiWorker
from kvview_reference.store_connector.planning.store_scheduler import StoreScheduler
from tests.connector.halves import WithHalves


class NeedsTheView(StoreScheduler):
    """Raises if it was not bound."""

    def on_engine_ready(self, facts: EngineFacts) -> None:
        if self._view is None:
            raise ViewNotBoundError("this connector needs the view of the block pool")
        super().on_engine_ready(facts)


class Two(WithHalves):
    """Two of a kind, without events."""

    scheduler = NeedsTheView

    def __init__(self, config: ConnectorConfig) -> None:
        if "enable_events" in config.options:
            raise ConfigError("the events of two connectors are not merged")
        super().__init__(config)

    def make_scheduler(self) -> SchedulerConnector:
        return MultiScheduler([super(Two, self).make_scheduler() for _ in range(2)])

    def make_worker(self) -> WorkerConnector:
        return MultiWorker([super().make_worker(), super().make_worker()])
