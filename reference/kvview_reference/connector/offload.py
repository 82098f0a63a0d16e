"""Offloading to host memory that does not change the engine's eviction order.

``OffloadConnector`` stores each block after its computation. The block is held from the step that
computes it, and is stored in the next step. The request of the block usually still uses the block
at that time, so the hold takes no memory from other requests. Exceptions are blocks that a window
or a finished request releases before the store has ended. No block is held while few blocks are
free, because a request that waits for blocks may lose its prefix to other requests. So the GPU has
the same number of hits as without a connector.

Source: vLLM 0.33.0, ``vllm/v1/simple_kv_offload/manager.py`` (the eager mode); PR #39654.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt
from typing_extensions import override

from kvview import (
    BlockIds,
    CanonicalKVCaches,
    Connector,
    ConnectorConfig,
    CPULoadStoreSpec,
    EngineFacts,
    FinishReason,
    FullBlock,
    GPUBlockPoolView,
    GPULoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PinBudgetExceeded,
    ReqContext,
    RequestInfo,
    RequestStep,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    SupportsFreeCount,
    SupportsPinBudget,
    SupportsPoolSize,
    TransferJob,
    TransferResult,
    WorkerConnector,
    full_blocks,
    get_offload_group_idx,
)
from kvview.options import parse_options
from kvview.prefix_search import CachedBlocks
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.transfer import CPUGPUTransferWorker

LOOKAHEAD_STEPS = 4  # a store takes about two, and blocks are allocated meanwhile
# Share of the pool that is left to the engine, because the lookahead may cover a small pool.
_SMALLEST_SHARE = 16


class OffloadOptions(BaseModel):
    """Settings of :class:`OffloadConnector`.

    Args:
        cpu_blocks: Number of blocks of the host tier; with 0, no block is offloaded.
        policy: Name of the tier's cache policy.
        store_threshold: Number of times that a block must be computed before it is stored.
        lookahead_blocks: Number of free blocks below which no block is held. None stands for
            ``LOOKAHEAD_STEPS`` times the blocks that a step may allocate, but at most a sixteenth
            of the pool.
        enable_events: Whether offloading events are recorded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu_blocks: NonNegativeInt = 10_000
    policy: str = "lru"
    store_threshold: PositiveInt = 1
    lookahead_blocks: PositiveInt | None = None
    enable_events: bool = False


class OffloadConnector(Connector):
    """Offloads computed blocks to host memory, each once."""

    contract_version = "1.0"

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.options = parse_options(OffloadOptions, config.options)

    @override
    def make_scheduler(self) -> SchedulerConnector:
        if not self.options.cpu_blocks:
            return SchedulerConnector()
        return OffloadScheduler(self.config, self.options)

    @override
    def make_worker(self) -> WorkerConnector:
        if not self.options.cpu_blocks:
            return WorkerConnector()
        return OffloadWorker(self.options)


@dataclass(frozen=True)
class _Store:
    keys: Sequence[OffloadKey]
    block_ids: Sequence[int]  # held; the most recent first, as a prefix goes


@dataclass(frozen=True)
class _Load:
    keys: Sequence[OffloadKey]
    ctx: ReqContext
    num_computed_tokens: int  # blocks that the request had before it


class _TierBlocks(CachedBlocks):
    """Count the blocks of one group that the tier can load now.

    Args:
        manager: Manager of the tier.
        ctx: The request.
        keys: Keys of the request's blocks.
        num_on_gpu: Number of leading blocks that need not be loaded, because they are on the GPU.
    """

    def __init__(
        self,
        manager: CPUOffloadingManager,
        ctx: ReqContext,
        keys: Sequence[OffloadKey],
        num_on_gpu: int,
    ) -> None:
        super().__init__(self._is_loadable)
        self._manager, self._ctx = manager, ctx
        self._keys, self._num_on_gpu = keys, num_on_gpu

    def _is_loadable(self, block: int) -> bool:
        return block < self._num_on_gpu or (
            block < len(self._keys)
            and self._manager.lookup(self._keys[block], self._ctx) is LookupResult.HIT
        )

    @override
    def first_missing(self, stop: int) -> int:
        if self._num_leading is None:
            keys = self._keys[self._num_on_gpu : stop]
            self._num_leading = self._num_on_gpu + self._manager.num_leading_hits(keys)
        return min(stop, self._num_leading)


