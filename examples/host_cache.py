"""A complete connector in one file, which keeps the KV of finished requests in host memory.

Try it, without a GPU and without vLLM:

    kvview replay --connector examples/host_cache.py:HostCacheConnector \
        --gpu-blocks 500 --option cpu_blocks=5000

Copy this file and change the copy. The file imports the contract and torch, but no engine.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch

from kvview import (
    BlockIds,
    CanonicalKVCaches,
    ComputeEvent,
    ConfigError,
    Connector,
    ConnectorConfig,
    CPULoadStoreSpec,
    EngineFacts,
    FinishReason,
    FullBlock,
    GPUBlockPoolView,
    GPULoadStoreSpec,
    OffloadKey,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    SupportsFreeCount,
    SupportsPinBudget,
    TransferJob,
    TransferResult,
    WorkerConnector,
    full_blocks,
    make_offload_key,
)


class HostCacheConnector(Connector):
    """Build both halves. Its option ``cpu_blocks`` is the number of blocks that the host holds."""

    contract_version = "1.0"

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.cpu_blocks = config.options.get("cpu_blocks", 1000)
        unknown = set(config.options) - {"cpu_blocks"}
        if unknown or not isinstance(self.cpu_blocks, int) or self.cpu_blocks < 0:
            raise ConfigError(f"expected cpu_blocks=N with N >= 0, got {dict(config.options)}")

    def make_scheduler(self) -> SchedulerConnector:
        return HostCacheScheduler(self.config, self.cpu_blocks)

    def make_worker(self) -> WorkerConnector:
        return HostCacheWorker(self.cpu_blocks)


class HostCacheScheduler(SchedulerConnector):
    """The scheduler half, which tracks the host slot of each key, and the jobs in flight."""

    def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
        self.geometry = config.geometry
        self.view: GPUBlockPoolView | None = None
        # Numbers of blocks that may be held now, if the view has them.
        self.limits: list[Callable[[], int]] = []
        self.reserve = 0  # free blocks that are left to the engine
        self.slots: OrderedDict[OffloadKey, int] = OrderedDict()  # least recently used first
        self.free_slots = list(range(cpu_blocks))
        self.loading: Counter[OffloadKey] = Counter()  # must not be evicted
        self.job_ids = count()
        self.planned_loads: list[TransferJob] = []
        self.planned_stores: list[TransferJob] = []
        self.loads: dict[int, list[OffloadKey]] = {}
        self.stores: dict[int, tuple[dict[OffloadKey, int], list[int]]] = {}
        self.num_reused: dict[str, int] = {}  # leading tokens that a request did not compute
        self.num_skipped_blocks = 0  # a name that engines export

    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        self.view = view
        if isinstance(view, SupportsFreeCount):
            num_free_blocks = view.num_free_blocks
            self.limits.append(lambda: num_free_blocks() - self.reserve)
        if isinstance(view, SupportsPinBudget):
            self.limits.append(view.num_pinnable_blocks)

    def on_engine_ready(self, facts: EngineFacts) -> None:
        self.reserve = min(4 * facts.max_blocks_per_step, facts.num_gpu_blocks // 16)

    # Loading: promise a prefix, get blocks for it, plan the copy, receive its result.

    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
        def is_there(group: int, block: int) -> bool:
            on_gpu = (block + 1) * self.geometry.groups[group].block_size <= num_computed_tokens
            return on_gpu or self.key(request, group, block) in self.slots

        # The last token is always computed, because the engine needs its logits.
        num_tokens = self.geometry.longest_prefix(request.num_tokens - 1, is_there)
        return max(0, num_tokens - num_computed_tokens)

    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        num_tokens = num_computed_tokens + num_external_tokens
        self.num_reused[request.request_id] = num_tokens
        if not num_external_tokens:
            return
        keys: list[OffloadKey] = []
        gpu_blocks: list[int] = []
        sizes: list[int] = []
        firsts: list[int] = []
        for index, group in enumerate(self.geometry.groups):
            needed = group.required_blocks(num_tokens)  # a window needs only its end
            first = max(needed.start, num_computed_tokens // group.block_size)
            keys += [self.key(request, index, block) for block in range(first, needed.stop)]
            gpu_blocks += block_ids[index][first : needed.stop]
            sizes.append(needed.stop - first)
            firsts.append(first)
        for key in keys:
            self.slots.move_to_end(key)
        self.loading.update(keys)
        source = CPULoadStoreSpec([self.slots[key] for key in keys])
        target = GPULoadStoreSpec(gpu_blocks, sizes, firsts)
        job = TransferJob(next(self.job_ids), source, target, request.request_id)
        self.loads[job.job_id] = keys
        self.planned_loads.append(job)

    # Storing: when a request releases its blocks, hold them until they are copied.

    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self.store(request, block_ids)

    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        self.store(request, block_ids)

    def store(self, request: RequestInfo, block_ids: BlockIds) -> None:
        view, first = self.view, self.num_reused.pop(request.request_id, None)
        if view is None or first is None:
            return
        in_flight = {key for slots, _ in self.stores.values() for key in slots}
        new: dict[OffloadKey, FullBlock] = {}
        for block in full_blocks(self.geometry, request, block_ids, first_token=first):
            if block.key not in self.slots and block.key not in in_flight:
                new[block.key] = block
        # Other requests cannot use held blocks, so rather store fewer blocks than too many.
        room = min([len(new), *(limit() for limit in self.limits)])
        slots: dict[OffloadKey, int] = {}
        for key in new:
            if len(slots) >= room or (slot := self.take_slot()) is None:
                break
            slots[key] = slot
        self.num_skipped_blocks += len(new) - len(slots)
        if not slots:
            return
        blocks = [new[key] for key in slots]  # group after group
        gpu_blocks = [block.block_id for block in blocks]
        view.touch_blocks(gpu_blocks)
        sizes = Counter(block.group_idx for block in blocks)
        groups = range(len(self.geometry.groups))
        source = GPULoadStoreSpec(gpu_blocks, [sizes[group] for group in groups], [0] * len(groups))
        job = TransferJob(next(self.job_ids), source, CPULoadStoreSpec(list(slots.values())))
        self.stores[job.job_id] = slots, gpu_blocks
        self.planned_stores.append(job)

    def take_slot(self) -> int | None:
        if self.free_slots:
            return self.free_slots.pop()
        for key in self.slots:
            if key not in self.loading:
                return self.slots.pop(key)
        return None

    def plan_step(self, step: StepInfo) -> StepPlan:
        plan = StepPlan(self.planned_loads, self.planned_stores)
        self.planned_loads, self.planned_stores = [], []
        return plan

    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        for result in results:
            if result.job_id in self.loads:
                self.loading -= Counter(self.loads.pop(result.job_id))
                continue
            slots, gpu_blocks = self.stores.pop(result.job_id)
            if result.success:
                self.slots.update(slots)
            else:
                self.free_slots += slots.values()
            self.release(gpu_blocks)

    def has_pending_work(self) -> bool:
        return bool(self.loads or self.stores)

    def reset_cache(self) -> bool:
        if self.has_pending_work():
            return False
        self.free_slots += self.slots.values()
        self.slots.clear()
        return True

    def shutdown(self) -> None:
        for _, gpu_blocks in self.stores.values():
            self.release(gpu_blocks)
        self.stores.clear()

    def release(self, gpu_blocks: list[int]) -> None:
        if self.view is not None:
            self.view.free_blocks(gpu_blocks[::-1])  # the end of a prefix is evicted first

    def key(self, request: RequestInfo, group: int, block: int) -> OffloadKey:
        index = self.geometry.block_hash_index(group, block)
        return make_offload_key(request.block_hashes[index], group)


class HostCacheWorker(WorkerConnector):
    """Copies pages on the engine's thread; a faster worker would use a stream or a thread."""

    def __init__(self, cpu_blocks: int) -> None:
        self.cpu_blocks = cpu_blocks
        self.started: list[tuple[ComputeEvent | None, StepPlan]] = []
        self.finished: list[TransferResult] = []

    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        self.compute = kv_caches.compute_stream
        self.gpu: list[torch.Tensor] = [tensor.tensor for tensor in kv_caches.tensors]
        self.host = [
            torch.empty((self.cpu_blocks, tensor.page_size_bytes), dtype=torch.int8)
            for tensor in kv_caches.tensors
        ]

    def start_plan(self, plan: StepPlan) -> None:
        self.started.append((self.compute.record_event() if self.compute else None, plan))
        self.copy_started()

    def copy_started(self) -> None:
        # The model may still compute the bytes that a plan reads, so wait for the mark (XFER-6).
        while self.started and ((mark := self.started[0][0]) is None or mark.query()):
            _, plan = self.started.pop(0)
            for job in plan.loads:
                self.finished.append(self.copy(job.job_id, job.src, self.host, job.dst, self.gpu))
            for job in plan.stores:
                self.finished.append(self.copy(job.job_id, job.src, self.gpu, job.dst, self.host))

    def copy(
        self, job_id: int, src: Any, src_pages: list[torch.Tensor], dst: Any, dst_pages: list[Any]
    ) -> TransferResult:
        for src_tensor, dst_tensor in zip(src_pages, dst_pages, strict=True):
            for src_block, dst_block in zip(src.block_ids, dst.block_ids, strict=True):
                dst_tensor[dst_block].copy_(src_tensor[src_block])
        return TransferResult(job_id, success=True)

    def get_finished(self) -> list[TransferResult]:
        self.copy_started()
        finished, self.finished = self.finished, []
        return finished
