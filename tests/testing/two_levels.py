"""Connectors with code that the check reaches only with the right options."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel, ConfigDict

from examples.host_cache import HostCacheScheduler, HostCacheWorker
from kvview import (
    CanonicalKVCaches,
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


class CountsInAThread(TwoLevelWorker):
    """Counts jobs in a thread, which dies of the first."""

    thread: threading.Thread | None = None

    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.queue: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.count, daemon=True)
        self.thread.start()

    def start_plan(self, plan: StepPlan) -> None:
        super().start_plan(plan)
        self.queue.put(plan)

    def count(self) -> None:
        while (plan := self.queue.get()) is not None:
            self.total += len(plan.stores)  # type: ignore[attr-defined]

    def shutdown(self) -> None:
        if self.thread is not None:
            self.queue.put(None)
            self.thread.join()
        super().shutdown()


class ThreadDies(TwoLevels):
    worker = CountsInAThread


class CopiesInAPool(TwoLevelWorker):
    """Copies in a pool of threads, and reads no result of it."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.pool = ThreadPoolExecutor(1)

    def start_plan(self, plan: StepPlan) -> None:
        self.pool.submit(self.copy_all, plan)

    def copy_all(self, plan: StepPlan) -> None:
        if plan.loads:
            raise RuntimeError("no room")
        super().start_plan(plan)

    def wait(self, job_ids: Sequence[int]) -> None:
        self.pool.submit(int).result()
        super().wait(job_ids)

    def shutdown(self) -> None:
        self.pool.shutdown()
        super().shutdown()


class PoolKeepsErrors(TwoLevels):
    worker = CopiesInAPool


class RaisesInAHelper(TwoLevels):
    class worker(TwoLevelWorker):
        def start_plan(self, plan: StepPlan) -> None:
            self.check(plan)
            super().start_plan(plan)

        def check(self, plan: StepPlan) -> None:
            plan.stores += []  # type: ignore[misc, operator]