class OffloadScheduler(SchedulerConnector):
    """The scheduler half, which plans loads and stores, and holds blocks while they are stored.

    ``num_skipped_blocks`` counts blocks that could have been stored but were not, because too few
    blocks were free, the pin budget was used up, or the tier was busy.
    """

    def __init__(self, config: ConnectorConfig, options: OffloadOptions) -> None:
        self._geometry = config.geometry
        self._options = options
        self._manager = CPUOffloadingManager(
            options.cpu_blocks,
            options.policy,
            enable_events=options.enable_events,
            store_threshold=options.store_threshold,
        )
        self._view: GPUBlockPoolView | None = None
        self._num_free_blocks: Callable[[], int] | None = None
        self._num_pinnable_blocks: Callable[[], int] | None = None
        self._null_block_id = 0
        self._reserve = options.lookahead_blocks or 0
        self._job_ids = count()
        self._planned_loads: list[TransferJob] = []
        self._planned_stores: list[TransferJob] = []
        self._next_store: TransferJob | None = None  # of the blocks that are being computed
        self._looks_at_all = False  # in the next step, because the last one had no room for any
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, _Store] = {}
        self._num_seen_tokens: dict[str, int] = {}  # of running requests: hit, loaded or seen
        self.num_skipped_blocks = 0

    @override
    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        self._view = view
        if isinstance(view, SupportsPoolSize):
            self._null_block_id = view.null_block_id
        # Once, because testing a protocol costs 20 us, as much as the whole plan of a step.
        self._num_free_blocks = (
            view.num_free_blocks if isinstance(view, SupportsFreeCount) else None
        )
        self._num_pinnable_blocks = (
            view.num_pinnable_blocks if isinstance(view, SupportsPinBudget) else None
        )

    @override
    def on_engine_ready(self, facts: EngineFacts) -> None:
        if self._options.lookahead_blocks is None:
            lookahead = LOOKAHEAD_STEPS * facts.max_blocks_per_step
            self._reserve = min(lookahead, facts.num_gpu_blocks // _SMALLEST_SHARE)

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        ctx = ReqContext(request.request_id)
        geometry, hashes = self._geometry, request.block_hashes
        tier = [
            _TierBlocks(
                self._manager,
                ctx,
                geometry.block_keys(hashes, index, range(len(hashes))),
                num_computed_tokens // group.block_size,
            )
            for index, group in enumerate(geometry.groups)
        ]
        num_tokens = geometry.search_prefix(request.num_tokens - 1, tier)
        return max(0, num_tokens - num_computed_tokens)

    @override
    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        ctx = ReqContext(request.request_id)
        num_tokens = num_computed_tokens + num_external_tokens
        self._num_seen_tokens[request.request_id] = num_tokens
        # Head first: a chain is evicted from its tail.
        if num_tokens:
            self._manager.touch(self._keys_of_prefix(request, num_tokens), ctx)
        if not num_external_tokens:
            return
        keys: list[OffloadKey] = []
        gpu_block_ids: list[int] = []
        group_sizes: list[int] = []
        block_indices: list[int] = []
        for index, group in enumerate(self._geometry.groups):
            first = num_computed_tokens // group.block_size
            required = group.required_blocks(num_tokens)
            numbers = range(max(first, required.start), max(first, required.stop))
            keys += self._geometry.block_keys(request.block_hashes, index, numbers)
            gpu_block_ids += [block_ids[index][n] for n in numbers]
            group_sizes.append(len(numbers))
            block_indices.append(numbers[0] if numbers else 0)
        job = TransferJob(
            next(self._job_ids),
            self._manager.prepare_load(keys, ctx),
            GPULoadStoreSpec(gpu_block_ids, group_sizes, block_indices),
            request.request_id,
        )
        self._loads[job.job_id] = _Load(keys, ctx, num_computed_tokens)
        self._planned_loads.append(job)

    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        stores, self._planned_stores = self._planned_stores, []
        if job := self._plan_store(step):
            stores.append(job)
        loads, self._planned_loads = self._planned_loads, []
        return StepPlan(loads, stores)

    def _plan_store(self, step: StepInfo) -> TransferJob | None:
        """Return the store job of this step, for the blocks that the previous step computed."""
        running = step.scheduled if self._looks_at_all else step.filling()
        for one in running:
            self._look_back(one.request.request_id, one.num_computed_tokens)
        job, self._next_store = self._next_store, None
        room = self._room()
        self._looks_at_all = room <= 0  # the same requests are read again, if they run
        if room > 0:
            self._next_store = self._store(self._computed(running), room)
        return job

    @override
    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        # Blocks are short: this is the wrong moment to hold some.
        self._let_go(self._last_computed(request, block_ids), may_hold=False)

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self._let_go(self._last_computed(request, block_ids), may_hold=True)

    def _let_go(self, blocks: Sequence[FullBlock], *, may_hold: bool) -> None:
        """Record the last new blocks of a request that is about to lose its blocks."""
        if blocks and (job := self._store(blocks, self._room() if may_hold else 0)):
            self._planned_stores.append(job)

    def _computed(self, steps: Iterable[RequestStep]) -> list[FullBlock]:
        """Return new full blocks; a generated block gets a hash only with the next token."""
        blocks: list[FullBlock] = []
        size, seen = self._geometry.hash_block_size, self._num_seen_tokens
        for running in steps:
            first = running.num_computed_tokens
            end = first + running.num_scheduled_tokens
            first = seen.setdefault(running.request.request_id, first)
            if end // size > first // size:  # else no block of any group became full
                blocks += self._newly_computed(running.request, running.block_ids, end)
        return blocks

    def _last_computed(self, request: RequestInfo, block_ids: BlockIds) -> list[FullBlock]:
        if request.request_id not in self._num_seen_tokens:
            return []  # it never had blocks
        self._look_back(request.request_id, request.num_computed_tokens + 1)
        blocks = self._newly_computed(request, block_ids, request.num_computed_tokens)
        del self._num_seen_tokens[request.request_id]
        return blocks

    def _newly_computed(
        self, request: RequestInfo, block_ids: BlockIds, computed: int
    ) -> list[FullBlock]:
        """Return the blocks of a request that became full since the last call, each once."""
        name = request.request_id
        first = self._num_seen_tokens[name]
        hashed = len(request.block_hashes) * self._geometry.hash_block_size
        self._num_seen_tokens[name] = max(first, min(computed, hashed))
        return list(
            full_blocks(
                self._geometry,
                request,
                block_ids,
                null_block_id=self._null_block_id,
                first_token=first,
                last_token=computed,
            )
        )

    def _room(self) -> int:
        """Return the number of blocks that may be held for stores now."""
        view = self._view
        if view is None:
            return 0  # never bound: nothing can be held, so nothing is offloaded
        room = self._manager.num_blocks - self._manager.num_protected_blocks()
        if self._num_free_blocks is not None:
            room = min(room, self._num_free_blocks() - self._reserve)
        if self._num_pinnable_blocks is not None:
            room = min(room, self._num_pinnable_blocks())
        return room

    def _store(self, blocks: Iterable[FullBlock], room: int) -> TransferJob | None:
        """Hold and store blocks as far as the tier has room, in the order of each prefix."""
        view, ctx, lookup = self._view, ReqContext(), self._manager.lookup
        block_of = {block.key: block.block_id for block in blocks}
        missing = [key for key in block_of if lookup(key, ctx) is LookupResult.MISS]
        wanted = missing[: max(room, 0)]
        output = self._manager.prepare_store(wanted, ctx) if wanted else None
        self.num_skipped_blocks += len(missing) - (len(wanted) if output else 0)
        if view is None or output is None or not output.keys_to_store:
            return None
        keys = output.keys_to_store
        block_ids = [block_of[key] for key in keys]
        try:
            view.touch_blocks(block_ids)
        except PinBudgetExceeded:  # of a view that cannot return the rest of its budget
            self._manager.complete_store(keys, ctx, success=False)
            self.num_skipped_blocks += len(keys)
            return None
        job_id = next(self._job_ids)
        self._stores[job_id] = _Store(keys, block_ids)
        return TransferJob(job_id, *self._by_group(keys, block_ids, output.store_spec))

    def _by_group(
        self, keys: Sequence[OffloadKey], block_ids: Sequence[int], dst: Any
    ) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
        """Order both sides of a store by group."""
        if len(self._geometry.groups) == 1:
            return GPULoadStoreSpec(block_ids, [len(keys)], [0]), dst
        groups: list[list[int]] = [[] for _ in self._geometry.groups]
        for place, key in enumerate(keys):
            groups[get_offload_group_idx(key)].append(place)
        order = list(chain.from_iterable(groups))
        return (
            GPULoadStoreSpec(
                [block_ids[i] for i in order], list(map(len, groups)), [0] * len(groups)
            ),
            CPULoadStoreSpec([dst.block_ids[i] for i in order]),
        )

    @override
    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        for result in results:
            if load := self._loads.pop(result.job_id, None):
                self._manager.complete_load(load.keys, load.ctx)
                if not result.success:
                    self._forget_step(load.ctx.req_id, load.num_computed_tokens)
            elif store := self._stores.pop(result.job_id, None):
                self._manager.complete_store(store.keys, ReqContext(), success=result.success)
                self._free(store.block_ids)

    def _look_back(self, name: str, num_computed_tokens: int) -> None:
        """Handle a failed load of a sibling connector, if a request lost computed tokens by it."""
        if num_computed_tokens < self._num_seen_tokens.get(name, 0):
            self._forget_step(name, num_computed_tokens)

    def _forget_step(self, name: str, num_computed_tokens: int) -> None:
        """Handle a failed load within a step, which makes the step's computed blocks invalid."""
        job, self._next_store = self._next_store, None
        if job is not None:
            store = self._stores.pop(job.job_id)
            self._manager.complete_store(store.keys, ReqContext(), success=False)
            self._free(store.block_ids)
            self.num_skipped_blocks += len(store.keys)
        if name in self._num_seen_tokens:
            self._num_seen_tokens[name] = num_computed_tokens

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._manager.take_events()

    @override
    def has_pending_work(self) -> bool:
        return bool(self._planned_loads or self._loads or self._stores)

    @override
    def reset_cache(self) -> bool:
        self._manager.reset()
        return True

    @override
    def shutdown(self) -> None:
        stores, self._stores = self._stores, {}
        for store in stores.values():
            self._free(store.block_ids)
        self._view = None
        self._manager.shutdown()

    def _free(self, block_ids: Sequence[int]) -> None:
        """Release the blocks of a store, so that the end of a prefix is evicted first."""
        if self._view is not None:
            self._view.free_blocks(block_ids[::-1])

    def _keys_of_prefix(self, request: RequestInfo, num_tokens: int) -> list[OffloadKey]:
        return [
            key
            for index, group in enumerate(self._geometry.groups)
            for key in self._geometry.block_keys(
                request.block_hashes, index, group.required_blocks(num_tokens)
            )
        ]


class OffloadWorker(WorkerConnector):
    """The worker half, a transfer worker that runs the jobs of the plan."""

    def __init__(self, options: OffloadOptions) -> None:
        self._options = options
        self._worker: CPUGPUTransferWorker | None = None
        self._refused: list[TransferResult] = []

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[torch.Tensor]) -> None:
        self._worker = CPUGPUTransferWorker(kv_caches, self._options.cpu_blocks)

    @override
    def start_plan(self, plan: StepPlan) -> None:
        assert self._worker is not None, "register_kv_caches comes first"
        for job in (*plan.loads, *plan.stores):
            if not self._worker.transfer_async(job.job_id, (job.src, job.dst)):
                # The worker does not report this job, so this half does (CONN-3).
                self._refused.append(TransferResult(job.job_id, False, error="refused"))

    @override
    def get_finished(self) -> list[TransferResult]:
        refused, self._refused = self._refused, []
        return refused + (self._worker.get_finished() if self._worker else [])

    @override
    def wait(self, job_ids: Sequence[int]) -> None:
        if self._worker:
            self._worker.wait(job_ids)

    @override
    def shutdown(self) -> None:
        if self._worker:
            self._worker.shutdown()
