"""A connector of a run: two halves, each built separately and wrapped in a harness."""

from __future__ import annotations

from typing_extensions import override

from kvview import Connector, ConnectorConfig, SchedulerConnector, WorkerConnector
from kvview.handoff import require_no_wire
from kvview.testing.connector.half.hook_calls import make_half
from kvview.testing.connector.half.job_by_job import JobByJob
from kvview.testing.connector.half.process import RemoteWorker
from kvview.testing.connector.half.scheduler import Record, SchedulerHarness
from kvview.testing.connector.half.whole_plans import WholePlans
from kvview.testing.connector.half.worker import Shared, WorkerHarness


class ConnectorInHarness(Connector):
    """A connector for the engine, with both halves in their harnesses.

    Each half is made by a separate instance of the connector, with an equal, pickled configuration,
    so that the halves share no data through ``self``.

    Args:
        connector_class: The connector.
        config: The pickled configuration.
        shared: Objects of the run.
    """

    def __init__(self, connector_class: type[Connector], config: bytes, shared: Shared) -> None:
        geometry = shared.scenario.geometry
        super().__init__(ConnectorConfig(geometry))
        self.record = Record(geometry, max(1, len(shared.scenario.ranks)))
        self.workers: list[WorkerHarness] = []
        """The harness of the worker half of each rank."""
        self.halves: list[SchedulerConnector | WorkerConnector] = []
        """The halves in this process."""
        self._connector_class = connector_class
        self._config = config
        self._shared = shared

    @override
    def make_scheduler(self) -> SchedulerConnector:
        half: SchedulerConnector = make_half("make_scheduler", self._connector_class, self._config)
        require_no_wire(half, self._connector_class.__qualname__)
        self.halves.append(half)
        shared = self._shared
        self.scheduler = SchedulerHarness(
            half, self.record, shared.log, lambda blocks: shared.engine().ref_counts(blocks)
        )
        return self.scheduler

    @override
    def make_worker(self) -> WorkerConnector:
        half: WorkerConnector
        worker_half = self._shared.scenario.worker_half
        if worker_half == "in_a_process":
            half = RemoteWorker(self._connector_class, self._config)
        else:
            half = make_half("make_worker", self._connector_class, self._config)
            self.halves.append(half)
        harness = WholePlans if worker_half == "whole_plans" else JobByJob
        self.workers.append(harness(half, self._shared, self.record))
        return self.workers[-1]
