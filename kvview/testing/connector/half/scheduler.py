"""The harness of a scheduler half, which checks its errors, promises and events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from inspect import getattr_static
from itertools import chain
from typing import Any, cast

from typing_extensions import override

from kvview import (
    BlockIds,
    CacheGeometry,
    FinishReason,
    GPUBlockPoolView,
    OffloadingEvent,
    RequestInfo,
    RequestStep,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    SupportsPinBudget,
    SupportsSkippedBlocks,
    TransferResult,
)
from kvview.testing.connector.exercised.coverage import (
    FAILED_BY_THEMSELVES,
    LEFT_ALONE,
    rows_of,
)
from kvview.testing.connector.half.hook_calls import hook, require_type
from kvview.testing.connector.judge.engine_calls import EngineCalls
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.connector.judge.jobs import PlannedJob
from kvview.testing.connector.judge.run_log import RunLog
from kvview.testing.connector.judge.tier_model import TierKeys, TierPages
from kvview.testing.supervision.source_lines import places_of_caller

_LAW_OF_HOOK = {
    "bind_gpu_block_pool_view": "CONN-1",
    "on_engine_ready": "CONN-1",
    "match_prefix": "CONN-2",
    "on_blocks_allocated": "CONN-2",
    "plan_step": "CONN-3",
    "on_transfers_finished": "CONN-3",
}  # for other hooks: CONN-4
_NO_BLOCK: Any = "a block of a table that was kept after its call"


class JobCounts:
    """Counters of the results of jobs and promises, for the table of coverage.

    Args:
        geometry: Block sizes of the engine.
    """

    def __init__(self, geometry: CacheGeometry) -> None:
        self.coverage: Counter[str] = Counter()
        self.num_tokens_to_load = 0
        self.first_error = ""
        """Error of the first job that failed without an injected failure."""
        self._rows = list(rows_of(geometry))
        self._loading: set[PlannedJob] = set()
        # Loads that neither a reset nor an abort ended.
        self._left_alone: set[PlannedJob] = set()
        self._gpu_hits: dict[str, str] = {}  # by loading request

    def on_planned(self, job: PlannedJob) -> None:
        """Count a planned job."""
        if job.is_load:
            self._loading.add(job)
            self._left_alone.add(job)

    def on_reported(self, job: PlannedJob, success: bool) -> None:
        """Count the end of a job."""
        kind = "loads" if job.is_load else "stores"
        self.coverage[kind if success else f"failed {kind}"] += 1
        is_left_alone = not job.is_load or job in self._left_alone
        if is_left_alone and not any(one.may_fail for one in job.on_ranks):
            self.coverage[LEFT_ALONE[kind]] += 1
            self.coverage[FAILED_BY_THEMSELVES[kind]] += not success
            errors = (one.result.error for one in job.on_ranks if one.result)
            self.first_error = self.first_error or next(filter(None, errors), "")
        if job.is_load:
            if not success:
                self._count("failed", job)
            elif any(one.age > 1 for one in job.on_ranks):
                self._count("late", job)
            self._loading.discard(job)
            self._left_alone.discard(job)

    def on_aborted(self, request_id: str) -> None:
        """Count the loads of an aborted request."""
        for job in self._loading:
            if job.transfer.request_id == request_id:
                self._count("aborted", job)
                self._left_alone.discard(job)

    def on_reset_requested(self) -> None:
        """Count a reset, and the loads in flight before it."""
        self.coverage["resets of connectors"] += 1
        self.coverage["resets with loads in flight"] += bool(self._loading)
        for job in self._loading:
            self._count("reset", job)
        self._left_alone.clear()

    def on_promise(self, request: RequestInfo, num_computed: int, num_promised: int) -> None:
        """Count the tokens of a promise."""
        self.coverage["hits"] += num_promised > 0
        self.coverage["tokens asked about"] += request.num_tokens
        self.coverage["tokens hit on the GPU"] += num_computed
        self.coverage["tokens promised"] += num_promised

    def on_blocks_allocated(self, request_id: str, num_computed: int, num_external: int) -> None:
        """Count the tokens that a request will load."""
        if num_external:
            self.num_tokens_to_load += num_external
            self._gpu_hits[request_id] = "gpu-hit" if num_computed else "no-gpu-hit"

    def _count(self, end: str, job: PlannedJob) -> None:
        hit = self._gpu_hits.get(job.transfer.request_id or "", "no-gpu-hit")
        self.coverage.update(f"loads/{row}/{hit}/{end}" for row in self._rows)


class Record:
    """The model of one connector's tier, and the counts of its jobs.

    Args:
        geometry: Block sizes of the engine.
        num_ranks: Number of ranks, each of which reports each job.
    """

    def __init__(self, geometry: CacheGeometry, num_ranks: int = 1) -> None:
        self.geometry = geometry
        self._num_ranks = num_ranks
        self._jobs: dict[int, list[PlannedJob]] = {}  # by job id, one for each started rank
        self._reported: Counter[int] = Counter()  # ranks that have reported a job
        self.keys = TierKeys(geometry)
        self.touched_at: dict[int, Sequence[str]] = {}
        """The lines of the author's code that last took a hold of a block."""
        self.freed_at: dict[int, Sequence[str]] = {}
        """The lines of the author's code that last released a hold of a block."""
        self.pages = TierPages()
        self.counts = JobCounts(geometry)

    def on_planned(self, job: PlannedJob) -> None:
        """Add a planned job of a rank; the job is checked on the first rank that receives it."""
        job.on_ranks = self._jobs.setdefault(job.job_id, [])
        job.on_ranks.append(job)
        if len(job.on_ranks) > 1:
            return
        if job.is_load:
            self.pages.check_load(job)
        else:
            self.pages.add_store(job)
        self.keys.on_planned(job)
        self.counts.on_planned(job)

    def on_reported(self, job: PlannedJob) -> None:
        """Add the report of a rank on a job; the last report ends the job."""
        self._reported[job.job_id] += 1
        if self._reported[job.job_id] < self._num_ranks:
            return
        del self._reported[job.job_id]
        first, *_ = self._jobs.pop(job.job_id)
        success = all(one.result and one.result.success for one in first.on_ranks)
        self.keys.on_reported(first, success)
        self.counts.on_reported(first, success)


