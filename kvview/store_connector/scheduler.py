"""The scheduler half of a :class:`~kvview.StoreConnector`: plans jobs, and holds their blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, count

from typing_extensions import override

from kvview.connector import (
    BlockIds,
    EngineFacts,
    FinishReason,
    FullBlock,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferJob,
)
from kvview.events import OffloadingEvent
from kvview.geometry import CacheGeometry
from kvview.keys import OffloadKey, get_offload_group_idx
from kvview.pool import GPUBlockPoolView, SupportsPoolSize
from kvview.store_connector.candidates import Candidates
from kvview.store_connector.gpu_victims import GPUVictims
from kvview.store_connector.holds import Holds
from kvview.store_connector.page_index import Behaviour, PageIndex
from kvview.store_connector.prefixes import Prefixes
from kvview.store_connector.store_plan import StorePlan, StoreSpec
from kvview.transfer import GPULoadStoreSpec, TransferResult

_LOOKAHEAD_STEPS = 4  # a store takes about two, and blocks are allocated meanwhile
_SMALLEST_SHARE = 16  # of the pool is left to the engine: a small pool is all lookahead


@dataclass(frozen=True)
class _Load:
    keys: Sequence[OffloadKey]
    request_id: str
    num_computed_tokens: int  # before the load


@dataclass(frozen=True)
class _Store:
    keys: Sequence[OffloadKey]
    block_ids: Sequence[int]  # held


class StoreScheduler(SchedulerConnector):
    """Loads the pages that the index holds, and stores blocks at the moment of the mode.

    Args:
        geometry: Of the engine.
        behaviour: Choices of the author and the user.
    """

    def __init__(self, geometry: CacheGeometry, behaviour: Behaviour) -> None:
        self._geometry = geometry
        self._behaviour = behaviour
        self._index = PageIndex(geometry, behaviour)
        self._prefixes = Prefixes(geometry)
        self._candidates = Candidates(geometry, self._index.memory.policy)
        self._victims: GPUVictims | None = None  # in the modes that store them
        self._holds: Holds | None = None  # of a pool that was bound
        self._job_ids = count()
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, _Store] = {}
        self._planned_loads: list[TransferJob] = []
        self._planned_stores: list[TransferJob] = []
        self._next_store: TransferJob | None = None  # of blocks that this step computes
        self._looks_at_all = False  # in the next step, because there was no room in the last
        self.num_skipped_blocks = 0

    @override
    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        self._holds = Holds(view)
        if isinstance(view, SupportsPoolSize):
            self._candidates.null_block_id = view.null_block_id

    @override
    def on_engine_ready(self, facts: EngineFacts) -> None:
        self._index.start(facts.page_bytes)
        holds, lookahead = self._holds, _LOOKAHEAD_STEPS * facts.max_blocks_per_step
        if holds is None:
            return
        holds.num_reserved = min(lookahead, facts.num_gpu_blocks // _SMALLEST_SHARE)
        if self._behaviour.mode in ("victim", "exclusive") and GPUVictims.are_visible(holds.view):
            self._victims = GPUVictims(holds.view, lookahead)
            holds.keeps_order = True

    # --- loads ---

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        num_tokens = self._match(request, num_computed_tokens)
        if num_tokens is None:
            return None
        if self._behaviour.prefetch:
            keys = self._prefixes.to_load(request, num_computed_tokens, num_tokens)[1]
            self._index.pin(keys)  # so that room for one page is not made by evicting another
            self._index.fetch(keys)
            self._index.unpin(keys)
        return num_tokens - num_computed_tokens

    def _match(self, request: RequestInfo, computed: int) -> int | None:
        is_held = self._index.__contains__
        if self._behaviour.shared is None:
            return self._prefixes.longest(request, computed, is_held)
        keys = self._prefixes.keys_between(request, computed, request.num_tokens - 1)
        found = self._index.look_up(keys)
        return self._prefixes.longest_known(request, computed, is_held, found)

    @override
    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        num_tokens = num_computed_tokens + num_external_tokens
        self._candidates.begin(request, num_tokens)
        if self._victims is not None:
            for group in self._geometry.groups:
                self._victims.allocated(1 + -(-num_external_tokens // group.block_size))
        if num_tokens:
            self._index.use(self._prefixes.to_load(request, 0, num_tokens)[1])
        if not num_external_tokens:
            return
        needed, keys = self._prefixes.to_load(request, num_computed_tokens, num_tokens)
        blocks = [
            table[number]
            for table, numbers in zip(block_ids, needed, strict=True)
            for number in numbers
        ]
        self._index.pin(keys)
        self._index.fetch(keys)
        job = TransferJob(
            next(self._job_ids),
            StoreSpec([self._index.name(key) for key in keys]),
            GPULoadStoreSpec(blocks, list(map(len, needed)), [part.start for part in needed]),
            request.request_id,
        )
        self._loads[job.job_id] = _Load(keys, request.request_id, num_computed_tokens)
        self._planned_loads.append(job)
        if self._victims is not None and self._behaviour.mode == "exclusive":
            self._victims.add(
                FullBlock(get_offload_group_idx(key), 0, block_id, key)
                for block_id, key in zip(blocks, keys, strict=True)
            )

    # --- stores ---

    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        stores, self._planned_stores = self._planned_stores, []
        if self._behaviour.mode != "finish" and (job := self._store_of_step(step)):
            stores.append(job)
        loads, self._planned_loads = self._planned_loads, []
        moves = self._index.take_moves()
        return StorePlan(loads, stores, moves) if moves else StepPlan(loads, stores)

    def _store_of_step(self, step: StepInfo) -> TransferJob | None:
        running = step.scheduled if self._looks_at_all else step.filling()
        for one in running:
            self._look_back(one.request.request_id, one.num_computed_tokens)
        job, self._next_store = self._next_store, None
        room = self._room()
        if self._victims is not None:
            computed = self._candidates.after(running)
            self._victims.add(computed)
            # As many blocks are started as become full, but for the one counted before.
            self._victims.allocated(len(computed))
            if room > 0 and self._victims.are_near:
                return self._store(self._victims.take(room))
            return None
        self._looks_at_all = room <= 0
        if room > 0:
            self._next_store = self._store(self._candidates.after(running))
        return job

    @override
    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        self._let_go(request, block_ids)

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self._let_go(request, block_ids)

    def _let_go(self, request: RequestInfo, block_ids: BlockIds) -> None:
        self._look_back(request.request_id, request.num_computed_tokens + 1)
        blocks = self._candidates.at_end(request, block_ids)
        if self._victims is not None:
            self._victims.add(blocks)
        elif job := self._store(blocks):
            self._planned_stores.append(job)

    def _room(self) -> int:
        return 0 if self._holds is None else self._holds.room()

    def _store(self, blocks: Iterable[FullBlock]) -> TransferJob | None:
        """Hold blocks and plan their store, as far as there is room for them."""
        new = {block.key: block for block in blocks if self._index.is_new(block.key)}
        room = self._room() if new else 0
        chosen: list[FullBlock] = []
        for key, block in new.items():
            if len(chosen) >= room or not self._index.reserve(key):
                break
            chosen.append(block)
        self.num_skipped_blocks += len(new) - len(chosen)
        if not chosen or self._holds is None:
            return None
        groups = range(len(self._geometry.groups))
        if len(groups) > 1:
            chosen.sort(key=lambda block: block.group_idx)
        block_ids = [block.block_id for block in chosen]
        keys = [block.key for block in chosen]
        self._holds.hold(block_ids)
        sizes = Counter(block.group_idx for block in chosen)
        job = TransferJob(
            next(self._job_ids),
            GPULoadStoreSpec(block_ids, [sizes[group] for group in groups], [0] * len(groups)),
            StoreSpec([self._index.name(key) for key in keys], *self._behaviour.targets),
        )
        self._stores[job.job_id] = _Store(keys, block_ids)
        return job

    # --- the ends of jobs ---

    @override
    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        for result in results:
            if load := self._loads.pop(result.job_id, None):
                self._end_load(load, result.success)
            elif store := self._stores.pop(result.job_id, None):
                self._end_store(store, result)

    def _end_load(self, load: _Load, success: bool) -> None:
        self._index.unpin(load.keys)
        if success:
            leaves = self._victims is not None and self._behaviour.mode == "exclusive"
            self._index.loaded(load.keys, leave_memory=leaves)
        else:
            self._index.forget(load.keys)
            self._forget_step(load.request_id, load.num_computed_tokens)

    def _end_store(self, store: _Store, result: TransferResult) -> None:
        flags = [True] * len(store.keys) if result.success else result.moved
        moved = set(compress(store.keys, flags or ()))
        self._index.end_store(store.keys, moved, result.transfer_size)
        self._release(store)

    def _look_back(self, request_id: str, num_computed_tokens: int) -> None:
        """Notice that a load of another connector failed within the last step."""
        if self._candidates.has_less(request_id, num_computed_tokens):
            self._forget_step(request_id, num_computed_tokens)

    def _forget_step(self, request_id: str, num_computed_tokens: int) -> None:
        """A load failed: where loads end within a step, the KV that the step computed is void."""
        job, self._next_store = self._next_store, None
        if job is not None:
            store = self._stores.pop(job.job_id)
            self._end_store(store, TransferResult(job.job_id, success=False))
            self.num_skipped_blocks += len(store.keys)
        self._candidates.go_back(request_id, num_computed_tokens)

    @override
    def take_events(self) -> list[OffloadingEvent]:
        return self._index.take_events()

    @override
    def has_pending_work(self) -> bool:
        return bool(self._loads or self._stores)

    @override
    def reset_cache(self) -> bool:
        if self.has_pending_work():
            return False
        self._index.reset()
        if self._victims is not None:
            self._victims.clear()
        return True

    @override
    def shutdown(self) -> None:
        for store in self._stores.values():
            self._release(store)
        self._stores.clear()
        self._holds = None
        self._index.close()

    def _release(self, store: _Store) -> None:
        if self._holds is not None:
            self._holds.release(store.block_ids)
