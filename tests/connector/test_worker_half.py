"""The two halves as an engine runs them: apart, and the worker half as it is."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvview import ConfigError, Connector, ConnectorConfig, SchedulerConnector, WorkerConnector
from kvview.testing.connector import check_connector
from kvview_reference.connector.offload import OffloadOptions, OffloadWorker
from tests.mutants.connector import Offload


class SharesThroughSelf(Offload):
    """Its worker half finds the options where the scheduler half left them."""

    def make_scheduler(self) -> SchedulerConnector:
        self.handed = self.options
        return super().make_scheduler()

    def make_worker(self) -> WorkerConnector:
        connector = self

        class Worker(OffloadWorker):
            def start_plan(self, plan: Any) -> None:
                assert isinstance(connector.handed, OffloadOptions)
                super().start_plan(plan)

        return Worker(self.options)


def test_the_halves_share_no_instance() -> None:
    report = check_connector(SharesThroughSelf, seeds=3, max_shrink_runs=0)
    assert report.failures
    assert "'SharesThroughSelf' object has no attribute 'handed'" in report.failures[0].message


class TakesAnything(Connector):
    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)


def test_an_option_that_does_not_pickle_is_said_so() -> None:
    with pytest.raises(ConfigError, match="option 'lock' does not survive pickling"):
        check_connector(TakesAnything, seeds=1, options={"lock": threading.Lock()})
