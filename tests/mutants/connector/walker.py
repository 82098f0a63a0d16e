"""A small connector: blocks that are about to be evicted go to host memory first."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch

import kvview


class Walker(kvview.Connector):
    def __init__(self, config: kvview.ConnectorConfig) -> None:
        super().__init__(config)
        self.size = config.options.get("cpu_blocks", 256)
        if set(config.options) - {"cpu_blocks"}:
            raise kvview.ConfigError("the only option is cpu_blocks")

    def make_scheduler(self) -> kvview.SchedulerConnector:
        return WalkingHalf(self.config.geometry, self.size)

    def make_worker(self) -> kvview.WorkerConnector:
        return CopyingHalf(self.size)


class Save:
    def __init__(self, keys: list[kvview.OffloadKey], blocks: list[int], pages: list[int]) -> None:
        self.keys = keys
        self.blocks = blocks
        self.pages = pages


class WalkingHalf(kvview.SchedulerConnector):
    def __init__(self, geometry: kvview.CacheGeometry, size: int) -> None:
        self.geometry = geometry
        self.view: Any = None
        self.where: dict[kvview.OffloadKey, int] = {}
        self.unused = set(range(size))
        self.pinned: Counter[kvview.OffloadKey] = Counter()
        self.saves: dict[int, Save] = {}
        self.loads: dict[int, list[kvview.OffloadKey]] = {}
        self.to_load: list[kvview.TransferJob] = []
        self.ids = itertools.count()

    def bind_gpu_block_pool_view(self, view: kvview.GPUBlockPoolView) -> None:
        self.view = view

    # --- load

    def match_prefix(self, request: kvview.RequestInfo, num_computed_tokens: int) -> int:
        sizes = [group.block_size for group in self.geometry.groups]

        def cached(group: int, number: int) -> bool:
            if (number + 1) * sizes[group] <= num_computed_tokens:
                return True
            key = self.geometry.block_key(request.block_hashes, group, number)
            return key in self.where

        total = self.geometry.longest_prefix(request.num_tokens - 1, cached)
        if total <= num_computed_tokens:
            return 0
        return total - num_computed_tokens

    def on_blocks_allocated(
        self,
        request: kvview.RequestInfo,
        block_ids: kvview.BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        if not num_external_tokens:
            return
        keys: list[kvview.OffloadKey] = []
        target: list[int] = []
        group_sizes: list[int] = []
        starts: list[int] = []
        total = num_computed_tokens + num_external_tokens
        for g, group in enumerate(self.geometry.groups):
            numbers = [
                number
                for number in group.required_blocks(total)
                if (number + 1) * group.block_size > num_computed_tokens
            ]
            for number in numbers:
                key = self.geometry.block_key(request.block_hashes, g, number)
                assert key is not None
                keys.append(key)
                target.append(block_ids[g][number])
            group_sizes.append(len(numbers))
            starts.append(numbers[0] if numbers else 0)
        self.pinned.update(keys)
        job_id = next(self.ids)
        self.loads[job_id] = keys
        self.to_load.append(
            kvview.TransferJob(
                job_id,
                kvview.CPULoadStoreSpec([self.where[key] for key in keys]),
                kvview.GPULoadStoreSpec(target, group_sizes, starts),
                request.request_id,
            )
        )

    # --- save

    def plan_step(self, step: kvview.StepInfo) -> kvview.StepPlan:
        loads, self.to_load = self.to_load, []
        return kvview.StepPlan(loads, self.plan_saves() if step.scheduled else [])

    def plan_saves(self) -> list[kvview.TransferJob]:
        busy = {key for save in self.saves.values() for key in save.keys}
        found: dict[kvview.OffloadKey, int] = {}
        for block_id, key in itertools.islice(self.view.iter_free_block_ids_with_hash(), 8):
            if key not in self.where and key not in busy and block_id not in found.values():
                found[key] = block_id
        found = dict(sorted(found.items(), key=lambda item: self.group(item[0])))
        pages: list[int] = []
        for key in list(found):
            page = self.page()
            if page is None:
                del found[key]
            else:
                pages.append(page)
        if not found:
            return []
        keys, blocks = list(found), list(found.values())
        self.view.touch_blocks(blocks)
        job_id = next(self.ids)
        self.saves[job_id] = Save(keys, blocks, pages)
        groups = range(len(self.geometry.groups))
        group_sizes = [sum(self.group(key) == g for key in keys) for g in groups]
        source = kvview.GPULoadStoreSpec(blocks, group_sizes, [0 for _ in groups])
        return [kvview.TransferJob(job_id, source, kvview.CPULoadStoreSpec(pages))]

    def group(self, key: kvview.OffloadKey) -> int:
        return kvview.get_offload_group_idx(key)

    def page(self) -> int | None:
        if self.unused:
            return self.unused.pop()
        for key, page in self.where.items():
            if self.pinned[key] <= 0:
                del self.where[key]
                return page
        return None

    def on_transfers_finished(self, results: Any) -> None:
        for result in results:
            keys = self.loads.pop(result.job_id, None)
            if keys is not None:
                self.pinned.subtract(keys)
                continue
            save = self.saves.pop(result.job_id)
            self.view.free_blocks(save.blocks)
            for key, page in zip(save.keys, save.pages, strict=True):
                if result.success:
                    self.where[key] = page
                else:
                    self.unused.add(page)

    def has_pending_work(self) -> bool:
        return len(self.saves) + len(self.loads) > 0

    def reset_cache(self) -> bool:
        if self.saves or self.loads:
            return False
        self.unused.update(self.where.values())
        self.where = {}
        return True

    def shutdown(self) -> None:
        while self.saves:
            _, save = self.saves.popitem()
            self.view.free_blocks(save.blocks)


class CopyingHalf(kvview.WorkerConnector):
    def __init__(self, size: int) -> None:
        self.size = size
        self.done: list[kvview.TransferResult] = []

    def register_kv_caches(self, kv_caches: kvview.CanonicalKVCaches[Any]) -> None:
        self.compute = kv_caches.compute_stream
        self.waiting: list[tuple[kvview.ComputeEvent | None, kvview.StepPlan]] = []
        self.caches = kv_caches
        self.store = [
            torch.empty((self.size, cache.page_size_bytes), dtype=torch.int8)
            for cache in kv_caches.tensors
        ]

    def start_plan(self, plan: kvview.StepPlan) -> None:
        self.waiting.append((self.compute.record_event() if self.compute else None, plan))
        self.run_ready()

    def run_ready(self) -> None:
        while self.waiting and ((mark := self.waiting[0][0]) is None or mark.query()):
            self.run_plan(self.waiting.pop(0)[1])

    def run_plan(self, plan: kvview.StepPlan) -> None:
        for job in plan.loads:
            self.copy(job, is_load=True)
        for job in plan.stores:
            self.copy(job, is_load=False)

    def copy(self, job: kvview.TransferJob, is_load: bool) -> None:
        gpu: Any = job.dst if is_load else job.src
        cpu: Any = job.src if is_load else job.dst
        start = 0
        for refs, count in zip(self.caches.group_data_refs, gpu.group_sizes, strict=True):
            blocks = gpu.block_ids[start : start + count]
            pages = cpu.block_ids[start : start + count]
            for ref in refs:
                tensor = self.caches.tensors[ref.tensor_idx].tensor
                for block, page in zip(blocks, pages, strict=True):
                    ours = self.store[ref.tensor_idx][page]
                    theirs = tensor[block]
                    if is_load:
                        theirs.copy_(ours)
                    else:
                        ours.copy_(theirs)
            start += count
        self.done.append(kvview.TransferResult(job.job_id, success=True))

    def get_finished(self) -> list[kvview.TransferResult]:
        self.run_ready()
        done = self.done
        self.done = []
        return done
