"""Two connectors of a kind side by side, which need the view, and a spy that misses no call."""

from __future__ import annotations

from kvview import EngineFacts, SchedulerConnector, ViewNotBoundError, WorkerConnector
from kvview_reference.connector.multi import MultiScheduler, MultiWorker
from kvview_reference.store_connector.planning.store_scheduler import StoreScheduler
from tests.connector.halves import WithHalves
from tests.connector.spy import SpyScheduler, SpyWorker


class NeedsTheView(StoreScheduler):
    """Raises if it was not bound."""

    def on_engine_ready(self, facts: EngineFacts) -> None:
        if self._view is None:
            raise ViewNotBoundError("this connector needs the view of the block pool")
        super().on_engine_ready(facts)


class Two(WithHalves):
    """Two of a kind, and a spy."""

    scheduler = NeedsTheView

    def make_scheduler(self) -> SchedulerConnector:
        halves = [super(Two, self).make_scheduler() for _ in range(2)]
        return MultiScheduler([*halves, SpyScheduler()])

    def make_worker(self) -> WorkerConnector:
        return MultiWorker([super().make_worker(), super().make_worker(), SpyWorker()])
