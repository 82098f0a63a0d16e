"""The scheduler half of a :class:`~kvview.StoreConnector`: which page is where, and what moves."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, count, islice

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
from kvview.events import MEDIUM_CPU, MEDIUM_STORAGE, OffloadingEvent
from kvview.geometry import CacheGeometry
from kvview.keys import OffloadKey, get_offload_group_idx
from kvview.pool import (
    GPUBlockPoolView,
    SupportsBlockKeys,
    SupportsFreeCount,
    SupportsFreeOrder,
    SupportsGiveBack,
    SupportsPinBudget,
    SupportsPoolSize,
)
from kvview.store_connector.levels import Level
from kvview.store_connector.policy import Policy
from kvview.store_connector.store_plan import (
    EPOCH_BYTES,
    Move,
    StorePlan,
    StoreSpec,
    page_name,
)
from kvview.tier import GuardedTier
from kvview.transfer import GPULoadStoreSpec, TransferResult

_MAX_FAILED = 1 << 16  # keys of a shared store that are remembered because they did not load
_LOOKAHEAD_STEPS = 4  # a store takes about two, and blocks are allocated meanwhile
_SMALLEST_SHARE = 16  # of the pool is left to the engine: a small pool is all lookahead


@dataclass(frozen=True)
class Behaviour:
    """The choices of one connector.

    Args:
        mode: ``"eager"``, ``"finish"``, ``"victim"`` or ``"exclusive"``.
        prefetch: Whether pages go from the store to memory when they are promised.
        memory: Budget of the level in memory; 0 for no such level.
        is_in_bytes: Whether that is bytes, not blocks.
        store: Budget of the store in blocks; 0 for no store.
        can_delete: Whether evicted pages are deleted from the store.
        policy: Makes the policy of a level.
        max_bytes: The most bytes that a page of so many bytes needs.
        shared: A lookup into a store that other runs use as well; None for a store of this run.
        events: Whether events are recorded.
    """

    mode: str
    prefetch: bool
    memory: int
    is_in_bytes: bool
    store: int
    can_delete: bool
    policy: Callable[[], Policy]
    max_bytes: Callable[[int], int]
    shared: GuardedTier | None
    events: bool


@dataclass(frozen=True)
class _Load:
    keys: Sequence[OffloadKey]
    num_computed_tokens: int  # of the request, before the load
    request_id: str


@dataclass(frozen=True)
class _Store:
    keys: Sequence[OffloadKey]
    block_ids: Sequence[int]  # held
    in_memory: bool
    in_store: bool


class StoreScheduler(SchedulerConnector):
    """Keeps an index of both levels, and plans jobs and moves.

    Args:
        geometry: Of the engine.
        behaviour: Choices of the author and the user.
    """

    def __init__(self, geometry: CacheGeometry, behaviour: Behaviour) -> None:
        self._geometry = geometry
        self._behaviour = behaviour
        self._view: GPUBlockPoolView | None = None
        self._limits: list[Callable[[], int]] = []  # of blocks to hold now
        self._null_block_id = 0
        self._page_bytes: Sequence[int] = [0] * len(geometry.groups)
        self._epoch = b""
        self._pins: Counter[OffloadKey] = Counter()
        size = self._bytes_of if behaviour.is_in_bytes else None
        self._memory = Level(MEDIUM_CPU, behaviour.policy(), behaviour.memory, size, self._pins)
        self._store = Level(MEDIUM_STORAGE, behaviour.policy(), behaviour.store, None, self._pins)
        self._failed: dict[OffloadKey, None] = {}
        self._job_ids = count()
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, _Store] = {}
        self._storing: set[OffloadKey] = set()
        self._planned_loads: list[TransferJob] = []
        self._planned_stores: list[TransferJob] = []
        self._moves: list[tuple[Move, bytes]] = []
        self._next_store: TransferJob | None = None  # of blocks that this step computes
        self._looks_at_all = False  # in the next step, because there was no room in the last
        self._seen: dict[str, int] = {}  # tokens of running requests that need no more looking
        self._is_lazy = False
        self._unsaved: dict[int, FullBlock] = {}  # computed or loaded, by block id
        self._lookahead = self._reserve = 0
        self._num_ahead = 0  # next victims that need nothing more
        self.num_skipped_blocks = 0

    # --- the engine starts ---

    @override
    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        self._view = view
        if isinstance(view, SupportsPoolSize):
            self._null_block_id = view.null_block_id
        if isinstance(view, SupportsFreeCount):
            num_free_blocks = view.num_free_blocks
            self._limits.append(lambda: num_free_blocks() - self._reserve)
        if isinstance(view, SupportsPinBudget):
            self._limits.append(view.num_pinnable_blocks)

    @override
    def on_engine_ready(self, facts: EngineFacts) -> None:
        self._page_bytes = facts.page_bytes
        self._epoch = self._first_epoch()
        self._lookahead = _LOOKAHEAD_STEPS * facts.max_blocks_per_step
        self._reserve = min(self._lookahead, facts.num_gpu_blocks // _SMALLEST_SHARE)
        view = self._view
        self._is_lazy = (
            self._behaviour.mode in ("victim", "exclusive")
            and isinstance(view, SupportsGiveBack)
            and isinstance(view, SupportsFreeOrder)
            and isinstance(view, SupportsBlockKeys)
        )

    def _first_epoch(self) -> bytes:
        """The end of each page's name, which separates pages that must not be mixed up."""
        if self._behaviour.shared is None:
            return os.urandom(EPOCH_BYTES)
        layout = repr((self._geometry, tuple(self._page_bytes)))
        return hashlib.blake2b(layout.encode(), digest_size=EPOCH_BYTES).digest()

    def _bytes_of(self, key: OffloadKey) -> int:
        return self._behaviour.max_bytes(self._page_bytes[get_offload_group_idx(key)])

    # --- loads ---

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        unknown = self._look_up(request, num_computed_tokens)
        least = self._longest_prefix(request, num_computed_tokens, unknown, False)
        if None in unknown.values():
            most = self._longest_prefix(request, num_computed_tokens, unknown, True)
            if most > least:
                return None
        if least > num_computed_tokens and self._behaviour.prefetch:
            keys = self._to_load(request, num_computed_tokens, least)[3]
            self._pins.update(keys)  # making room for one must not evict another
            self._fetch(keys)
            self._unpin(keys)
        return max(0, least - num_computed_tokens)

    def _longest_prefix(
        self,
        request: RequestInfo,
        num_computed_tokens: int,
        found: dict[OffloadKey, bool | None],
        if_unknown: bool,
    ) -> int:
        memory, store, geometry = self._memory, self._store, self._geometry

        def is_there(group: int, block: int) -> bool:
            if (block + 1) * geometry.groups[group].block_size <= num_computed_tokens:
                return True
            key = geometry.block_key(request.block_hashes, group, block)
            if key is None:
                return False
            if key in found:
                flag = found[key]
                return if_unknown if flag is None else flag
            return key in memory or key in store

        return geometry.longest_prefix(request.num_tokens - 1, is_there)

    def _look_up(
        self, request: RequestInfo, num_computed_tokens: int
    ) -> dict[OffloadKey, bool | None]:
        """Ask a shared store for the pages of a prompt that memory does not hold."""
        shared = self._behaviour.shared
        if shared is None:
            return {}
        geometry, num_tokens = self._geometry, request.num_tokens - 1
        keys = [
            key
            for index, group in enumerate(geometry.groups)
            for key in geometry.block_keys(
                request.block_hashes,
                index,
                range(num_computed_tokens // group.block_size, num_tokens // group.block_size),
            )
            if key not in self._memory
        ]
        flags = shared.lookup([self._name(key) for key in keys])
        self._store.remove(key for key, flag in zip(keys, flags, strict=True) if flag is False)
        return {
            key: flag and key not in self._failed for key, flag in zip(keys, flags, strict=True)
        }

    def _to_load(
        self, request: RequestInfo, num_computed_tokens: int, num_tokens: int
    ) -> tuple[list[range], list[int], list[int], list[OffloadKey]]:
        """Per group the blocks to load, how many they are, the first one; and all their keys."""
        needed = []
        keys: list[OffloadKey] = []
        for index, group in enumerate(self._geometry.groups):
            required = group.required_blocks(num_tokens)
            first = max(required.start, num_computed_tokens // group.block_size)
            blocks = range(min(first, required.stop), required.stop)
            needed.append(blocks)
            keys += self._geometry.block_keys(request.block_hashes, index, blocks)
        return needed, [len(blocks) for blocks in needed], [b.start for b in needed], keys

    @override
    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        num_tokens = num_computed_tokens + num_external_tokens
        self._seen[request.request_id] = num_tokens
        for group in self._geometry.groups:
            self._num_ahead -= 1 + -(-num_external_tokens // group.block_size)
        if num_tokens:
            self._use(self._to_load(request, 0, num_tokens)[3])
        if not num_external_tokens:
            return
        needed, sizes, firsts, keys = self._to_load(request, num_computed_tokens, num_tokens)
        blocks = [
            table[number]
            for table, numbers in zip(block_ids, needed, strict=True)
            for number in numbers
        ]
        self._pins.update(keys)
        self._fetch(keys)
        job = TransferJob(
            next(self._job_ids),
            StoreSpec([self._name(key) for key in keys]),
            GPULoadStoreSpec(blocks, sizes, firsts),
            request.request_id,
        )
        self._loads[job.job_id] = _Load(keys, num_computed_tokens, request.request_id)
        self._planned_loads.append(job)
        if self._is_exclusive:
            for block, key in zip(blocks, keys, strict=True):
                self._unsaved[block] = FullBlock(get_offload_group_idx(key), 0, block, key)

    def _use(self, keys: Sequence[OffloadKey]) -> None:
        """Count a use of a prefix; its head is the most recent, because chains lose their tail."""
        for level in (self._memory, self._store):
            level.use(reversed(keys))

    def _fetch(self, keys: Iterable[OffloadKey]) -> None:
        """Have memory hold pages that the store holds, where there is room for them."""
        if not self._behaviour.memory:
            return
        is_raised = self._behaviour.mode == "exclusive" and self._behaviour.can_delete
        for key in keys:
            if key not in self._memory and self._reserve_in_memory(key):
                self._moves.append((Move.RAISE if is_raised else Move.FETCH, self._name(key)))
                self._memory.commit([key])
                if is_raised:
                    self._store.remove([key])

    # --- stores ---

    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        stores, self._planned_stores = self._planned_stores, []
        if self._behaviour.mode != "finish" and (job := self._store_of_step(step)):
            stores.append(job)
        loads, self._planned_loads = self._planned_loads, []
        moves, self._moves = self._moves, []
        return StorePlan(loads, stores, moves) if moves else StepPlan(loads, stores)

    def _store_of_step(self, step: StepInfo) -> TransferJob | None:
        running = step.scheduled if self._looks_at_all else step.filling()
        for one in running:
            self._look_back(one.request.request_id, one.num_computed_tokens)
        if self._is_lazy:
            return self._store_victims(running)
        job, self._next_store = self._next_store, None
        self._looks_at_all = self._room() <= 0
        if not self._looks_at_all:
            self._next_store = self._store_blocks(self._computed(running))
        return job

    def _store_victims(self, running: Iterable[RequestStep]) -> TransferJob | None:
        computed = self._computed(running)
        self._unsaved.update((block.block_id, block) for block in computed)
        # As many blocks are started as become full, but for the one that was counted before.
        self._num_ahead -= len(computed)
        room = self._room()
        # Half of the lookahead is left to the engine while the other half is stored.
        if room <= 0 or self._num_ahead > self._lookahead // 2:
            return None
        return self._store_blocks(self._next_victims(room))

    def _next_victims(self, room: int) -> list[FullBlock]:
        """The unsaved blocks among the next victims of the GPU, at most ``room``."""
        view, unsaved = self._view, self._unsaved
        assert isinstance(view, SupportsFreeOrder)
        assert isinstance(view, SupportsBlockKeys)
        victims: list[int] = []
        self._num_ahead = 0
        for block_id in islice(view.iter_free_block_ids(), self._lookahead):
            if block_id in unsaved:
                if len(victims) == room:
                    break
                victims.append(block_id)
            self._num_ahead += 1
        victims.reverse()
        return [
            block
            for block_id, keys in zip(victims, view.block_keys(victims), strict=True)
            if (block := unsaved.pop(block_id)).key in keys
        ]

    @override
    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        self._let_go(request, block_ids)

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self._let_go(request, block_ids)

    def _let_go(self, request: RequestInfo, block_ids: BlockIds) -> None:
        """Store the last new blocks of a request that is about to lose them, or note them."""
        if request.request_id not in self._seen:
            return  # it never had blocks
        self._look_back(request.request_id, request.num_computed_tokens + 1)
        blocks = self._newly_computed(request, block_ids, request.num_computed_tokens)
        del self._seen[request.request_id]
        if self._is_lazy:
            self._unsaved.update((block.block_id, block) for block in blocks)
        elif job := self._store_blocks(blocks):
            self._planned_stores.append(job)

    def _computed(self, steps: Iterable[RequestStep]) -> list[FullBlock]:
        """Blocks that are full after a step; generated blocks get their hash a step later."""
        blocks: list[FullBlock] = []
        size, seen = self._geometry.hash_block_size, self._seen
        for running in steps:
            first = running.num_computed_tokens
            end = first + running.num_scheduled_tokens
            first = seen.setdefault(running.request.request_id, first)
            if end // size > first // size:
                blocks += self._newly_computed(running.request, running.block_ids, end)
        return blocks

    def _newly_computed(
        self, request: RequestInfo, block_ids: BlockIds, computed: int
    ) -> list[FullBlock]:
        """Admitted blocks that became full since the last call; each comes once."""
        first = self._seen[request.request_id]
        hashed = len(request.block_hashes) * self._geometry.hash_block_size
        self._seen[request.request_id] = max(first, min(computed, hashed))
        admits = self._memory.policy.admits
        return [
            block
            for block in full_blocks(
                self._geometry,
                request,
                block_ids,
                null_block_id=self._null_block_id,
                first_token=first,
                last_token=computed,
            )
            if admits(block, request)
        ]

    def _room(self) -> int:
        """The number of blocks that may be held for stores now."""
        if self._view is None:
            return 0
        return (
            min(limit() for limit in self._limits)
            if self._limits
            else len(self._geometry.groups) << 30
        )

    def _store_blocks(self, blocks: Iterable[FullBlock]) -> TransferJob | None:
        """Hold blocks and plan their store, as far as there is room for them."""
        new = {block.key: block for block in blocks if not self._has(block.key)}
        room = self._room() if new else 0
        chosen: list[FullBlock] = []
        for key, block in new.items():
            if len(chosen) >= room or not self._reserve_page(key):
                break
            chosen.append(block)
        self.num_skipped_blocks += len(new) - len(chosen)
        if not chosen or self._view is None:
            return None
        chosen.sort(key=lambda block: block.group_idx)
        block_ids = [block.block_id for block in chosen]
        keys = [block.key for block in chosen]
        self._view.touch_blocks(block_ids)
        sizes = Counter(block.group_idx for block in chosen)
        groups = range(len(self._geometry.groups))
        store = _Store(keys, block_ids, *self._targets)
        job = TransferJob(
            next(self._job_ids),
            GPULoadStoreSpec(block_ids, [sizes[group] for group in groups], [0] * len(groups)),
            StoreSpec([self._name(key) for key in keys], store.in_memory, store.in_store),
        )
        self._stores[job.job_id] = store
        self._storing.update(keys)
        return job

    @property
    def _targets(self) -> tuple[bool, bool]:
        """Whether a block is stored in memory, and in the store."""
        in_memory = self._behaviour.memory > 0
        writes_through = self._behaviour.mode in ("eager", "finish")
        return in_memory, self._behaviour.store > 0 and (writes_through or not in_memory)

    @property
    def _is_exclusive(self) -> bool:
        return self._is_lazy and self._behaviour.mode == "exclusive"

    def _has(self, key: OffloadKey) -> bool:
        return key in self._memory or key in self._store or key in self._storing

    def _reserve_page(self, key: OffloadKey) -> bool:
        """Reserve the places of a page that is stored."""
        in_memory, in_store = self._targets
        if in_memory and not self._reserve_in_memory(key):
            return False
        if in_store and not self._reserve_in_store(key):
            if in_memory:
                self._memory.cancel([key])
            return False
        return True

    def _reserve_in_memory(self, key: OffloadKey) -> bool:
        """Reserve a place in memory; the pages that it displaces move down, or are forgotten."""
        victims = self._memory.reserve(key)
        for victim in victims or ():
            moves_down = self._behaviour.store and victim not in self._store
            if moves_down and self._reserve_in_store(victim):
                self._store.commit([victim])
                self._moves.append((Move.DEMOTE, self._name(victim)))
            else:
                self._moves.append((Move.DROP, self._name(victim)))
        return victims is not None

    def _reserve_in_store(self, key: OffloadKey) -> bool:
        victims = self._store.reserve(key)
        if self._behaviour.can_delete:
            self._moves += [(Move.DELETE, self._name(victim)) for victim in victims or ()]
        return victims is not None

    # --- jobs end ---

    @override
    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        for result in results:
            if load := self._loads.pop(result.job_id, None):
                self._end_load(load, result.success)
            elif store := self._stores.pop(result.job_id, None):
                self._end_store(store, result)

    def _end_load(self, load: _Load, success: bool) -> None:
        self._unpin(load.keys)
        if not success:
            self._forget(load.keys)
            self._forget_step(load.request_id, load.num_computed_tokens)
            return
        for key in load.keys:
            if not self._has(key) and self._reserve_in_store(key):  # another run has stored it
                self._store.commit([key])
        if self._is_exclusive:
            on_gpu = [key for key in load.keys if not self._pins[key]]
            self._moves += [(Move.DROP, self._name(key)) for key in self._memory.remove(on_gpu)]

    def _end_store(self, store: _Store, result: TransferResult) -> None:
        flags = [True] * len(store.keys) if result.success else result.moved
        moved = set(compress(store.keys, flags or ()))
        lost = [key for key in store.keys if key not in moved]
        kept = [key for key in reversed(store.keys) if key in moved]
        self._storing.difference_update(store.keys)
        for level, is_target, move in (
            (self._memory, store.in_memory, Move.DROP),
            (self._store, store.in_store, Move.DELETE),
        ):
            if is_target:
                level.commit(kept, result.transfer_size if move is Move.DROP else None)
                level.cancel(lost)
                self._moves += [(move, self._name(key)) for key in lost]
        for key in kept:
            self._failed.pop(key, None)
        self._release(store.block_ids)

    def _forget(self, keys: Iterable[OffloadKey]) -> None:
        """Make keys a miss until they are stored again: a page of theirs did not load."""
        keys = list(dict.fromkeys(keys))
        self._moves += [(Move.DROP, self._name(key)) for key in self._memory.remove(keys)]
        gone = self._store.remove(keys)
        if self._behaviour.shared is None:
            self._moves += [(Move.DELETE, self._name(key)) for key in gone]
            return
        self._failed.update(dict.fromkeys(keys))
        while len(self._failed) > _MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def _unpin(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def _look_back(self, name: str, num_computed_tokens: int) -> None:
        """Notice that the load of another connector failed, so that a request has less KV."""
        if num_computed_tokens < self._seen.get(name, 0):
            self._forget_step(name, num_computed_tokens)

    def _forget_step(self, name: str, num_computed_tokens: int) -> None:
        """A load failed: where loads end within a step, the KV that the step computed is void."""
        job, self._next_store = self._next_store, None
        if job is not None:
            store = self._stores.pop(job.job_id)
            self._end_store(store, TransferResult(job.job_id, success=False))
            self.num_skipped_blocks += len(store.keys)
        if name in self._seen:
            self._seen[name] = num_computed_tokens

    # --- the rest ---

    @override
    def take_events(self) -> list[OffloadingEvent]:
        events = self._memory.take_events() + self._store.take_events()
        return events if self._behaviour.events else []

    @override
    def has_pending_work(self) -> bool:
        return bool(self._loads or self._stores)

    @override
    def reset_cache(self) -> bool:
        if self.has_pending_work():
            return False
        self._moves += [(Move.DROP, self._name(key)) for key in self._memory]
        if self._behaviour.shared is None:
            self._moves += [(Move.DELETE, self._name(key)) for key in self._store]
        self._memory.remove(list(self._memory))
        self._store.remove(list(self._store))
        self._unsaved.clear()
        self._failed.clear()
        self._epoch = os.urandom(EPOCH_BYTES)
        return True

    @override
    def shutdown(self) -> None:
        stores, self._stores = self._stores, {}
        for store in stores.values():
            self._release(store.block_ids)
        self._view = None
        if self._behaviour.shared is not None:
            self._behaviour.shared.close()

    def _release(self, block_ids: Sequence[int]) -> None:
        """Release the blocks of a store; the end of a prefix is evicted first."""
        if self._is_lazy and isinstance(self._view, SupportsGiveBack):
            self._view.give_back_blocks(block_ids[::-1])
        elif self._view is not None:
            self._view.free_blocks(block_ids[::-1])

    def _name(self, key: OffloadKey) -> bytes:
        return page_name(key, self._epoch)
