"""The harness of a worker half: late, failed, lost and overlapping transfers.

A mock worker that completes each job at once hides most bugs (vLLM #46014). In this harness each
job has a fate: its bytes move some steps after its plan, and it is reported some steps later, out
of order, as a failure, or only when no other work is left. When bytes must move, the harness waits
for the worker half, so the timing of threads has no effect.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar

import torch
from typing_extensions import override

from kvview import (
    CanonicalKVCaches,
    StepPlan,
    TransferJob,
    TransferResult,
    WorkerConnector,
)
from kvview.testing.connector.half.hook_calls import hook, require_type
from kvview.testing.connector.half.scheduler import Record
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.connector.judge.jobs import (
    PlannedJob,
    blocks_of_loads,
    is_plain,
)
from kvview.testing.connector.judge.plan_checks import (
    check_held,
    check_load,
    check_store,
    gpu_blocks,
)
from kvview.testing.connector.judge.run_log import RunLog
from kvview.testing.connector.judge.tier_model import GPUPages
from kvview.testing.connector.run.compute_stream import StepStream
from kvview.testing.connector.run.engine import SimulatedEngine
from kvview.testing.connector.scenario.scenario import Fate, Scenario

_MUCH_LATER = 1_000  # steps

KVCaches = CanonicalKVCaches[torch.Tensor]


@dataclass(frozen=True)
class Shared:
    """Objects of a run that the harnesses of all its connectors share.

    Args:
        scenario: The run.
        fates: Fates of the jobs by the order of their plans.
        engine: Returns the engine; called after the engine was built.
        blocks_to_load: Returns the blocks that loads in flight of all connectors write.
        stream: The compute stream of the engine, if it lags.
        log: Log of the last hooks and transfers.
    """

    scenario: Scenario
    fates: Iterator[Fate]
    engine: Callable[[], SimulatedEngine]
    blocks_to_load: Callable[[], set[int]]
    stream: StepStream | None
    log: RunLog


class WorkerHarness(WorkerConnector, ABC):
    """Passes jobs to the worker half, and reports them according to their fates.

    A subclass decides how jobs start: :class:`~kvview.testing.connector.half.job_by_job.JobByJob`
    or :class:`~kvview.testing.connector.half.whole_plans.WholePlans`.

    1. A plan of a subclass of ``StepPlan`` may contain more than its jobs, so it starts as a whole,
       when its first job is due and after all earlier plans.
    2. The engine's ``wait`` does nothing, because the engine must work with every delay. Lost jobs
       are reported after :meth:`release_lost`.

    Args:
        half: The worker half.
        shared: Shared objects of the run.
        record: The model of the connector's tier, and its counts.
    """

    _compares_loads: ClassVar[bool]
    """Whether the bytes of a load are compared with those before its copy."""

    def __init__(self, half: WorkerConnector, shared: Shared, record: Record) -> None:
        self._half = half
        self._scenario = shared.scenario
        self._engine = shared.engine
        self._all_blocks_to_load = shared.blocks_to_load
        self._stream = shared.stream
        self._fates = shared.fates
        self._record = record
        self._jobs: dict[int, PlannedJob] = {}
        self._num_blocks = 0
        self._on_rank = ""  # for messages
        self._is_lost_over = False
        self.num_reported = 0

    @property
    def num_in_flight(self) -> int:
        """Jobs that are not reported yet."""
        return len(self._jobs)

    def unreported(self) -> list[int]:
        """Jobs that the worker half has started but not reported."""
        return [job.job_id for job in self._jobs.values() if job.is_started and not job.result]

    def stores_in_flight(self) -> Iterator[PlannedJob]:
        """Stores that are not reported yet."""
        return (job for job in self._jobs.values() if not job.is_load)

    def blocks_to_load(self) -> set[int]:
        """Blocks that loads in flight write."""
        return blocks_of_loads(self._jobs.values())

    def release_lost(self) -> None:
        """Report lost jobs from now on, and give later jobs the default fate."""
        self._is_lost_over = True
        self._fates = iter(())

    def hold(self) -> None:
        """Delay later jobs until after the end of the engine."""
        self._fates = repeat(Fate(_MUCH_LATER, _MUCH_LATER))

    # --- the hooks ---

    @override
    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        tensors = [cache.tensor for cache in kv_caches.tensors]
        self._pages = GPUPages(tensors)
        self._num_blocks = tensors[0].shape[0]
        if len(self._scenario.ranks) > 1:
            self._on_rank = f" on rank {kv_caches.rank}"
        self._group_refs = kv_caches.group_data_refs
        self._call("register_kv_caches", self._shown(kv_caches))

    @override
    def start_plan(self, plan: StepPlan) -> None:
        with hook("pickling the plan", "CONN-3"):
            plan = pickle.loads(pickle.dumps(plan))
        self._note_rows()
        jobs = [self._planned(job, plan, is_load=True) for job in plan.loads]
        jobs += [self._planned(job, plan, is_load=False) for job in plan.stores]
        for job in jobs:
            self._jobs[job.job_id] = job
            self._record.on_planned(job)
        self._start(plan, jobs)
        self._advance()

    @override
    def get_finished(self) -> list[TransferResult]:
        for job in self._jobs.values():
            job.age += 1
        self._note_rows()
        check_held(self.stores_in_flight(), self._engine(), self._record.freed_at)
        self._poll_first()
        self._advance()
        ended = [job for job in self._jobs.values() if self._may_report(job)]
        # Reports come from the last planned job to the first.
        return [self._report(job) for job in reversed(ended)]

    @override
    def wait(self, job_ids: Sequence[int]) -> None:
        pass

    # --- the way in which jobs start ---

    @abstractmethod
    def _call(self, name: str, *args: Any) -> Any:
        """Call a hook of the half; an exception breaks a law."""

    @abstractmethod
    def _shown(self, kv_caches: KVCaches) -> KVCaches:
        """Return the KV caches that the half receives."""

    @abstractmethod
    def _start(self, plan: StepPlan, jobs: Sequence[PlannedJob]) -> None:
        """Receive a plan."""

    @abstractmethod
    def _advance(self) -> None:
        """Let the jobs that are due run."""

    @abstractmethod
    def _take_result(self, job: PlannedJob, result: TransferResult) -> None:
        """Receive the result of a job."""

    def _poll_first(self) -> None:
        """Ask for results before jobs that are due run."""
        self._poll()

    def _is_held(self, job: PlannedJob) -> bool:
        """Whether a job may not be reported yet, although it may have ended."""
        return False

    # --- plans ---

    def _planned(self, transfer: TransferJob, plan: StepPlan, *, is_load: bool) -> PlannedJob:
        fate = next(self._fates, None) or Fate()
        if is_load:
            fate = self._scenario.fate_of_load(fate)
        gpu_side = transfer.dst if is_load else transfer.src
        job = PlannedJob(transfer, is_load, fate, gpu_blocks(gpu_side, self._num_blocks))
        if self._stream is not None:
            job.mark = self._stream.record_event()
        if is_load:
            expected = check_load(job, self._engine())
            # Jobs of other child connectors may name other pages by the same numbers.
            if is_plain(plan):
                job.expected = expected
        else:
            check_store(job, self._engine())
        self._note_rows_of(job)
        return job

    def _note_rows(self) -> None:
        """Copy the source blocks of jobs whose steps were computed since the last hook."""
        for job in self._jobs.values():
            self._note_rows_of(job)

    def _note_rows_of(self, job: PlannedJob) -> None:
        is_compared = not job.is_load or self._compares_loads
        if is_compared and not job.rows and job.is_computed:
            job.rows = self._pages.rows(job.gpu_blocks)

    # --- results ---

    def _poll(self) -> None:
        self._take_in(self._call("get_finished"))

    def _take_in(self, results: Any) -> None:
        if results == []:
            return
        require_type("get_finished", results, "CONN-3")
        with hook("pickling the results", "CONN-3"):
            results = pickle.loads(pickle.dumps(results))
        for result in results:
            job = self._jobs.get(result.job_id)
            if job is None or not job.is_started or job.result is not None:
                raise InvariantBroken(
                    "CONN-3",
                    f"the worker half reports job {result.job_id}, which it never received or has "
                    "already reported",
                )
            self._take_result(job, result)

    def _check_ended(self, jobs: Sequence[PlannedJob]) -> None:
        if waiting := [job.job_id for job in jobs if job.result is None]:
            raise InvariantBroken(
                "CONN-3",
                f"get_finished of the worker half does not report jobs {waiting}{self._on_rank} "
                "after wait has returned; report every job, also one that failed, and let wait "
                "block until its jobs have ended",
                hint="",
            )

    def _may_report(self, job: PlannedJob) -> bool:
        is_due = job.age >= job.fate.report_after and not self._is_held(job)
        return is_due and job.result is not None and (not job.fate.is_lost or self._is_lost_over)

    def _report(self, job: PlannedJob) -> TransferResult:
        assert job.result is not None, "only ended jobs are reported"
        del self._jobs[job.job_id]
        self.num_reported += 1
        job.rows = []
        self._record.on_reported(job)
        return job.result
