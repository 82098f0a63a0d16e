"""Connectors with code that the check reaches only with the right options."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import BaseModel, ConfigDict

from examples.host_cache import HostCacheScheduler, HostCacheWorker
from kvview import (
    Connector,
    ConnectorConfig,
    SchedulerConnector,
    StepPlan,
    TransferResult,
    WorkerConnector,
)
from kvview.options import parse_options

log = logging.getLogger(__name__)


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    recent_blocks: int = 1 << 20
    cpu_blocks: int = 1000


class Recent:
    """The numbers of jobs, of which only so many are kept."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.jobs: list[int] = []

    def add(self, job_id: int) -> None:
        if job_id < 0:
            raise ValueError(job_id)
        self.jobs.append(job_id)
        while len(self.jobs) > self.limit:
            self.shorten()

    def shorten(self) -> None:
        del self.jobs[0]

    def statistics(self) -> dict[str, int]:
        return {"jobs": len(self.jobs)}


class TwoLevelWorker(HostCacheWorker):
    def __init__(self, options: Options) -> None:
        super().__init__(options.cpu_blocks)
        self.recent = Recent(options.recent_blocks)

    def start_plan(self, plan: StepPlan) -> None:
        for job in plan.stores:
            self.recent.add(job.job_id)
        try:
            super().start_plan(plan)
        except OSError:
            log.exception("a copy failed")
            raise


class TwoLevels(Connector):
    """Right, but its default for ``recent_blocks`` is out of reach for a check."""

    worker: Any = TwoLevelWorker

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.options = parse_options(Options, config.options)

    def make_scheduler(self) -> SchedulerConnector:
        return HostCacheScheduler(self.config, self.options.cpu_blocks)

    def make_worker(self) -> WorkerConnector:
        made: WorkerConnector = self.worker(self.options)
        return made


class CannotRead(TwoLevelWorker):
    """Every load fails: a file is not there."""

    def start_plan(self, plan: StepPlan) -> None:
        super().start_plan(plan)
        self.errors = {job.job_id: self.read() for job in plan.loads}

    def read(self) -> str:
        try:
            with open("/nonexistent/page", "rb"):
                return ""
        except OSError as error:
            return str(error)

    def get_finished(self) -> list[TransferResult]:
        return [
            TransferResult(one.job_id, success=False, error=self.errors[one.job_id])
            if one.job_id in self.errors
            else one
            for one in super().get_finished()
        ]


class CannotLoad(TwoLevels):
    worker = CannotRead
