"""The example with copies that run some steps after their plan, unless a caller waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from examples.host_cache import HostCacheConnector, HostCacheWorker
from kvview import ComputeEvent, StepPlan, TransferJob, TransferResult, WorkerConnector

LATE_POLLS = 3


class LateWorker(HostCacheWorker):
    """Copies some polls later, or when a caller waits."""

    def __init__(self, cpu_blocks: int) -> None:
        super().__init__(cpu_blocks)
        self.num_polls = 0
        self.queue: list[tuple[int, ComputeEvent | None, StepPlan]] = []  # one job each

    def start_plan(self, plan: StepPlan) -> None:
        due = self.num_polls + LATE_POLLS
        mark = self.compute.record_event() if self.compute else None
        self.queue += [(due, mark, StepPlan(loads=[job])) for job in plan.loads]
        self.queue += [(due, mark, StepPlan(stores=[job])) for job in plan.stores]

    def get_finished(self) -> list[TransferResult]:
        self.num_polls += 1
        self.copy_if(lambda due, plan: due <= self.num_polls)
        return super().get_finished()

    def wait(self, job_ids: Sequence[int]) -> None:
        self.copy_if(lambda due, plan: jobs_of(plan)[0].job_id in job_ids)

    def copy_if(self, is_due: Callable[[int, StepPlan], bool]) -> None:
        queue, self.queue = self.queue, []
        for due, mark, plan in queue:
            if is_due(due, plan) and (mark is None or mark.query()):
                self.copy_now(plan)
            else:
                self.queue.append((due, mark, plan))

    def copy_now(self, plan: StepPlan) -> None:
        self.started.append((None, plan))
        self.copy_started()

    def copy(
        self, job_id: int, src: Any, src_pages: list[Any], dst: Any, dst_pages: list[Any]
    ) -> TransferResult:
        try:
            return super().copy(job_id, src, src_pages, dst, dst_pages)
        except RuntimeError as error:
            return TransferResult(job_id, success=False, error=str(error))


def jobs_of(plan: StepPlan) -> list[TransferJob]:
    """Return all jobs of a plan, loads first."""
    return [*plan.loads, *plan.stores]


class Late(HostCacheConnector):
    """The example, with late copies."""

    def make_worker(self) -> WorkerConnector:
        return LateWorker(self.cpu_blocks)


class FlakyWorker(LateWorker):
    """Copies half of the pages in every third job, and reports that it failed."""

    def __init__(self, cpu_blocks: int) -> None:
        super().__init__(cpu_blocks)
        self.num_copies = 0

    def copy(
        self, job_id: int, src: Any, src_pages: list[Any], dst: Any, dst_pages: list[Any]
    ) -> TransferResult:
        self.num_copies += 1
        if self.num_copies % 3:
            return super().copy(job_id, src, src_pages, dst, dst_pages)
        for pages in dst_pages:
            for page in dst.block_ids[len(dst.block_ids) // 2 :]:
                pages[page].fill_(0x5A)
        return TransferResult(job_id, success=False, error="injected: every third copy fails")


class Flaky(HostCacheConnector):
    """The example, with a medium that fails every third time."""

    def make_worker(self) -> WorkerConnector:
        return FlakyWorker(self.cpu_blocks)
