"""The example connector with faults, in a file of its own as users write them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from kvview import (
    ConnectorConfig,
    SchedulerConnector,
    StepPlan,
    TransferResult,
    WorkerConnector,
)
from kvview.targets import load_connector

_EXAMPLE = Path(__file__).parents[2] / "examples" / "host_cache.py"
_HostCache: Any = load_connector(f"{_EXAMPLE}:HostCacheConnector")
_HostCacheWorker: Any = vars(sys.modules[_HostCache.__module__])["HostCacheWorker"]

HalfT = TypeVar("HalfT", SchedulerConnector, WorkerConnector)


class FailingConnector(_HostCache):  # type: ignore[misc]
    """All its loads fail."""

    def make_worker(self) -> WorkerConnector:
        worker: WorkerConnector = _FailingWorker(self.cpu_blocks)
        return worker


class _FailingWorker(_HostCacheWorker):  # type: ignore[misc]
    def start_plan(self, plan: StepPlan) -> None:
        super().start_plan(StepPlan(stores=plan.stores))
        self.finished += [
            TransferResult(job.job_id, success=False, error="planted") for job in plan.loads
        ]


class LaterConnector(_HostCache):  # type: ignore[misc]
    """Needs a later version of the contract."""

    contract_version = "1.7"


class BrokenConnector(_HostCache):  # type: ignore[misc]
    """Raises in every call of one hook; option ``fails_in`` is its name."""

    def __init__(self, config: ConnectorConfig) -> None:
        options = dict(config.options)
        self.fails_in = options.pop("fails_in")
        super().__init__(replace(config, options=options))
        self.fail("__init__")

    def make_scheduler(self) -> SchedulerConnector:
        self.fail("make_scheduler")
        scheduler: SchedulerConnector = super().make_scheduler()
        return self.break_hook(scheduler)

    def make_worker(self) -> WorkerConnector:
        self.fail("make_worker")
        worker: WorkerConnector = super().make_worker()
        return self.break_hook(worker)

    def break_hook(self, half: HalfT) -> HalfT:
        name = self.fails_in.partition(".")[2]
        if self.fails_in.startswith(type(half).__mro__[1].__name__):
            object.__setattr__(half, name, lambda *_: self.fail(self.fails_in))
        return half

    def fail(self, name: str) -> None:
        if name == self.fails_in:
            raise RuntimeError("planted")
