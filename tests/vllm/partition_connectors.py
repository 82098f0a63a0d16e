"""A connector whose keys are made of chosen properties, so that each can be omitted or added."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from typing_extensions import override

from kvview import (
    BlockIds,
    CanonicalKVCaches,
    Connector,
    ConnectorConfig,
    CPULoadStoreSpec,
    FinishReason,
    GPUBlockPoolView,
    GPULoadStoreSpec,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferJob,
    TransferResult,
    WorkerConnector,
)

SETTINGS = "{model} {revision} {dtype} {cache_dtype} {block_size} {ranks} {rank} {layout}"
_NUM_SLOTS = 64


class _Store:
    """Pages that outlive an engine, as files would."""

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self.pages: list[torch.Tensor] = []


_STORES: dict[str, _Store] = {}
_LIVES = count()


class KeyedConnector(Connector):
    """Stores whole prefixes under a digest of their properties.

    Options: ``name`` of the store, ``engine``, a text of the engine's settings, ``ignores``, the
    properties that the key does not contain, and ``adds``, ``request`` or ``life``, which the key
    contains although the KV does not depend on it.
    """

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.store = _STORES.setdefault(config.options["name"], _Store())

    @override
    def make_scheduler(self) -> SchedulerConnector:
        return _Scheduler(self.config, self.store)

    @override
    def make_worker(self) -> WorkerConnector:
        return _Worker(self.store)


class _Scheduler(SchedulerConnector):
    def __init__(self, config: ConnectorConfig, store: _Store) -> None:
        self.size = config.geometry.groups[0].block_size
        self.engine = config.options["engine"]
        self.ignores = config.options.get("ignores", "").split()
        self.adds = config.options.get("adds", "")
        self.life = next(_LIVES)
        self.store = store
        self.loads: list[TransferJob] = []
        self.stores: list[TransferJob] = []
        self.held: dict[int, list[int]] = {}
        self.num_jobs = 0

    @override
    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        self.view = view

    def key(self, request: RequestInfo, block: int) -> str:
        content = request.content
        tags = {"lora": "lora", "mm": "item", "cache_salt": "salt", "prompt_embeds": "embeds"}
        added = {"request": request.request_id, "life": self.life}
        parts: list[object] = [self.engine, added.get(self.adds)]
        has_tokens = "tokens" not in self.ignores
        parts.append(list(content.token_ids[: (block + 1) * self.size]) if has_tokens else block)
        for keys in content.extra_keys[: block + 1]:
            for key in keys or ():
                if tags[key[0]] not in self.ignores:
                    parts.append(key[:2] if "path" in self.ignores and key[0] == "lora" else key)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def slots(self, request: RequestInfo, first: int, last: int) -> list[int]:
        keys = [self.key(request, block) for block in range(first, last)]
        return [self.store.slots[key] for key in keys]

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
        block = num_computed_tokens // self.size
        while (block + 1) * self.size < request.num_tokens:
            if self.key(request, block) not in self.store.slots:
                break
            block += 1
        return max(0, block * self.size - num_computed_tokens)

    @override
    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        if num_external_tokens:
            first = num_computed_tokens // self.size
            last = first + num_external_tokens // self.size
            source = CPULoadStoreSpec(self.slots(request, first, last))
            target = GPULoadStoreSpec(list(block_ids[0][first:last]), [last - first], [first])
            self.num_jobs += 1
            self.loads.append(TransferJob(self.num_jobs, source, target, request.request_id))

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        blocks = list(block_ids[0][: request.num_computed_tokens // self.size])
        keys = [self.key(request, block) for block in range(len(blocks))]
        slots = self.store.slots
        for key in keys:
            slots.setdefault(key, len(slots))
        if blocks:
            self.view.touch_blocks(blocks)
            self.num_jobs += 1
            self.held[self.num_jobs] = blocks
            source = GPULoadStoreSpec(blocks, [len(blocks)], [0])
            target = CPULoadStoreSpec([slots[key] for key in keys])
            self.stores.append(TransferJob(self.num_jobs, source, target))

    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        plan = StepPlan(self.loads, self.stores)
        self.loads, self.stores = [], []
        return plan

    @override
    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        for result in results:
            self.view.free_blocks(self.held.pop(result.job_id, []))

    @override
    def has_pending_work(self) -> bool:
        return bool(self.held)


class _Worker(WorkerConnector):
    def __init__(self, store: _Store) -> None:
        self.store = store
        self.finished: list[TransferResult] = []

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        self.gpu = [cache.tensor for cache in kv_caches.tensors]
        if not self.store.pages:
            self.store.pages = [gpu.new_zeros((_NUM_SLOTS, gpu[0].numel())) for gpu in self.gpu]

    @override
    def start_plan(self, plan: StepPlan) -> None:
        for jobs, is_load in ((plan.loads, True), (plan.stores, False)):
            for job in jobs:
                sides: tuple[Any, Any] = job.src, job.dst
                for source, target in zip(*(side.block_ids for side in sides), strict=True):
                    for gpu, host in zip(self.gpu, self.store.pages, strict=True):
                        page = host[source if is_load else target]
                        block = gpu[target if is_load else source].view(-1)
                        size = min(page.numel(), block.numel())  # of two block sizes
                        (block if is_load else page)[:size] = (page if is_load else block)[:size]
                self.finished.append(TransferResult(job.job_id, success=True))

    @override
    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished
