"""The scheduler's side of ``KVViewConnector``: vLLM's calls become calls of the contract.

- SCHED-1 Block tables **must** only name blocks that the request still has. Blocks that a window
  has left behind, and blocks that another request took after a preemption, are replaced by the null
  block.
- SCHED-2 A load that failed **must not** be repeated for the same request, not even by a sibling
  connector. The prefix is computed instead. If a load were repeated while no block is free, vLLM
  0.33.0 would not serve the requests that wait behind this request, and they hold the blocks.
- SCHED-3 Tokens **must** count as computed only if earlier steps computed them, because vLLM lets a
  request hit blocks that another request computes in the same step.
- SCHED-4 The jobs of a promise **must** be in the plan of the step in which its blocks were
  allocated; a broken promise raises :class:`~kvview.ConnectorError`, instead of letting the request
  wait forever.
- SCHED-5 A load that the release handles wrongly **must not** be requested. There are three kinds:
  loads in which a window skips blocks, because releases up to 0.13 cache the skipped blocks; loads
  within a step for a request that was preempted, because vLLM does not notice that they failed; and
  loads after a GPU hit with several groups, because two groups may use one block (0.14 to 0.23,
  vLLM PR 44409).
- SCHED-6 Blocks that a load within a step left unfilled, and blocks computed after them in that
  step, **must not** be hit. Up to 0.17 vLLM keeps these blocks in its prefix cache until a request
  computes them, and this request may be aborted or preempted first.
- SCHED-7 If other calls come between a promise and the allocation of its blocks (HiSparse of
  0.33.0), the connector **must** only receive the blocks if it promises as many tokens again
  (CONN-2). It **must not** receive the blocks of a part of its promise, to which an
  ``aux_output_connector`` of 0.33.0 may reduce a load. Otherwise the load has failed.

Source: the order of calls in vllm/v1/core/sched/scheduler.py, 0.11.0 to 0.33.0; for SCHED-6
``_handle_invalid_blocks`` in this file, which only evicts the blocks if the request is to fail.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, count
from typing import Any, NamedTuple

from kvview import (
    BlockIds,
    CacheGeometry,
    ConnectorError,
    EngineFacts,
    FinishReason,
    GPULoadStoreSpec,
    GuardedView,
    OffloadingEvent,
    RequestContent,
    RequestInfo,
    RequestStep,
    SchedulerConnector,
    StepPlan,
    TransferJob,
    TransferResult,
)
from kvview.connector.job_tracker import JobTracker, check_promise
from kvview.handoff import HandoffScheduler
from kvview_vllm.connector.containment import Faults, contain
from kvview_vllm.connector.handoffs import ACCEPT, OFFER, params_with
from kvview_vllm.connector.messages import JobReport, KVViewMetadata
from kvview_vllm.connector.steps import LazyStep, LazySteps, request_info
from kvview_vllm.events import BlockDescriptions
from kvview_vllm.metrics.connector_metrics import Meter
from kvview_vllm.releases import ConnectorSeam
from kvview_vllm.releases.compat.calls import request_content
from kvview_vllm.releases.compat.outputs import resumed_requests

_RECENT_STEPS = 64
_SECONDS_BETWEEN_STATS = 1.0
_NULL_BLOCK_ID = 0  # the first block that every release takes from its pool


@dataclass(slots=True)
class _Tracked:
    """A request for which vLLM has queried the connector, and which has not finished."""

    request: Any
    content: RequestContent
    # The length of its block table.
    chunks: list[Sequence[Sequence[int]]] = field(default_factory=list)
    queried_at: int | None = None  # tokens hit on the GPU, until its blocks are allocated
    promised: int = 0  # tokens after these
    num_hit_tokens: int = 0  # when its blocks were allocated
    num_ready_tokens: int = 0  # these, and the tokens that this connector itself loads
    is_allocated: bool = False  # until it is preempted
    load_failed: bool = False

    def table(self) -> Sequence[Sequence[int]]:
        """The blocks of the request so far, per group; empty without blocks."""
        if len(self.chunks) > 1:
            groups = zip(*self.chunks, strict=True)
            self.chunks = [[list(chain.from_iterable(parts)) for parts in groups]]
        return self.chunks[0] if self.chunks else ()


class _Computed(NamedTuple):
    """The tokens that one step computes, as lists of vLLM's output."""

    lengths: Mapping[str, int]
    started: Mapping[str, int]  # new requests, and their tokens before
    request_ids: Sequence[str]  # continued requests
    starts: Sequence[int]


