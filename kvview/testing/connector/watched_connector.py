"""A connector of a run: two halves, each built separately and wrapped in a harness."""

from __future__ import annotations

import pickle

from typing_extensions import override

from kvview import Connector, ConnectorConfig, SchedulerConnector, WorkerConnector
from kvview.connector.hook_errors import build_connector
from kvview.testing.connector.hook_calls import hook, make_worker, require_type
from kvview.testing.connector.process import RemoteWorker
from kvview.testing.connector.watch import Record, WatchedScheduler
from kvview.testing.connector.worker import Shared, WorkerHarness


class WatchedConnector(Connector):
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
        with hook("make_scheduler", "CONN-1"):
            connector = build_connector(self._connector_class, pickle.loads(self._config))
            half = connector.make_scheduler()
        require_type("make_scheduler", half, "CONN-1")
        self.halves.append(half)
        shared = self._shared
        self.scheduler = WatchedScheduler(
            half, self.record, shared.log, lambda: shared.engine().free_block_ids()
        )
        return self.scheduler

    @override
    def make_worker(self) -> WorkerConnector:
        half: WorkerConnector
        if self._shared.scenario.worker_half == "in_a_process":
            half = RemoteWorker(self._connector_class, self._config)
        else:
            half = make_worker(self._connector_class, self._config)
            self.halves.append(half)
        self.workers.append(WorkerHarness(half, self._shared, self.record))
        return self.workers[-1]
