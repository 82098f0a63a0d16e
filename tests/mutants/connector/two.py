"""Two connectors of a kind side by side, which need the view."""

from __future__ import annotations

from kvview import EngineFacts, SchedulerConnector, ViewNotBoundError, WorkerConnector
from kvview_reference.connector.multi import MultiScheduler, MultiWorker
from kvview_reference.connector.offload import OffloadConnector, OffloadScheduler


class NeedsTheView(OffloadScheduler):
    """Raises if it was not bound."""

    def on_engine_ready(self, facts: EngineFacts) -> None:
        if self._view is None:
            raise ViewNotBoundError("this connector needs the view of the block pool")
        super().on_engine_ready(facts)


class Two(OffloadConnector):
    """Two of a kind."""

    def make_scheduler(self) -> SchedulerConnector:
        halves = [NeedsTheView(self.config, self.options) for _ in range(2)]
        return MultiScheduler(halves)

    def make_worker(self) -> WorkerConnector:
        return MultiWorker([super().make_worker(), super().make_worker()])
