"""A small connector: what a request leaves behind goes to host memory."""

from __future__ import annotations

from typing import Any

import torch

import kvview


class Novice(kvview.Connector):
    def __init__(self, config: kvview.ConnectorConfig) -> None:
        super().__init__(config)
        self.num_pages = config.options.get("cpu_blocks", 256)
        if unknown := set(config.options) - {"cpu_blocks"}:
            raise kvview.ConfigError(f"unknown options {sorted(unknown)}; known: cpu_blocks")

    def make_scheduler(self) -> kvview.SchedulerConnector:
        return Scheduler(self.config.geometry, self.num_pages)

    def make_worker(self) -> kvview.WorkerConnector:
        return Worker(self.num_pages)


class Scheduler(kvview.SchedulerConnector):
    def __init__(self, geometry: kvview.CacheGeometry, num_pages: int) -> None:
        self.geometry = geometry
        self.view: Any = None
        self.free = list(range(num_pages))
        self.pages: dict[kvview.OffloadKey, int] = {}  # loadable; the oldest first
        self.readers: dict[kvview.OffloadKey, int] = {}
        self.storing: dict[int, tuple[list[kvview.OffloadKey], list[int], list[int]]] = {}
        self.loading: dict[int, list[kvview.OffloadKey]] = {}
        self.plan = kvview.StepPlan([], [])
        self.next_job = 0

    def bind_gpu_block_pool_view(self, view: kvview.GPUBlockPoolView) -> None:
        self.view = view

    def key(self, request: kvview.RequestInfo, group: int, block: int) -> kvview.OffloadKey:
        index = self.geometry.block_hash_index(group, block)
        return kvview.make_offload_key(request.block_hashes[index], group)

    def match_prefix(self, request: kvview.RequestInfo, num_computed_tokens: int) -> int:
        def is_there(group: int, block: int) -> bool:
            end = (block + 1) * self.geometry.groups[group].block_size
            return end <= num_computed_tokens or self.key(request, group, block) in self.pages

        found = self.geometry.longest_prefix(request.num_tokens - 1, is_there)
        return max(found - num_computed_tokens, 0)

    def on_blocks_allocated(
        self,
        request: kvview.RequestInfo,
        block_ids: kvview.BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        if num_external_tokens == 0:
            return
        end = num_computed_tokens + num_external_tokens
        keys: list[kvview.OffloadKey] = []
        gpu: list[int] = []
        sizes: list[int] = []
        firsts: list[int] = []
        for number, group in enumerate(self.geometry.groups):
            needed = group.required_blocks(end)
            first = max(needed.start, num_computed_tokens // group.block_size)
            for block in range(first, needed.stop):
                keys.append(self.key(request, number, block))
                gpu.append(block_ids[number][block])
            sizes.append(needed.stop - first)
            firsts.append(first)
        for key in keys:
            self.readers[key] = self.readers.get(key, 0) + 1
        job = self.new_job()
        self.loading[job] = keys
        src = kvview.CPULoadStoreSpec([self.pages[key] for key in keys])
        dst = kvview.GPULoadStoreSpec(gpu, sizes, firsts)
        self.plan.loads.append(kvview.TransferJob(job, src, dst, request.request_id))  # type: ignore[attr-defined]

    def new_job(self) -> int:
        self.next_job += 1
        return self.next_job

    def take_page(self) -> int | None:
        if self.free:
            return self.free.pop()
        for key in self.pages:
            if not self.readers.get(key):
                return self.pages.pop(key)
        return None

    def on_request_finished(
        self,
        request: kvview.RequestInfo,
        block_ids: kvview.BlockIds,
        reason: kvview.FinishReason,
    ) -> None:
        self.save(request, block_ids)

    def on_request_preempted(self, request: kvview.RequestInfo, block_ids: kvview.BlockIds) -> None:
        self.save(request, block_ids)

    def save(self, request: kvview.RequestInfo, block_ids: kvview.BlockIds) -> None:
        if not block_ids:
            return
        busy = {key for keys, _, _ in self.storing.values() for key in keys}
        keys: list[kvview.OffloadKey] = []
        gpu: list[int] = []
        pages: list[int] = []
        sizes = [0] * len(self.geometry.groups)
        for full in kvview.full_blocks(self.geometry, request, block_ids):
            if full.key in self.pages or full.key in busy:
                continue
            if self.view.num_free_blocks() < 4 + len(gpu) or (page := self.take_page()) is None:
                break
            busy.add(full.key)
            keys.append(full.key)
            gpu.append(full.block_id)
            pages.append(page)
            sizes[full.group_idx] += 1
        if not keys:
            return
        self.view.touch_blocks(gpu)
        job = self.new_job()
        self.storing[job] = keys, gpu, pages
        src = kvview.GPULoadStoreSpec(gpu, sizes, [0] * len(sizes))
        dst = kvview.CPULoadStoreSpec(pages)
        self.plan.stores.append(kvview.TransferJob(job, src, dst))  # type: ignore[attr-defined]

    def plan_step(self, step: kvview.StepInfo) -> kvview.StepPlan:
        plan, self.plan = self.plan, kvview.StepPlan([], [])
        return plan

    def on_transfers_finished(self, results: Any) -> None:
        for result in results:
            if result.job_id in self.loading:
                for key in self.loading.pop(result.job_id):
                    self.readers[key] -= 1
            else:
                keys, gpu, pages = self.storing.pop(result.job_id)
                self.view.free_blocks(gpu)
                if result.success:
                    self.pages.update(zip(keys, pages, strict=True))
                else:
                    self.free += pages

    def has_pending_work(self) -> bool:
        return bool(self.storing or self.loading)

    def reset_cache(self) -> bool:
        if self.has_pending_work():
            return False
        self.free += self.pages.values()
        self.pages.clear()
        self.readers.clear()
        return True

    def shutdown(self) -> None:
        for _, gpu, _ in self.storing.values():
            self.view.free_blocks(gpu)
        self.storing.clear()


class Worker(kvview.WorkerConnector):
    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.results: list[kvview.TransferResult] = []

    def register_kv_caches(self, kv_caches: kvview.CanonicalKVCaches[Any]) -> None:
        self.compute = kv_caches.compute_stream
        self.waiting: list[tuple[kvview.ComputeEvent | None, kvview.StepPlan]] = []
        self.gpu = [cache.tensor for cache in kv_caches.tensors]
        self.cpu = [
            torch.zeros(self.num_pages, cache.page_size_bytes, dtype=torch.int8)
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
            self.run(job, self.cpu, self.gpu)
        for job in plan.stores:
            self.run(job, self.gpu, self.cpu)

    def run(self, job: kvview.TransferJob, sources: Any, targets: Any) -> None:
        src: Any = job.src
        dst: Any = job.dst
        for source, target in zip(sources, targets, strict=True):
            target[list(dst.block_ids)] = source[list(src.block_ids)]
        self.results.append(kvview.TransferResult(job.job_id, success=True))

    def get_finished(self) -> list[kvview.TransferResult]:
        self.run_ready()
        results, self.results = self.results, []
        return results