@dataclass(frozen=True)
class _StepOfOneCall(StepInfo):
    """A step whose block tables name no block after the call of the hook."""

    of_engine: StepInfo = field(kw_only=True)

    @classmethod
    def copy(cls, step: StepInfo) -> _StepOfOneCall:
        """Copy the block tables of a step."""
        scheduled = [
            replace(one, block_ids=tuple(map(list, one.block_ids))) for one in step.scheduled
        ]
        return cls(scheduled, of_engine=step)

    @override
    def filling(self) -> Sequence[RequestStep]:
        names = {one.request.request_id for one in self.of_engine.filling()}
        return [one for one in self.scheduled if one.request.request_id in names]

    def end(self) -> None:
        """Overwrite the block tables."""
        for table in chain.from_iterable(one.block_ids for one in self.scheduled):
            cast("list[int]", table)[:] = [_NO_BLOCK] * len(table)


def _passed_on(name: str) -> Any:
    """Return a hook that calls the half's hook without further checks."""

    def call(self: SchedulerHarness, *args: Any) -> None:
        self._call(name, *args)

    return call


class SchedulerHarness(SchedulerConnector):
    """Passes calls to the scheduler half, and checks its errors, promises and events.

    Args:
        half: The scheduler half.
        record: The model of the connector's tier, and its counts.
        log: The last hooks and transfers of the run.
        ref_counts: Returns the number of references to each block.
    """

    def __init__(
        self,
        half: SchedulerConnector,
        record: Record,
        log: RunLog,
        ref_counts: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        self._half = half
        self._record = record
        self._log = log
        self._untaken: list[OffloadingEvent] = []  # in the model, not yet in the engine
        self._job_ids: set[int] = set()  # of all jobs
        self.engine_calls = EngineCalls(record.geometry, ref_counts)
        self.unanswered: set[str] = set()
        """Requests for which the last ``match_prefix`` returned None."""
        self.asks_for_budget = False
        """Whether the half has called ``num_pinnable_blocks``."""
        self.has_refused_reset = False
        """Whether the half refused the last reset."""

    on_engine_ready = _passed_on("on_engine_ready")
    on_request_preempted = _passed_on("on_request_preempted")
    shutdown = _passed_on("shutdown")

    def _call(self, name: str, *args: Any) -> Any:
        self.engine_calls.on_hook()
        self._log.add(name, *args)
        with hook(name, _LAW_OF_HOOK.get(name, "CONN-4")):
            return getattr(self._half, name)(*args)

    def fold_events(self) -> None:
        """Fold the events so far into the model."""
        with hook("take_events", "EVENT-3"):  # the events may be a generator
            events = list(self._half.take_events())
            if not events:
                return
            require_type("take_events", events, "EVENT-3")
        self._record.counts.coverage["events"] += len(events)
        self._untaken += events
        self._record.keys.on_events(events)

    @property
    def num_skipped(self) -> int | None:
        """Number of blocks that the half counts as not stored; None if it does not count them."""
        # isinstance would treat a property that raises AttributeError as missing.
        if getattr_static(self._half, "num_skipped_blocks", None) is None:
            return None
        with hook("num_skipped_blocks", "CONN-13"):
            return cast("SupportsSkippedBlocks", self._half).num_skipped_blocks

    @override
    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        self.engine_calls.on_bound(view)
        record, methods = self._record, cast("Any", view)
        methods.touch_blocks = self._noting_lines(view.touch_blocks, record.touched_at)
        methods.free_blocks = self._noting_lines(view.free_blocks, record.freed_at)
        if isinstance(view, SupportsPinBudget):
            view.num_pinnable_blocks = self._noting_calls_of(view.num_pinnable_blocks)  # type: ignore[method-assign]
        self._call("bind_gpu_block_pool_view", view)

    def _noting_lines(
        self, function: Callable[[Sequence[int]], None], lines: dict[int, Sequence[str]]
    ) -> Callable[[Sequence[int]], None]:
        def call(block_ids: Sequence[int]) -> None:
            places = places_of_caller(type(self._half))
            function(block_ids)
            lines.update(dict.fromkeys(block_ids, places))
            self._log.add(f"  {function.__name__}", (block_ids,), *places[-1:])

        return call

    def _noting_calls_of(self, function: Callable[[], int]) -> Callable[[], int]:
        def num_pinnable_blocks() -> int:
            self.asks_for_budget = True
            return function()

        return num_pinnable_blocks

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        answer: int | None = self._call("match_prefix", request, num_computed_tokens)
        if answer is None:
            self.unanswered.add(request.request_id)
            return None
        self.unanswered.discard(request.request_id)
        require_type("match_prefix", answer, "CONN-2")
        is_repeated = self._record.keys.has_promise(request.request_id)
        self.engine_calls.on_match(request, num_computed_tokens, answer, is_repeated=is_repeated)
        self.fold_events()
        self._record.counts.on_promise(request, num_computed_tokens, answer)
        self._record.keys.on_promise(request, num_computed_tokens, answer)
        return answer

    @override
    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        self.engine_calls.on_blocks_allocated(request, num_external_tokens)
        self._call(
            "on_blocks_allocated", request, block_ids, num_computed_tokens, num_external_tokens
        )
        name = request.request_id
        self._record.counts.on_blocks_allocated(name, num_computed_tokens, num_external_tokens)
        self._record.keys.on_blocks_allocated(name)

    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        own = _StepOfOneCall.copy(step)
        plan: StepPlan = self._call("plan_step", own)
        own.end()
        require_type("plan_step", plan, "CONN-3")
        self.engine_calls.on_step(step, plan)
        for job in (*plan.loads, *plan.stores):
            self._log.add("  planned", job)
            if job.job_id in self._job_ids:
                raise InvariantBroken(
                    "CONN-5",
                    f"plan_step returned a job with the id {job.job_id}, which an earlier job had; "
                    f"use each job id once in the life of the connector",
                )
            self._job_ids.add(job.job_id)
        return plan

    @override
    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        self.engine_calls.on_results(results)
        self._call("on_transfers_finished", results)

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self.engine_calls.on_finished(request.request_id)
        self._record.keys.on_ended(request, block_ids)
        if reason is FinishReason.ABORTED:
            self._record.counts.on_aborted(request.request_id)
        self._call("on_request_finished", request, block_ids, reason)

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        self.fold_events()
        events, self._untaken = self._untaken, []
        return events

    @override
    def has_pending_work(self) -> bool:
        self.engine_calls.on_hook()
        with hook("has_pending_work", "CONN-3"):
            return bool(self._half.has_pending_work())

    @override
    def reset_cache(self) -> bool:
        self._record.counts.on_reset_requested()
        with hook("reset_cache", "CONN-4"):
            self.has_refused_reset = not self._call("reset_cache")
        if self.has_refused_reset:
            return False
        self.fold_events()
        self._record.keys.on_reset()
        return True
