"""A :class:`StoreConnector` with places for other halves."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from kvview import SchedulerConnector, WorkerConnector
from kvview_reference.store_connector import StoreConnector
from kvview_reference.store_connector.planning.store_scheduler import StoreScheduler
from kvview_reference.store_connector.worker import HostWorker


class WithHalves(StoreConnector):
    """Keeps blocks in host memory; subclasses name other halves."""

    scheduler: ClassVar[type[StoreScheduler]] = StoreScheduler
    worker: ClassVar[type[HostWorker]] = HostWorker

    @override
    def make_scheduler(self) -> SchedulerConnector:
        half = super().make_scheduler()
        if not isinstance(half, StoreScheduler):  # without host memory
            return half
        return self.scheduler(half._geometry, half._settings)

    @override
    def make_worker(self) -> WorkerConnector:
        return self.worker(self._num_host_pages) if self._num_host_pages else WorkerConnector()
