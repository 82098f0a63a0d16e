"""The scheduler half of a :class:`StoreConnector`, which plans jobs and holds blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, count

from typing_extensions import override

from kvview.connector import (
    BlockIds,
    EngineFacts,
    FinishReason,
    FullBlock,
    RequestInfo,
    RequestStep,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferJob,
    full_blocks,
)
from kvview.events import OffloadingEvent
from kvview.geometry import CacheGeometry, FullAttention
from kvview.keys import OffloadKey, get_offload_group_idx
from kvview.pool import GPUBlockPoolView
from kvview.transfer import GPULoadStoreSpec, TransferResult
from kvview_reference.store_connector.planning.gpu_blocks import GPUBlocks
from kvview_reference.store_connector.planning.page_index import PageIndex, Pins, TierSettings
from kvview_reference.store_connector.planning.request_prefix import (
    RequestLimits,
    blocks_to_load,
    keys_beyond,
    longest_prefix,
)
from kvview_reference.store_connector.store_plan import StorePlan

_SMALLEST_PART = 4  # of the pool: a smaller tier cannot make up for the victims that are held
_MOST_WAITS = 64  # maximum of steps in which a request waits for lookups


@dataclass(frozen=True)
class _Load:
    keys: Sequence[OffloadKey]
    pins: Pins
    request_id: str
    num_computed_tokens: int  # before the load, on the GPU


@dataclass(frozen=True)
class _Store:
    keys: Sequence[OffloadKey]
    block_ids: Sequence[int]  # held


class StoreScheduler(SchedulerConnector):
    """Loads the pages that the index holds, and stores blocks at the moment that the mode sets.

    1. A block is considered for a store once. The store starts in a step after the one that
       computes the block, and a load that fails in between cancels it. So a failed load cannot make
       the bytes of a store invalid.

    Args:
        geometry: Geometry of the engine.
        settings: Choices of the author and the user.
    """

    def __init__(self, geometry: CacheGeometry, settings: TierSettings) -> None:
        self._geometry = geometry
        self._settings = settings
        mode = settings.mode
        # A window or a state may lose a block in the step after the one that computes it, so such
        # blocks are held one step ahead; blocks of other groups stay until the request ends.
        has_windows = not all(isinstance(group, FullAttention) for group in geometry.groups)
        self._looks_ahead = has_windows and mode != "finish"
        self._looks_early = mode == "eager" and not self._looks_ahead
        self._view: GPUBlockPoolView | None = None
        self._gpu: GPUBlocks | None = None  # exists if a pool was bound
        self._ready_index: PageIndex | None = None  # exists once the engine is ready
        self._seen: dict[str, int] = {}  # by request: number of tokens that were considered
        self._waits: Counter[str] = Counter()  # steps of waiting for lookups, by request
        self._job_ids = count()
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, _Store] = {}
        self._planned_loads: list[TransferJob] = []
        self._planned_stores: list[TransferJob] = []
        self._ahead: list[TransferJob] = []  # stores of the blocks that the current step computes
        self.num_skipped_blocks = 0

    @override
    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        self._view = view

    @override
    def on_engine_ready(self, facts: EngineFacts) -> None:
        index = PageIndex(self._geometry, self._settings, facts.page_bytes)
        self._ready_index = index
        if self._view is not None:
            is_large = index.num_blocks * _SMALLEST_PART >= facts.num_gpu_blocks
            wants_victims = is_large and self._settings.mode in ("victim", "exclusive")
            self._gpu = GPUBlocks(self._view, facts, wants_victims=wants_victims)

    @property
    def _index(self) -> PageIndex:
        assert self._ready_index is not None, "on_engine_ready comes first"
        return self._ready_index

    # --- loads ---

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        index, prefix = self._index, (self._geometry, request, num_computed_tokens)
        limits = RequestLimits.of(request.content.transfer_params)
        most_tokens = num_computed_tokens + limits.max_load_tokens
        num_hits = index.num_leading_hits if limits.uses_store else index.num_leading_in_memory
        unknown = index.look_up(keys_beyond(*prefix)) if limits.uses_store else ()
        num_tokens = longest_prefix(*prefix, most_tokens, num_hits)
        if unknown:
            most = longest_prefix(*prefix, most_tokens, partial(index.num_leading_hits_or, unknown))
            if most > num_tokens and self._may_wait(request.request_id):
                return None
        if self._settings.prefetch:
            keys = blocks_to_load(*prefix, num_tokens)[1]
            pins = index.pin(keys)  # so that no page is evicted to make room for another one
            index.unpin(pins + index.pin_fetched(keys))
        return num_tokens - num_computed_tokens

    def _may_wait(self, request_id: str) -> bool:
        """Whether a request waits for lookups, for a few steps because results may expire."""
        self._waits[request_id] += 1
        return self._waits[request_id] <= _MOST_WAITS

    @override
    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        num_tokens = num_computed_tokens + num_external_tokens
        self._waits.pop(request.request_id, None)
        self._seen[request.request_id] = num_tokens
        if num_tokens:
            self._index.use(blocks_to_load(self._geometry, request, 0, num_tokens)[1])
        if not num_external_tokens:
            return
        needed, keys = blocks_to_load(self._geometry, request, num_computed_tokens, num_tokens)
        blocks = [
            table[number]
            for table, numbers in zip(block_ids, needed, strict=True)
            for number in numbers
        ]
        src, pins = self._index.prepare_load(keys)
        job = TransferJob(
            next(self._job_ids),
            src,
            GPULoadStoreSpec(blocks, list(map(len, needed)), [part.start for part in needed]),
            request.request_id,
        )
        self._loads[job.job_id] = _Load(keys, pins, request.request_id, num_computed_tokens)
        self._planned_loads.append(job)
        if self._gpu is not None and self._leaves_memory:
            self._gpu.add(
                FullBlock(get_offload_group_idx(key), 0, block_id, key)
                for block_id, key in zip(blocks, keys, strict=True)
            )

    @property
    def _leaves_memory(self) -> bool:
        """Whether a page leaves memory once it is loaded."""
        is_exclusive = self._settings.mode == "exclusive"
        return is_exclusive and self._gpu is not None and self._gpu.finds_victims

    # --- stores ---

    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        running = step.filling() if self._gpu is not None else ()
        for one in running if self._looks_ahead else ():
            self._look_back(one.request.request_id, one.num_computed_tokens)
        self._planned_stores += self._ahead
        self._ahead = []
        if self._looks_early:
            self._look_at(running, is_ahead=False)
        if self._gpu is not None and self._gpu.finds_victims:
            self._store(self._gpu.take_victims())
        loads, self._planned_loads = self._planned_loads, []
        stores, self._planned_stores = self._planned_stores, []
        if self._looks_ahead:
            self._look_at(running, is_ahead=True)
            self._ahead, self._planned_stores = self._planned_stores, []
        places = self._index.take_places()
        return StorePlan(loads, stores, places) if places else StepPlan(loads, stores)

    def _look_at(self, running: Iterable[RequestStep], *, is_ahead: bool) -> None:
        """Consider the blocks of running requests, also those that this step computes."""
        if self._gpu is not None and self._gpu.room() > 0:
            for one in running:
                ahead = one.num_scheduled_tokens if is_ahead else 0
                self._on_computed(one.request, one.block_ids, one.num_computed_tokens + ahead)

    def _look_back(self, request_id: str, num_computed_tokens: int) -> None:
        """Handle a failed load of a sibling connector, if a request lost computed tokens by it."""
        if num_computed_tokens < self._seen.get(request_id, 0):
            self._forget_step(request_id, num_computed_tokens)

    def _forget_step(self, request_id: str, num_computed_tokens: int) -> None:
        """Cancel the stores of the last step, whose blocks are invalid because a load failed."""
        ahead, self._ahead = self._ahead, []
        for job in ahead:
            store = self._stores.pop(job.job_id)
            self._index.end_store(store.keys, set(store.keys), None)
            self._release(store)
            self.num_skipped_blocks += len(store.keys)
        if request_id in self._seen:
            self._seen[request_id] = num_computed_tokens

    @override
    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        if self._looks_ahead:
            self._look_back(request.request_id, request.num_computed_tokens + 1)
        self._on_computed(request, block_ids, request.num_computed_tokens)
        self._seen.pop(request.request_id, None)

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self._waits.pop(request.request_id, None)
        self.on_request_preempted(request, block_ids)

    def _on_computed(
        self, request: RequestInfo, block_ids: BlockIds, num_computed_tokens: int
    ) -> None:
        """Store the blocks that became full since the last call, or remember them for later."""
        first = self._seen.get(request.request_id)
        if first is None or self._gpu is None:
            return  # the request never had blocks
        hashed = len(request.block_hashes) * self._geometry.hash_block_size
        limits = RequestLimits.of(request.content.transfer_params)
        end = min(num_computed_tokens, hashed, limits.max_offload_tokens)
        self._seen[request.request_id] = max(first, end)
        if end <= first:
            return
        blocks: Iterable[FullBlock] = full_blocks(
            self._geometry,
            request,
            block_ids,
            null_block_id=self._gpu.null_block_id,
            first_token=first,
            last_token=end,
        )
        if (admits := self._settings.admits) is not None:
            blocks = [block for block in blocks if admits(block, request)]
        if self._gpu.finds_victims:
            self._gpu.add(blocks)
        else:
            self._store(blocks)

    def _store(self, blocks: Iterable[FullBlock]) -> None:
        """Hold and plan the stores of as many of the blocks as there is room for."""
        index, gpu = self._index, self._gpu
        by_key = {block.key: block for block in blocks}
        new = index.new(by_key)
        if not new or gpu is None:
            return
        wanted = new[: max(0, gpu.room())]
        chosen = [by_key[key] for key in index.prepare_store(wanted)]
        is_rare = self._settings.store_threshold > 1  # then few of the wanted blocks are stored
        self.num_skipped_blocks += len(new) - len(wanted if is_rare else chosen)
        if not chosen:
            return
        groups = range(len(self._geometry.groups))
        if len(groups) > 1:
            chosen.sort(key=lambda block: block.group_idx)
        group_of, _, block_ids, keys = zip(*chosen, strict=True)
        gpu.hold(block_ids)
        job = TransferJob(
            next(self._job_ids),
            GPULoadStoreSpec(block_ids, list(map(group_of.count, groups)), [0] * len(groups)),
            index.store_spec(keys),
        )
        self._stores[job.job_id] = _Store(keys, block_ids)
        self._planned_stores.append(job)

    # --- the ends of jobs ---

    @override
    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        for result in results:
            if load := self._loads.pop(result.job_id, None):
                self._end_load(load, result.success)
            elif store := self._stores.pop(result.job_id, None):
                lost: set[OffloadKey] = set()
                if not result.success:
                    lost = set(store.keys) - set(compress(store.keys, result.moved or ()))
                self._index.end_store(store.keys, lost, result.transfer_size)
                self._release(store)

    def _end_load(self, load: _Load, success: bool) -> None:
        if not success:
            self._index.forget(load.keys)
            self._forget_step(load.request_id, load.num_computed_tokens)
        self._index.unpin(load.pins)
        if success and self._leaves_memory:
            self._index.leave_memory(load.keys)

    @override
    def take_events(self) -> list[OffloadingEvent]:
        return [] if self._ready_index is None else self._ready_index.take_events()

    @override
    def has_pending_work(self) -> bool:
        return bool(self._loads or self._stores)

    @override
    def reset_cache(self) -> bool:
        if self._ready_index is not None:
            if self._settings.has_names and self.has_pending_work():
                return False
            self._ready_index.reset()
        if self._gpu is not None:
            self._gpu.clear()
        return True

    @override
    def shutdown(self) -> None:
        for store in self._stores.values():
            self._release(store)
        self._stores.clear()
        self._gpu = None
        if self._settings.shared is not None:  # also if the engine never was ready
            self._settings.shared.close()

    def _release(self, store: _Store) -> None:
        if self._gpu is not None:
            self._gpu.release(store.block_ids)