class SchedulerSide:
    """Passes the calls of vLLM's scheduler on to the scheduler half of a connector.

    Args:
        half: The connector's scheduler half; faults of watched hooks are contained.
        geometry: Geometry of the engine.
        num_workers: Number of workers that report each job.
        release: Flags of the release: whether requests wait for their loads between steps (LOAD-1),
            and the fields of the scheduler's output.
        preempted_status: ``RequestStatus.PREEMPTED``, for releases whose output
            does not name the preempted requests.
        faults: Records the faults of the half, and applies the failure policy.
        descriptions: Tracks the content of blocks; None if events do not describe it.
    """

    def __init__(
        self,
        half: SchedulerConnector,
        geometry: CacheGeometry,
        num_workers: int,
        *,
        release: ConnectorSeam,
        preempted_status: Any,
        faults: Faults,
        descriptions: BlockDescriptions | None = None,
    ) -> None:
        contain(half, faults)
        self.half = half
        self.faults = faults
        self.geometry = geometry
        self.asynchronous = asynchronous = release.worker_metadata
        self._release = release
        self.descriptions = descriptions
        self._preempted_status = preempted_status
        self.owner = uuid.uuid4().hex
        self._nothing_to_do = KVViewMetadata(self.owner, StepPlan(), not asynchronous, ())
        self._view: GuardedView | None = None
        self._tracked: dict[str, _Tracked] = {}
        self._unseen: dict[str, int] = {}  # allocated with blocks that were not passed here
        self._lost: set[str] = set()  # preempted and queried again in one step
        # The tokens that each of the last steps computed: vLLM has lost them at a preemption.
        self._recent: deque[_Computed] = deque(maxlen=_RECENT_STEPS)
        # Requests whose last full block was not read; None: no step was read, it may be all.
        self._unshown: set[str] | None = None
        self._filling: LazySteps | None = None  # of the last step
        self._jobs = JobTracker(num_workers)
        self._acknowledged: list[int] = []
        self._promised_blocks: dict[str, GPULoadStoreSpec] = {}
        self._last_request: str | None = None  # the request of the half's last call
        self._lost_blocks: dict[str, GPULoadStoreSpec] = {}  # of promises that have ended
        self._lost_ids = count(-1, -1)
        self._lost_jobs: set[int] = set()
        self._next_stats = 0.0
        self.meter = Meter(num_workers)

    def bind(self, view: GuardedView) -> None:
        """Pass the view to the scheduler half (CONN-1)."""
        self._view = view
        self.half.bind_gpu_block_pool_view(view)

    def on_engine_ready(self, facts: EngineFacts) -> None:
        """Pass the engine's facts to the scheduler half."""
        self.meter.page_bytes = facts.page_bytes
        if self.descriptions is not None:
            self.descriptions.num_blocks = facts.num_gpu_blocks
        self.half.on_engine_ready(facts)

    # --- a request starts ---

    def match(self, request: Any, num_computed_tokens: int) -> int | None:
        """Return the number of further tokens that could be loaded; None for a retry."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            content = request_content(request, self.geometry.hash_block_size)
            tracked = self._tracked[request.request_id] = _Tracked(request, content)
            if self.descriptions is not None:
                self.descriptions.follow(request, tracked.content)
            self._accept(request, content)
        elif tracked.chunks:  # before the request starts again, because the plan would be too late
            self._lost.add(request.request_id)
            self._on_preemption(request.request_id)
        elif tracked.queried_at is None and tracked.is_allocated:
            # It never ran, so the load was that of a sibling in a MultiConnector.
            tracked.load_failed = True
        tracked.queried_at, tracked.promised = num_computed_tokens, 0
        if (
            tracked.load_failed
            or not request.block_hashes
            # Prompt log probabilities and pooling need every token computed.
            or (self._release.unread_prefixes and request.skip_reading_prefix_cache)
        ):
            return 0
        info = request_info(request, tracked.content, num_computed_tokens)
        self._attribute_to(request.request_id)
        num_tokens = self.half.match_prefix(info, num_computed_tokens)
        if not num_tokens:
            return num_tokens
        try:
            check_promise(self.geometry, info, num_computed_tokens, num_tokens)
        except ConnectorError as error:
            self.faults.on_fault(error)
            return 0
        if not self._can_load(request, num_computed_tokens, num_tokens):
            return 0
        tracked.promised = num_tokens
        return num_tokens

    def _accept(self, request: Any, content: RequestContent) -> None:
        """Pass the parameters of a handoff to the scheduler half, once for each request."""
        params = params_with(request, ACCEPT)
        if params is not None and isinstance(self.half, HandoffScheduler):
            self._attribute_to(request.request_id)
            self.half.accept_params(request_info(request, content), params)

    def on_allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Receive allocated blocks; called again when an asynchronous load has ended."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.queried_at is None:
            return  # the second call, after which no load is left
        num_computed_tokens, tracked.queried_at = tracked.queried_at, None
        tracked.num_hit_tokens, tracked.is_allocated = num_computed_tokens, True
        tracked.num_ready_tokens = num_computed_tokens + num_external_tokens
        block_ids = blocks.get_block_ids()
        if not any(block_ids):
            # Up to 0.25 a MultiConnector passes empty blocks to a child that does not load.
            self._unseen[request.request_id] = num_computed_tokens
            return
        info = request_info(request, tracked.content, num_computed_tokens)
        is_valid = self._last_request == request.request_id
        self._attribute_to(request.request_id)
        if num_external_tokens:
            span = num_computed_tokens, num_computed_tokens + num_external_tokens
            blocks = self._blocks_between(block_ids, *span)
            is_valid = is_valid or self._promises_again(info, num_computed_tokens, tracked.promised)
            if is_valid and num_external_tokens == tracked.promised:
                self._jobs.promise(request.request_id, num_external_tokens)
                self._promised_blocks[request.request_id] = blocks
            else:
                self._lost_blocks[request.request_id] = blocks
                num_external_tokens = 0
        self.half.on_blocks_allocated(info, block_ids, num_computed_tokens, num_external_tokens)

    def _promises_again(self, info: RequestInfo, num_computed_tokens: int, promised: int) -> bool:
        return self.half.match_prefix(info, num_computed_tokens) == promised

    def _can_load(self, request: Any, num_computed_tokens: int, num_tokens: int) -> bool:
        """Whether this release handles both success and failure of the load correctly (SCHED-5)."""
        if not self.asynchronous and request.num_cached_tokens >= 0:
            return False  # a failed load would take back the tokens of its first start
        if self._release.null_window_blocks:
            hits_are_safe = self._release.hits_come_first or len(self.geometry.groups) == 1
            return hits_are_safe or not num_computed_tokens
        end = num_computed_tokens + num_tokens
        return all(
            group.required_blocks(end).start * group.block_size <= num_computed_tokens
            for group in self.geometry.groups
        )

    # --- a step ---

    def plan(self, output: Any) -> KVViewMetadata:
        """Plan the step that a ``SchedulerOutput`` describes."""
        self._on_preemptions(output)
        self._follow_tables(output)
        if self._unseen:
            self._show_unseen(output)
        self._attribute_to(None)
        if self._filling is None or not self._filling.is_built:
            self._unshown = None
        self._filling = LazySteps(self._steps_that_fill, output)
        every = LazySteps(self._request_steps, output)
        plan = self.half.plan_step(LazyStep(every, self._filling))
        if not self.faults.is_out:
            try:
                self._jobs.check(plan)
            except ConnectorError as error:
                self.faults.on_fault(error)
        if self.faults.is_out:
            plan = self._plan_without()
        lost = self._lose() if self._lost_blocks else ()
        begun = StepPlan([*plan.loads, *lost], plan.stores) if lost else plan
        self._jobs.begin(begun)
        self._promised_blocks.clear()
        if begun:
            self.meter.begin(begun)
        elif not self._acknowledged:
            return self._nothing_to_do
        acknowledged, self._acknowledged = tuple(self._acknowledged), []
        return KVViewMetadata(self.owner, plan, not self.asynchronous, acknowledged, lost)

    def _plan_without(self) -> StepPlan:
        """Replace the connector's plan, because its promises have failed (FAULT-2)."""
        if self._view is not None and not self._jobs:
            self._view.free_all()  # because no job reads the held blocks any more
            self._view = None
        self._lost_blocks |= self._promised_blocks
        return StepPlan()

    def _lose(self) -> tuple[TransferJob, ...]:
        """Make loads that fail immediately, without the connector; vLLM handles failed loads."""
        lost = tuple(
            TransferJob(next(self._lost_ids), blocks, blocks, request_id)
            for request_id, blocks in self._lost_blocks.items()
        )
        self._lost_jobs.update(job.job_id for job in lost)
        self._lost_blocks.clear()
        return lost

    def _blocks_between(self, block_ids: BlockIds, start: int, end: int) -> GPULoadStoreSpec:
        """Return the blocks that a load of these tokens fills, without the null blocks."""
        spans: list[Sequence[int]] = []
        firsts: list[int] = []
        for group, table in zip(self.geometry.groups, block_ids, strict=True):
            needed = group.required_blocks(end)
            firsts.append(max(start // group.block_size, needed.start))
            spans.append(table[firsts[-1] : needed.stop])
        return GPULoadStoreSpec(
            list(chain.from_iterable(spans)), [len(span) for span in spans], firsts
        )

    def _attribute_to(self, request_id: str | None) -> None:
        """Attribute the holds of the following call to a request."""
        self._last_request = request_id
        if self._view is not None:
            self._view.speak_of(request_id)

    def _on_preemptions(self, output: Any) -> None:
        named: Iterable[str]
        if self._release.preempted_ids:
            named = output.preempted_req_ids or ()
        else:
            named = [
                request_id
                for request_id, tracked in self._tracked.items()
                if tracked.chunks and tracked.request.status is self._preempted_status
            ]
        for request_id in dict.fromkeys([*named, *self._lost]):
            self._on_preemption(request_id)
        self._lost.clear()

    def _on_preemption(self, request_id: str) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.chunks:
            return
        # vLLM freed the blocks in this step: another request may have some already (SCHED-1).
        start, num_launched = self._last_launch(request_id)
        live = self._live_table(tracked, start)
        table = tuple([self._if_free(block) for block in group] for group in live)
        # A step in flight may have sampled tokens, without which their KV is useless.
        num_computed_tokens = min(num_launched, tracked.request.num_tokens - 1)
        tracked.chunks, tracked.is_allocated = [], False
        info = request_info(tracked.request, tracked.content, num_computed_tokens)
        self._attribute_to(request_id)
        self.half.on_request_preempted(info, table)

    def _last_launch(self, request_id: str) -> tuple[int, int]:
        """Count a request's tokens before and after its last step; 0 if this step is too old."""
        for step in reversed(self._recent):
            if (length := step.lengths.get(request_id)) is not None:
                start = step.started.get(request_id)
                if start is None:
                    start = step.starts[step.request_ids.index(request_id)]
                return start, start + length
        return 0, 0

    def _if_free(self, block_id: int) -> int:
        is_free = self._view is not None and self._view.is_free(block_id)
        return block_id if is_free else _NULL_BLOCK_ID

    def _follow_tables(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                tracked.chunks = [[list(group) for group in new.block_ids]]
        cached = output.scheduled_cached_reqs
        self._recent.append(
            _Computed(
                output.num_scheduled_tokens,
                _starts(output),
                cached.req_ids,
                cached.num_computed_tokens,
            )
        )
        # These are the adapter's most expensive lines. Most requests start no block in a step, and
        # C code skips them. The chunks of the others are kept and joined at their first use.
        # strict= is omitted, because it costs as much as an addition.
        added_to = compress(cached.req_ids, cached.new_block_ids)
        tracked_requests = self._tracked
        for request_id, added in zip(added_to, filter(None, cached.new_block_ids)):  # noqa: B905
            if request_id in tracked_requests:
                tracked_requests[request_id].chunks.append(added)
        for request_id in resumed_requests(cached):
            if (tracked := self._tracked.get(request_id)) is not None:
                # A copy: a worker in this process extends these lists.
                tracked.chunks = [[list(group) for group in last] for last in tracked.chunks[-1:]]

    def _show_unseen(self, output: Any) -> None:
        for request_id in [name for name in self._unseen if name in output.num_scheduled_tokens]:
            tracked = self._tracked[request_id]
            num_computed_tokens = self._unseen.pop(request_id)
            table = tuple(map(list, tracked.table()))
            info = request_info(tracked.request, tracked.content, num_computed_tokens)
            self.half.on_blocks_allocated(info, table, num_computed_tokens, 0)

    def _steps_that_fill(self, output: Any) -> list[RequestStep]:
        """Find the requests of a step that :meth:`kvview.StepInfo.filling` must return."""
        cached, num_tokens = output.scheduled_cached_reqs, output.num_scheduled_tokens
        size = self.geometry.hash_block_size
        unshown, begun = self._unshown, self._begun(output)
        # Read again, because this step may write the blocks that they hit (SCHED-3).
        self._unshown = begun
        starts = _starts(output)
        if unshown is None:
            starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            begun.update(name for name in self._tracked if name not in num_tokens)
        else:
            always = begun | unshown
            starts.update(
                (name, start)
                # Without strict=, as in _follow_tables.
                for name, start in zip(cached.req_ids, cached.num_computed_tokens)  # noqa: B905
                if start % size + num_tokens[name] >= size or name in always
            )
            begun.update(name for name in unshown if name not in starts and name in self._tracked)
        steps = self._steps_of(output, starts)
        for step in steps:
            end = step.num_computed_tokens + step.num_scheduled_tokens
            if len(step.request.block_hashes) < end // size:  # which come with a later output
                begun.add(step.request.request_id)
        return steps

    def _request_steps(self, output: Any) -> list[RequestStep]:
        """Return all requests of a step."""
        cached = output.scheduled_cached_reqs
        starts = _starts(output)
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return self._steps_of(output, {name: starts[name] for name in output.num_scheduled_tokens})

    def _begun(self, output: Any) -> set[str]:
        """Return the ids of the requests that start, or start again, in a step."""
        begun = {new.req_id for new in output.scheduled_new_reqs}
        begun.update(resumed_requests(output.scheduled_cached_reqs))
        return begun

    def _steps_of(self, output: Any, starts: dict[str, int]) -> list[RequestStep]:
        """Return the requests of a step that are in ``starts``, with their earlier tokens."""
        lengths = output.num_scheduled_tokens
        tracked_requests = {
            request_id: tracked
            for request_id in starts
            if (tracked := self._tracked.get(request_id)) is not None
        }
        hits = [name for name in self._begun(output) if starts[name] and name in tracked_requests]
        if hits and (len(lengths) > 1 or not self.asynchronous):
            # Requests that are not named fill no block, so their blocks cannot be hit.
            firsts = dict(starts)
            if not self.asynchronous:  # siblings load in this step, in no order with this plan
                firsts |= {name: tracked_requests[name].num_ready_tokens for name in hits}
            written = self._written_blocks(tracked_requests, firsts, starts, lengths)
            for request_id in hits:
                table = tracked_requests[request_id].table()
                starts[request_id] = self._existing(table, starts[request_id], written)
        return [
            RequestStep(
                request_info(tracked.request, tracked.content, start := starts[request_id]),
                self._live_table(tracked, start),
                start,
                lengths[request_id],
            )
            for request_id, tracked in tracked_requests.items()
        ]

    def _written_blocks(
        self,
        tracked_requests: Mapping[str, _Tracked],
        firsts: Mapping[str, int],
        starts: Mapping[str, int],
        lengths: Mapping[str, int],
    ) -> set[int]:
        """Return blocks that a request may hit and whose KV is loaded or computed in this step."""
        written: set[int] = set()
        hash_size = self.geometry.hash_block_size
        for request_id, tracked in tracked_requests.items():
            start, end = firsts[request_id], starts[request_id] + lengths[request_id]
            if start // hash_size == end // hash_size:
                continue  # nothing is hashed before the tokens of a hash are there
            for group, table in zip(self.geometry.groups, tracked.table(), strict=True):
                size = group.block_size
                written.update(table[start // size : -(-end // size)])
        written.discard(_NULL_BLOCK_ID)
        return written

    def _existing(self, table: Sequence[Sequence[int]], num_tokens: int, written: set[int]) -> int:
        """Count the hit tokens of a request before the first block that is written in this step."""
        for group, block_ids in zip(self.geometry.groups, table, strict=True):
            hit = block_ids[: num_tokens // group.block_size]
            if not written.isdisjoint(hit):
                first = next(number for number, block in enumerate(hit) if block in written)
                num_tokens = first * group.block_size
        return num_tokens

    def _live_table(self, tracked: _Tracked, num_computed_tokens: int) -> BlockIds:
        table: list[Sequence[int]] = []
        for group, block_ids in zip(self.geometry.groups, tracked.table(), strict=True):
            # vLLM replaces these by the null block without a notification (SCHED-1).
            skipped = group.num_skipped_tokens(num_computed_tokens) // group.block_size
            if skipped:
                skipped = min(skipped, len(block_ids))
                table.append([_NULL_BLOCK_ID] * skipped + list(block_ids[skipped:]))
            else:
                table.append(block_ids[:])
        return tuple(table)

    # --- jobs end ---

    def on_reports(self, reports: Iterable[JobReport]) -> None:
        """Receive reports of the workers; a job ends when its last worker has reported it."""
        results: list[TransferResult] = []
        for report in reports:
            if not self._jobs.awaits(report.result.job_id, report.rank):
                continue  # sent again before the acknowledgement arrived
            ended = self._jobs.end(report.result, report.rank)
            if ended is None:
                continue
            self.meter.end(ended)
            self._acknowledged.append(ended.job.job_id)
            if ended.job.job_id in self._lost_jobs:
                self._lost_jobs.remove(ended.job.job_id)
            else:
                results.append(ended.result)
            tracked = self._tracked.get(ended.job.request_id or "")
            if tracked is not None and not ended.result.success:
                tracked.load_failed = True
        if results:
            self._attribute_to(None)
            self.half.on_transfers_finished(results)

    def is_stats_due(self) -> bool:
        """Whether metrics are due: once a second, and whenever no request is left (METRIC-2)."""
        now = time.monotonic()
        if self._tracked and now < self._next_stats:
            return False
        self._next_stats = now + _SECONDS_BETWEEN_STATS
        return True

    def late_jobs(self, seconds: float) -> Iterator[tuple[TransferJob, float]]:
        """Return jobs that have been in flight for this time, with their ages, oldest job first."""
        now = time.monotonic()
        for job in self._jobs.jobs():
            age = now - self.meter.begun[job.job_id]
            if age < seconds:
                return
            yield job, age

    def jobs_of(self, block_ids: Collection[int]) -> list[int]:
        """Return the ids of jobs in flight that read or write one of these GPU blocks."""
        return [
            job.job_id
            for job in self._jobs.jobs()
            for spec in (job.src, job.dst)
            if isinstance(spec, GPULoadStoreSpec) and not set(block_ids).isdisjoint(spec.block_ids)
        ]

    def forget_computed(self, invalid_block_ids: Collection[int]) -> Collection[int]:
        """Discard the token counts of recent steps, because these blocks were not loaded.

        Returns:
            Blocks that must not be hit any more (SCHED-6).
        """
        unfilled: set[int] = set()
        self._filling = None  # read all requests, because one may have fewer tokens than before
        invalid = set(invalid_block_ids)
        if not self.asynchronous:  # otherwise vLLM caches them when they are loaded
            unfilled.update(invalid)
            for request_id, tracked in self._tracked.items():
                first_token, _ = self._last_launch(request_id)
                for group, table in zip(self.geometry.groups, tracked.table(), strict=False):
                    if not invalid.isdisjoint(table):
                        unfilled.update(table[first_token // group.block_size :])
        self._recent.clear()
        return unfilled

    # --- a request ends, the engine is idle ---

    def on_finished(
        self, request: Any, block_ids: BlockIds, reason: FinishReason
    ) -> dict[str, Any] | None:
        """Notify the half that a request is about to free its blocks.

        Returns:
            The parameters of the offered handoff, for the router.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:  # it was never queried
            content = request_content(request, self.geometry.hash_block_size)
            info = request_info(request, content)
            self._accept(request, content)
        else:
            del self._tracked[request.request_id]
            self._unseen.pop(request.request_id, None)
            self._lost.discard(request.request_id)
            info = request_info(request, tracked.content, _num_computed_tokens(tracked))
        if self.descriptions is not None:
            self.descriptions.finish(request, info.content)
        self._attribute_to(request.request_id)
        offered: Mapping[str, Any] | None = None
        is_wanted = reason is FinishReason.FINISHED and params_with(request, OFFER)
        if is_wanted and isinstance(self.half, HandoffScheduler):
            num_tokens = request.num_prompt_tokens
            num_computed_tokens = min(info.num_computed_tokens, num_tokens)
            prompt = replace(info, num_tokens=num_tokens, num_computed_tokens=num_computed_tokens)
            offered = self.half.offer_blocks(prompt, block_ids)
        self.half.on_request_finished(info, block_ids, reason)
        return {**offered, ACCEPT: True, OFFER: False} if offered is not None else None

    def has_pending_work(self) -> bool:
        """Return whether the engine must keep stepping."""
        return bool(self._jobs) or self.half.has_pending_work()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the connector's events since the last call."""
        return self.half.take_events()

    def reset_cache(self) -> bool:
        """Drop every offloaded block."""
        self._attribute_to(None)
        return self.half.reset_cache()

    def shutdown(self) -> None:
        """Release all holds."""
        self.half.shutdown()


def _starts(output: Any) -> dict[str, int]:
    """Return the number of tokens that each new request of a step has before the step."""
    return {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}


def _num_computed_tokens(tracked: _Tracked) -> int:
    """Count the leading tokens with KV in the blocks that a request is about to free."""
    if not tracked.chunks:  # it never ran, so its load may not have arrived
        return tracked.num_hit_tokens if tracked.is_allocated else 0
    num_tokens: int = tracked.request.num_tokens
    return min(int(tracked.request.num_computed_tokens), num_tokens - 1)
