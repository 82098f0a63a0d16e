"""The harness of a worker half whose jobs start one by one, when they are due."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from typing_extensions import override

from kvview import StepPlan, TransferResult, WorkerConnector
from kvview.testing.connector.half.hook_calls import calling
from kvview.testing.connector.half.scheduler import Record
from kvview.testing.connector.half.worker import KVCaches, Shared, WorkerHarness
from kvview.testing.connector.judge.jobs import PlannedJob, Start, blocks_of_loads, starts_of


class JobByJob(WorkerHarness):
    """Starts each job when it is due, and corrupts the bytes of a job that must fail.

    1. A job is due after the steps that were launched before it (XFER-6), and after earlier jobs on
       one of its pages. All due jobs are started in the order of their plans before the harness
       waits for one of them. So the worker half must keep the order of jobs that share a page
       (XFER-3).
    2. A job with a simulated failure runs alone. A store by key receives the right bytes
       nevertheless, because a key determines its bytes (KEY-2): the medium may keep them and refuse
       the bytes of a later store.
    """

    _compares_loads = False

    def __init__(self, half: WorkerConnector, shared: Shared, record: Record) -> None:
        super().__init__(half, shared, record)
        self._queue: list[Start] = []

    @override
    def shutdown(self) -> None:
        self._call("shutdown")

    @override
    def _call(self, name: str, *args: Any) -> Any:
        with calling(name):
            return getattr(self._half, name)(*args)

    @override
    def _shown(self, kv_caches: KVCaches) -> KVCaches:
        return kv_caches

    @override
    def _start(self, plan: StepPlan, jobs: Sequence[PlannedJob]) -> None:
        self._queue += starts_of(plan, jobs)

    @override
    def _advance(self) -> None:
        """Start the due jobs; jobs without a simulated failure run at the same time."""
        last_prompt_load = self._last_prompt_load()
        waiting: list[Start] = []
        together: list[Start] = []
        for place, start in enumerate(self._queue):
            is_due = start.is_due and not any(map(start.must_follow, waiting))
            if not is_due and place > last_prompt_load:
                waiting.append(start)
            elif start.may_overlap:
                together.append(start)
            else:
                self._run(together)
                self._run([start])
                together = []
        self._run(together)
        self._queue = waiting

    def _last_prompt_load(self) -> int:
        """Return the index of the last queued load; -1 if loads may end in a later step."""
        if self._scenario.loads_may_be_late:
            return -1
        places = [i for i, start in enumerate(self._queue) if any(j.is_load for j in start.jobs)]
        return places[-1] if places else -1

    def _run(self, starts: Sequence[Start]) -> None:
        """Start jobs, and wait for all of them."""
        if not starts:
            return
        jobs = [job for start in starts for job in start.jobs]
        self._pages.note()
        failing = self._blocks_to_corrupt(jobs)
        rows = self._pages.rows(failing)
        self._pages.corrupt(failing)
        for start in starts:
            for job in start.jobs:
                job.is_started = True
            self._call("start_plan", start.plan)
        for start in reversed(starts):
            self._call("wait", [job.job_id for job in start.jobs])
        self._poll()
        self._pages.restore(failing, rows)
        self._pages.check_writes(jobs, lambda: blocks_of_loads(jobs))
        self._check_ended(jobs)
        for job in jobs:
            if job.is_load:
                self._pages.corrupt(job.failing_blocks)

    def _blocks_to_corrupt(self, jobs: Sequence[PlannedJob]) -> set[int]:
        """Return the source blocks of stores that must fail, unless another store needs them.

        This also counts the blocks of each store that arrive nevertheless.
        """
        stores = [job for job in jobs if not job.is_load]
        failing = {block for job in stores for block in job.failing_blocks}
        for job in stores:
            self._pages.check_source(job)
            if job.fate.outcome == "ok":
                failing.difference_update(job.gpu_blocks)
        for job in stores:
            job.num_moved = len(list(takewhile(lambda block: block not in failing, job.gpu_blocks)))
        return failing - {b for job in stores if job.keeps_by_key for b in job.gpu_blocks}

    @override
    def _take_result(self, job: PlannedJob, result: TransferResult) -> None:
        if job.fate.outcome == "ok":
            job.result = result
        elif not job.num_moved or not result.success:
            job.result = job.failed()
        else:
            moved = [number < job.num_moved for number in range(len(job.gpu_blocks))]
            job.result = job.failed(moved)
