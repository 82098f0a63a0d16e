"""The connector of the trial run, whose halves check each call against the contract."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from typing_extensions import override

from kvview import (
    MEDIUM_CPU,
    BlockIds,
    CanonicalKVCaches,
    Connector,
    CPULoadStoreSpec,
    FinishReason,
    GPUBlockPoolView,
    GPULoadStoreSpec,
    GuardedView,
    OffloadingEvent,
    OffloadKey,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferJob,
    TransferResult,
    WorkerConnector,
    make_offload_key,
)
from kvview_vllm.releases import ConnectorSeam, expect, installed
from kvview_vllm.releases.build.samples import BLOCK_SIZE, WINDOW

TRIAL_TARGET = f"{__name__}:TrialConnector"
"""Target of this connector, which is not tried itself."""

NUM_BLOCKS = 32
SALT = "salt"
PROMPTS = {
    "a": range(100, 148),  # three full blocks
    "b": [*range(100, 132), *range(300, 331)],  # the first two of these blocks, and more
    "c": range(400, 463),  # is loaded, then preempted, and finally aborted
    "d": range(500, 739),  # is computed in two steps, in blocks that were used before
}
LENGTHS = {"a": 2, "b": 1, "c": 9, "d": 1}

_SEAM = ConnectorSeam.seam
_NULL_BLOCK_ID = 0
_HITS = {"a": 0, "b": 2 * BLOCK_SIZE, "c": 0, "d": 0}
_COMPUTED_AT_END = {"a": 49, "b": 63, "c": 65, "d": 239}
# A failed load is allocated again without a query (SCHED-2).
_CALLS_BEFORE = {
    "match": ("nothing", "preempted"),
    "allocated": ("match", "allocated", "preempted"),
    "step": ("allocated", "step"),
    "preempted": ("step",),
    "finished": ("step",),
}


class TrialConnector(Connector):
    """A connector whose halves are passed in its options."""

    @override
    def make_scheduler(self) -> SchedulerConnector:
        half: SchedulerConnector = self.config.options["scheduler"]
        return half

    @override
    def make_worker(self) -> WorkerConnector:
        half: WorkerConnector = self.config.options["worker"]
        return half


class TrialScheduler(SchedulerConnector):
    """Checks the order of calls, their units, block tables, keys and frees.

    The keys that the pool registers for the blocks of a request follow from its hashes. So a table
    with another order, another group or another number of computed tokens has other keys.
    """

    view: GuardedView

    def __init__(self, num_groups: int) -> None:
        release = installed().connector
        alone = num_groups == 1
        # SCHED-5: releases that handle other loads wrongly get no such loads.
        after_hits = alone or release.hits_come_first or not release.null_window_blocks
        self._promises = {
            "b": BLOCK_SIZE if after_hits else 0,
            "c": 3 * BLOCK_SIZE if alone or release.null_window_blocks else 2 * BLOCK_SIZE,
        }
        self.failing = {"c"} if release.failed_requests else set()
        self.num_resets = 0
        self._num_groups = num_groups
        self._loads_to_end = sum(map(bool, self._promises.values())) - len(self.failing)
        self._last_call = dict.fromkeys(PROMPTS, "nothing")
        self._ends = dict(_HITS)  # number of tokens with KV, by request
        self._held: list[int] = []
        self._jobs: list[TransferJob] = []
        self._num_jobs = 0
        self._events: list[OffloadingEvent] = []

    # --- between steps ---

    def is_computed(self, name: str) -> bool:
        """Whether a request has all tokens that it must have at its end."""
        return self._ends[name] >= _COMPUTED_AT_END[name]

    def expect_ended(self, *names: str) -> None:
        """Check that the requests ended, and that their loads were reported."""
        calls = {name: self._last_call[name] for name in names}
        expect(_SEAM, "last calls of requests", calls, dict.fromkeys(names, "finished"))
        if "c" in names:
            expect(_SEAM, "loads that ended and were not reported", self._loads_to_end, 0)

    def expect_all_free(self) -> None:
        """Check that neither requests nor this half hold any block, and that events were taken."""
        expect(_SEAM, "events that vLLM did not take", self._events, [])
        self.release_held()
        free = self.view.num_free_blocks()
        expect(_SEAM, "free blocks after all requests", free, NUM_BLOCKS - 1)

    def release_held(self) -> None:
        """Free the held blocks."""
        held, self._held = self._held, []
        self.view.free_blocks(held)

    def _hold(self, blocks: list[int]) -> None:
        self.view.touch_blocks(blocks)
        self._held += blocks

    # --- hooks ---

    @override
    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        assert isinstance(view, GuardedView)
        self.view = view

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
        name = self._follow(request, "match")
        hits = self._ends[name] // BLOCK_SIZE * BLOCK_SIZE
        expect(_SEAM, f"computed tokens of request {name}", num_computed_tokens, hits)
        return self._promises.pop(name, 0)

    @override
    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        name = self._follow(request, "allocated")
        end = num_computed_tokens + num_external_tokens
        self._ends[name] = end
        if not num_external_tokens:
            return
        wanted = {"b": (2 * BLOCK_SIZE, BLOCK_SIZE), "c": (0, end)}[name]
        found = num_computed_tokens, num_external_tokens
        expect(_SEAM, f"computed and loaded tokens of request {name}", found, wanted)
        first = num_computed_tokens // BLOCK_SIZE
        spans = [group[first : end // BLOCK_SIZE] for group in block_ids]
        source = CPULoadStoreSpec(range(sum(map(len, spans))))
        blocks = [*chain.from_iterable(spans)]
        target = GPULoadStoreSpec(blocks, [*map(len, spans)], [first] * len(spans))
        self._num_jobs += 1
        self._jobs.append(TransferJob(self._num_jobs, source, target, name))

    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        for one in step.scheduled:
            name = self._follow(one.request, "step")
            start, num_tokens = one.num_computed_tokens, one.num_scheduled_tokens
            expect(_SEAM, f"computed tokens of request {name}", start, self._ends[name])
            self._ends[name] += num_tokens
            self._expect_keys(one.request, one.block_ids, self._ends[name])
        jobs, self._jobs = self._jobs, []
        if self._last_call["c"] == "step" and self._ends["c"] == len(PROMPTS["c"]) + 1:
            # It needs another block in the next step, and finds none.
            self._hold([*self.view.iter_free_block_ids()])
        return StepPlan(loads=jobs)

    @override
    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        self._loads_to_end -= sum(result.success for result in results)
        key = make_offload_key(b"%032d" % 0, 0)
        self._events = [
            OffloadingEvent((key,), MEDIUM_CPU, removed=removed) for removed in (False, True)
        ]

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    @override
    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        name = self._follow(request, "preempted")
        self._expect_blocks(request, block_ids, self._ends[name])
        free = dict(self.view.iter_free_block_ids_with_hash())
        expected = self._keys(request, block_ids, self._ends[name])
        found = {block: key for block, key in free.items() if block in expected}
        expect(_SEAM, "keys of the blocks of a preempted request", _hex(found), _hex(expected))
        self.release_held()

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        name = self._follow(request, "finished")
        wanted = FinishReason.ABORTED if name == "c" else FinishReason.FINISHED
        found = request.num_computed_tokens, reason.name
        expected = _COMPUTED_AT_END[name], wanted.name
        expect(_SEAM, f"computed tokens and end of request {name}", found, expected)
        self._expect_keys(request, block_ids, self._ends[name])
        blocks = [block for block in chain.from_iterable(block_ids) if block]
        is_free = any(map(self.view.is_free, blocks))
        expect(_SEAM, f"whether blocks of request {name} are free at its end", is_free, False)
        self._hold(blocks)

    @override
    def reset_cache(self) -> bool:
        self.num_resets += 1
        return True

    # --- comparing ---

    def _follow(self, request: RequestInfo, call: str) -> str:
        name = request.request_id
        before, self._last_call[name] = self._last_call[name], call
        if before not in _CALLS_BEFORE[call]:
            expect(_SEAM, f"{call} of request {name} after", before, _CALLS_BEFORE[call])
        return name

    def _keys(
        self, request: RequestInfo, block_ids: BlockIds, num_tokens: int
    ) -> dict[int, OffloadKey]:
        """Return the keys that the blocks of computed tokens must have."""
        return {
            block: make_offload_key(request.block_hashes[number], group)
            for group, blocks in enumerate(block_ids)
            for number, block in enumerate(blocks[: num_tokens // BLOCK_SIZE])
            if block != _NULL_BLOCK_ID
        }

    def _expect_blocks(self, request: RequestInfo, block_ids: BlockIds, num_tokens: int) -> None:
        """Check that a block table has a block for each full block of tokens in the window."""
        num_full, left = num_tokens // BLOCK_SIZE, max(0, num_tokens - WINDOW + 1) // BLOCK_SIZE
        real = [[block != _NULL_BLOCK_ID for block in blocks[:num_full]] for blocks in block_ids]
        behind = [left if group else 0 for group in range(self._num_groups)]
        for flags, number in zip(real, behind, strict=False):
            flags[:number] = [True] * len(flags[:number])  # such blocks are null, or still there
        expected = [[True] * num_full] * self._num_groups
        expect(_SEAM, f"existing blocks of request {request.request_id}", real, expected)

    def _expect_keys(self, request: RequestInfo, block_ids: BlockIds, num_tokens: int) -> None:
        """Check a block table against the keys that the pool registered for its blocks."""
        self._expect_blocks(request, block_ids, num_tokens)
        keys = self._keys(request, block_ids, num_tokens)
        found = zip(keys, self.view.block_keys([*keys]), strict=True)
        shown = {block: "+".join(map(bytes.hex, each)) for block, each in found}
        expect(_SEAM, "keys of cached blocks", shown, _hex(keys))


class TrialWorker(WorkerConnector):
    """Ends each job at once; the loads of some requests fail.

    Args:
        failing: Ids of these requests.
        page_bytes: Bytes of a page of each tensor.
    """

    def __init__(self, failing: set[str], page_bytes: int) -> None:
        self._failing = failing
        self._page_bytes = page_bytes
        self._ended: list[TransferResult] = []

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        sizes = {tensor.page_size_bytes for tensor in kv_caches.tensors}
        expect("geometry", "bytes of a page", sizes, {self._page_bytes})

    @override
    def start_plan(self, plan: StepPlan) -> None:
        self._ended += [
            TransferResult(job.job_id, success=job.request_id not in self._failing)
            for job in plan.loads
        ]

    @override
    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    @override
    def wait(self, job_ids: Sequence[int]) -> None:
        """Do nothing, because jobs end at once."""


def _hex(keys: dict[int, OffloadKey]) -> dict[int, str]:
    return {block: key.hex() for block, key in keys.items()}
