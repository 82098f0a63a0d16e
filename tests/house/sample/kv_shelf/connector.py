"""Finished requests leave their KV on a shelf: bytes by key, no pages, no torch.

The shelf is the worker half's; the scheduler half knows what is on it, and names what
goes to make room in a plan of its own class.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

from typing_extensions import override

from kvview import (
    BlockIds,
    CanonicalKVCaches,
    ComputeEvent,
    ComputeStream,
    ConfigError,
    Connector,
    ConnectorConfig,
    FinishReason,
    GPUBlockPoolView,
    GPULoadStoreSpec,
    Lease,
    OffloadKey,
    PinBudgetExceeded,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    SupportsLeases,
    SupportsPoolSize,
    TransferJob,
    TransferResult,
    ViewNotBoundError,
    WorkerConnector,
    full_blocks,
)


@dataclass(frozen=True)
class ShelfSpec:
    """Places on the shelf, by key; ``kvview.LoadStoreSpec`` asks for a medium only."""

    medium: ClassVar[str] = "SHELF"

    keys: Sequence[OffloadKey]


@dataclass(frozen=True)
class ShelfPlan(StepPlan):
    """A plan that also says which keys leave the shelf, before its jobs run."""

    drops: Sequence[OffloadKey] = ()


class ShelfConnector(Connector):
    """Option ``max_blocks``: how many blocks the shelf holds."""

    contract_version = "1.0"

    @override
    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        max_blocks = config.options.get("max_blocks", 1000)
        if not isinstance(max_blocks, int) or max_blocks < 1 or len(config.options) > 1:
            raise ConfigError(f"expected max_blocks=N with N >= 1, got {dict(config.options)}")
        self.max_blocks = max_blocks

    @override
    def make_scheduler(self) -> SchedulerConnector:
        return ShelfScheduler(self.config, self.max_blocks)

    @override
    def make_worker(self) -> WorkerConnector:
        return ShelfWorker()


class ShelfScheduler(SchedulerConnector):
    """Knows what is on the shelf, what is on its way there, and what is being read."""

    def __init__(self, config: ConnectorConfig, max_blocks: int) -> None:
        self._geometry = config.geometry
        self._max_blocks = max_blocks
        self._view: SupportsLeases | None = None
        self._null_block_id = 0
        self._shelf: OrderedDict[OffloadKey, None] = OrderedDict()  # least recently used first
        self._reading: Counter[OffloadKey] = Counter()
        self._promised: dict[str, list[OffloadKey]] = {}
        self._job_ids = count()
        self._loads: dict[int, Sequence[OffloadKey]] = {}
        self._stores: dict[int, tuple[OffloadKey, Lease]] = {}
        self._plan = ShelfPlan()

    @override
    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        if not isinstance(view, SupportsLeases):
            raise ViewNotBoundError("ShelfConnector needs a view with leases: a GuardedView")
        self._view = view
        if isinstance(view, SupportsPoolSize):
            self._null_block_id = view.null_block_id

    # Loading. What was promised stays on the shelf until the promise is renewed or ends.

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
        self._reading -= Counter(self._promised.pop(request.request_id, ()))

        def is_there(group: int, block: int) -> bool:
            on_gpu = (block + 1) * self._geometry.groups[group].block_size <= num_computed_tokens
            key = self._geometry.block_key(request.block_hashes, group, block)
            return on_gpu or key in self._shelf

        num_tokens = self._geometry.longest_prefix(request.num_tokens - 1, is_there)
        if num_tokens <= num_computed_tokens:
            return 0
        keys = [
            key
            for group, blocks in enumerate(self._missing(num_computed_tokens, num_tokens))
            for block in blocks
            if (key := self._geometry.block_key(request.block_hashes, group, block)) is not None
        ]
        self._promised[request.request_id] = keys
        self._reading.update(keys)
        return num_tokens - num_computed_tokens

    @override
    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        self._reading -= Counter(self._promised.pop(request.request_id, ()))
        if not num_external_tokens:
            return
        # Fewer tokens than promised may be taken: what they need is asked for again.
        missing = self._missing(num_computed_tokens, num_computed_tokens + num_external_tokens)
        keys: list[OffloadKey] = []
        gpu_blocks: list[int] = []
        for group, blocks in enumerate(missing):
            for block in blocks:
                key = self._geometry.block_key(request.block_hashes, group, block)
                assert key is not None, "only blocks with a key were promised"
                keys.append(key)
                gpu_blocks.append(block_ids[group][block])
        for key in keys:
            self._shelf.move_to_end(key)
        self._reading.update(keys)
        target = GPULoadStoreSpec(gpu_blocks, [len(b) for b in missing], [b.start for b in missing])
        job_id = next(self._job_ids)
        self._loads[job_id] = keys
        job = TransferJob(job_id, ShelfSpec(keys), target, request.request_id)
        self._add(loads=[job])

    def _missing(self, num_on_gpu: int, num_tokens: int) -> list[range]:
        """Per group, the blocks that a prefix needs and the GPU has not."""
        missing: list[range] = []
        for group in self._geometry.groups:
            needed = group.required_blocks(num_tokens)
            missing.append(range(max(needed.start, num_on_gpu // group.block_size), needed.stop))
        return missing

    # Storing: a lease for each block, until its job has ended.

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self._reading -= Counter(self._promised.pop(request.request_id, ()))
        self._store(request, block_ids)

    @override
    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        self._store(request, block_ids)

    def _store(self, request: RequestInfo, block_ids: BlockIds) -> None:
        if self._view is None or not any(block_ids):
            return
        in_flight = {key for key, _ in self._stores.values()}
        for group, number, block_id, key in full_blocks(
            self._geometry, request, block_ids, null_block_id=self._null_block_id
        ):
            if key in self._shelf or key in in_flight or not self._make_room():
                continue
            job_id = next(self._job_ids)
            try:
                lease = self._view.lease([block_id], job=job_id)
            except PinBudgetExceeded:
                return
            one_hot = [int(index == group) for index in range(len(self._geometry.groups))]
            firsts = [number if size else 0 for size in one_hot]
            source = GPULoadStoreSpec([block_id], one_hot, firsts)
            self._stores[job_id] = key, lease
            self._add(stores=[TransferJob(job_id, source, ShelfSpec([key]))])

    def _make_room(self) -> bool:
        if len(self._shelf) + len(self._stores) < self._max_blocks:
            return True
        victim = next((key for key in self._shelf if not self._reading[key]), None)
        if victim is None:
            return False
        del self._shelf[victim]
        self._add(drops=[victim])
        return True

    # The plan of the step, and how its jobs end.

    def _add(
        self,
        loads: Sequence[TransferJob] = (),
        stores: Sequence[TransferJob] = (),
        drops: Sequence[OffloadKey] = (),
    ) -> None:
        plan = self._plan
        self._plan = ShelfPlan(
            loads=[*plan.loads, *loads],
            stores=[*plan.stores, *stores],
            drops=[*plan.drops, *drops],
        )

    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        plan, self._plan = self._plan, ShelfPlan()
        return plan

    @override
    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        for result in results:
            if result.job_id in self._loads:
                self._reading -= Counter(self._loads.pop(result.job_id))
                continue
            key, lease = self._stores.pop(result.job_id)
            lease.release()
            if result.success:
                self._shelf[key] = None
            else:
                self._add(drops=[key])  # some of its bytes may have arrived

    @override
    def has_pending_work(self) -> bool:
        return bool(self._loads or self._stores)

    @override
    def reset_cache(self) -> bool:
        if self.has_pending_work():
            return False
        self._add(drops=list(self._shelf))
        self._shelf.clear()
        self._promised.clear()
        self._reading.clear()
        return True

    @override
    def shutdown(self) -> None:
        for _, lease in self._stores.values():
            lease.release()
        self._stores.clear()


class ShelfWorker(WorkerConnector):
    """Has the bytes; copies as soon as the model has computed them (XFER-6)."""

    def __init__(self) -> None:
        self._pages: list[list[Any]] = []  # per group, its tensors
        self._shelf: dict[OffloadKey, list[bytes]] = {}
        self._compute: ComputeStream | None = None
        self._started: list[tuple[ComputeEvent | None, StepPlan]] = []
        self._finished: list[TransferResult] = []

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        self._compute = kv_caches.compute_stream
        self._pages = [
            [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]
            for refs in kv_caches.group_data_refs
        ]

    @override
    def start_plan(self, plan: StepPlan) -> None:
        self._started.append((self._compute.record_event() if self._compute else None, plan))
        self._run_started()

    def _run_started(self) -> None:
        while self._started and ((mark := self._started[0][0]) is None or mark.query()):
            _, plan = self._started.pop(0)
            if isinstance(plan, ShelfPlan):
                for key in plan.drops:
                    self._shelf.pop(key, None)
            for job in (*plan.stores, *plan.loads):
                self._finished.append(TransferResult(job.job_id, success=self._run(job)))

    def _run(self, job: TransferJob) -> bool:
        gpu, shelf = (job.src, job.dst) if job.request_id is None else (job.dst, job.src)
        if not isinstance(gpu, GPULoadStoreSpec) or not isinstance(shelf, ShelfSpec):
            return False
        blocks = iter(zip(gpu.block_ids, shelf.keys, strict=True))
        for tensors, size in zip(self._pages, gpu.group_sizes, strict=True):
            for _ in range(size):
                block_id, key = next(blocks)
                pages = [memoryview(tensor[block_id].numpy()).cast("B") for tensor in tensors]
                if gpu is job.src:
                    self._shelf[key] = [bytes(page) for page in pages]
                elif key in self._shelf:
                    for page, saved in zip(pages, self._shelf[key], strict=True):
                        page[:] = saved
                else:
                    return False
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        self._run_started()
        finished, self._finished = self._finished, []
        return finished
