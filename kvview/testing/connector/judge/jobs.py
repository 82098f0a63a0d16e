"""Transfer jobs, from their plan to their report, and the order in which they may start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvview import (
    ComputeEvent,
    LoadStoreSpec,
    OffloadKey,
    StepPlan,
    TransferJob,
    TransferResult,
)
from kvview.testing.connector.scenario.scenario import Fate

_Page = tuple[str, int | None]  # medium and page; None for a medium without numbered pages


@dataclass(eq=False)
class PlannedJob:
    """A transfer job, from its plan until its report.

    A job is planned, started (passed to the worker half), ended (it has a result) and reported, in
    this order.

    Args:
        transfer: The job as the connector planned it.
        is_load: Whether the job is a load.
        fate: Delay of the copy, delay of the report, and outcome of the job.
        gpu_blocks: GPU blocks that the job reads or writes.
        block_keys: Keys of the KV in each source block of a store at the time of the plan.
        mark: Event in the compute stream before the job (XFER-6); None if compute does not lag.
    """

    transfer: TransferJob
    is_load: bool
    fate: Fate
    gpu_blocks: list[int]
    block_keys: dict[int, tuple[OffloadKey, ...]] = field(default_factory=dict)
    mark: ComputeEvent | None = None
    expected: Mapping[int, OffloadKey] = field(default_factory=dict)
    """The key that a load must write into each block; empty if page numbers are not compared."""
    on_ranks: list[PlannedJob] = field(default_factory=list)
    """The instances of this job on all ranks, including this one."""
    rows: list[torch.Tensor] = field(default_factory=list)
    """Bytes of the GPU blocks before the transfer, tensor by tensor, once they are computed."""
    age: int = 0
    is_started: bool = False
    may_fail: bool = False
    """Whether a failure is simulated in this job or in a job that runs at the same time."""
    result: TransferResult | None = None
    num_moved: int = 0
    """Number of blocks of a failing store that arrive nevertheless: the first blocks of the job."""

    def __post_init__(self) -> None:
        self.may_fail = self.fate.outcome != "ok"

    @property
    def job_id(self) -> int:
        """Id of the job."""
        return self.transfer.job_id

    @property
    def keys(self) -> set[OffloadKey]:
        """Keys that a store copies."""
        return {key for keys in self.block_keys.values() for key in keys}

    @property
    def has_ended(self) -> bool:
        """Whether the job has a result on each rank."""
        return all(job.result is not None for job in self.on_ranks)

    @property
    def stored_keys(self) -> set[OffloadKey]:
        """Keys that an ended store has stored on each rank."""
        return set.intersection(*(job._stored_keys for job in self.on_ranks))

    @property
    def _stored_keys(self) -> set[OffloadKey]:
        """Keys that a store has stored on its rank: all, none, or the keys of moved blocks."""
        if self.result is None or self.result.success:
            return self.keys if self.result else set()
        moved = zip(self.gpu_blocks, self.result.moved or (), strict=False)
        return {key for block, is_moved in moved if is_moved for key in self.block_keys[block]}

    @property
    def is_computed(self) -> bool:
        """Whether the steps that were launched before the job are computed."""
        return self.mark is None or self.mark.query()

    @property
    def is_due(self) -> bool:
        """Whether the bytes of the job may move now."""
        return self.is_computed and self.age >= self.fate.move_after

    @property
    def keeps_by_key(self) -> bool:
        """Whether a store keeps its pages by key, because its medium has no numbered pages."""
        return not self.is_load and _numbers_of(self.transfer.dst) is None

    @property
    def failing_blocks(self) -> list[int]:
        """Blocks that are not copied because of the job's fate."""
        moved = {"ok": len(self.gpu_blocks), "half": len(self.gpu_blocks) // 2, "none": 0}
        return self.gpu_blocks[moved[self.fate.outcome] :]

    def failed(self, moved: Sequence[bool] | None = None) -> TransferResult:
        """Make the result of a simulated failure."""
        return TransferResult(self.job_id, False, error=f"simulated: {self.fate}", moved=moved)

    def meets(self, other: PlannedJob) -> bool:
        """Whether two jobs touch a page that one of them writes."""
        (reads, writes), (other_reads, other_writes) = self._pages(), other._pages()
        return _overlap(writes, other_writes | other_reads) or _overlap(reads, other_writes)

    def _pages(self) -> tuple[set[_Page], set[_Page]]:
        return _pages(self.transfer.src), _pages(self.transfer.dst)


@dataclass(eq=False)
class Start:
    """A future call of ``start_plan``, with its plan and its jobs."""

    plan: StepPlan
    jobs: list[PlannedJob]

    @property
    def is_due(self) -> bool:
        """Whether the bytes of the first job may move now."""
        return not self.jobs or self.jobs[0].is_due

    @property
    def may_overlap(self) -> bool:
        """Whether the call may overlap with other calls: a plain plan without failing jobs."""
        return is_plain(self.plan) and all(job.fate.outcome == "ok" for job in self.jobs)

    def must_follow(self, other: Start) -> bool:
        """Whether an earlier start must come first: both touch a page, or a plan is not plain."""
        if not (is_plain(self.plan) and is_plain(other.plan)):
            return True
        return any(job.meets(before) for job in self.jobs for before in other.jobs)


def is_plain(plan: StepPlan) -> bool:
    """Whether a plan has no data besides its jobs."""
    return type(plan) is StepPlan


def starts_of(plan: StepPlan, jobs: Sequence[PlannedJob]) -> Iterator[Start]:
    """Split a plan into one start per job; a plan of a subclass is not split."""
    if not is_plain(plan):
        yield Start(plan, list(jobs))
        return
    for job in jobs:
        alone = [job.transfer]
        yield Start(StepPlan(alone, []) if job.is_load else StepPlan([], alone), [job])


def blocks_of_loads(jobs: Iterable[PlannedJob]) -> set[int]:
    """GPU blocks that the loads among these jobs write."""
    return {block for job in jobs if job.is_load for block in job.gpu_blocks}


def _numbers_of(spec: LoadStoreSpec) -> Sequence[int] | None:
    numbers: Sequence[int] | None = getattr(spec, "block_ids", None)
    return numbers


def _pages(spec: LoadStoreSpec) -> set[_Page]:
    ids = _numbers_of(spec)
    return {(spec.medium, number) for number in ids} if ids is not None else {(spec.medium, None)}


def _overlap(pages: set[_Page], others: set[_Page]) -> bool:
    if pages & others:
        return True
    media = {medium for medium, _ in others}
    return any(
        (page is None and medium in media) or (medium, None) in others for medium, page in pages
    )
