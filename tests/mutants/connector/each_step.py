"""A small connector: what earlier steps computed is saved in every step, by a thread."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

import kvview
from kvview.options import parse_options


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    cpu_blocks: int = 256
    enable_events: bool = False


class EachStep(kvview.Connector):
    def __init__(self, config: kvview.ConnectorConfig) -> None:
        super().__init__(config)
        self.options = parse_options(Options, config.options)

    def make_scheduler(self) -> kvview.SchedulerConnector:
        return StepScheduler(self.config.geometry, self.options)

    def make_worker(self) -> kvview.WorkerConnector:
        return ThreadWorker(self.options.cpu_blocks)


class StepScheduler(kvview.SchedulerConnector):
    def __init__(self, geometry: kvview.CacheGeometry, options: Options) -> None:
        self.geometry = geometry
        self.options = options
        self.view: Any = None
        self.stored: OrderedDict[kvview.OffloadKey, int] = OrderedDict()
        self.spare = list(range(options.cpu_blocks))
        self.jobs: dict[int, tuple[str, list[kvview.OffloadKey], list[int], list[int]]] = {}
        self.in_use: dict[kvview.OffloadKey, int] = {}
        self.pending_loads: list[kvview.TransferJob] = []
        self.events: list[kvview.OffloadingEvent] = []
        self.counter = 0

    def bind_gpu_block_pool_view(self, view: kvview.GPUBlockPoolView) -> None:
        self.view = view

    def say(self, keys: list[kvview.OffloadKey], removed: bool) -> None:
        if self.options.enable_events and keys:
            self.events.append(kvview.OffloadingEvent(tuple(keys), "CPU", removed))

    def take_events(self) -> list[kvview.OffloadingEvent]:
        events, self.events = self.events, []
        return events

    def match_prefix(self, request: kvview.RequestInfo, num_computed_tokens: int) -> int:
        geometry = self.geometry

        def have(group: int, block: int) -> bool:
            if (block + 1) * geometry.groups[group].block_size <= num_computed_tokens:
                return True
            return geometry.block_key(request.block_hashes, group, block) in self.stored

        prefix = geometry.longest_prefix(request.num_tokens - 1, have)
        return max(0, prefix - num_computed_tokens)

    def on_blocks_allocated(
        self,
        request: kvview.RequestInfo,
        block_ids: kvview.BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        if num_external_tokens <= 0:
            return
        keys: list[kvview.OffloadKey] = []
        blocks: list[int] = []
        sizes: list[int] = []
        firsts: list[int] = []
        for index, group in enumerate(self.geometry.groups):
            wanted = group.required_blocks(num_computed_tokens + num_external_tokens)
            begin = max(wanted.start, num_computed_tokens // group.block_size)
            for block in range(begin, wanted.stop):
                key = self.geometry.block_key(request.block_hashes, index, block)
                assert key is not None
                keys.append(key)
                blocks.append(block_ids[index][block])
            sizes.append(wanted.stop - begin)
            firsts.append(begin)
        pages = [self.stored[key] for key in keys]
        for key in keys:
            self.in_use[key] = self.in_use.get(key, 0) + 1
            self.stored.move_to_end(key)
        self.counter += 1
        self.jobs[self.counter] = ("load", keys, [], pages)
        self.pending_loads.append(
            kvview.TransferJob(
                self.counter,
                kvview.CPULoadStoreSpec(pages),
                kvview.GPULoadStoreSpec(blocks, sizes, firsts),
                request.request_id,
            )
        )

    def plan_step(self, step: kvview.StepInfo) -> kvview.StepPlan:
        loads, self.pending_loads = self.pending_loads, []
        stores = []
        busy = {key for kind, keys, _, _ in self.jobs.values() if kind == "store" for key in keys}
        for each in step.scheduled:
            keys: list[kvview.OffloadKey] = []
            blocks: list[int] = []
            pages: list[int] = []
            sizes = [0 for _ in self.geometry.groups]
            for full in kvview.full_blocks(self.geometry, each.request, each.block_ids):
                if full.key in self.stored or full.key in busy:
                    continue
                page = self.get_page()
                if page is None:
                    break
                busy.add(full.key)
                keys.append(full.key)
                blocks.append(full.block_id)
                pages.append(page)
                sizes[full.group_idx] += 1
            if keys:
                self.view.touch_blocks(blocks)
                self.counter += 1
                self.jobs[self.counter] = ("store", keys, blocks, pages)
                source = kvview.GPULoadStoreSpec(blocks, sizes, [0] * len(sizes))
                target = kvview.CPULoadStoreSpec(pages)
                stores.append(kvview.TransferJob(self.counter, source, target))
        return kvview.StepPlan(loads, stores)

    def get_page(self) -> int | None:
        if self.spare:
            return self.spare.pop()
        for key in self.stored:
            if self.in_use.get(key, 0) == 0:
                self.say([key], removed=True)
                return self.stored.pop(key)
        return None

    def on_transfers_finished(self, results: Any) -> None:
        for result in results:
            kind, keys, blocks, pages = self.jobs.pop(result.job_id)
            if kind == "load":
                for key in keys:
                    self.in_use[key] -= 1
                continue
            self.view.free_blocks(blocks[::-1])
            if result.success:
                self.stored.update(zip(keys, pages, strict=True))
                self.say(keys, removed=False)
            else:
                self.spare.extend(pages)

    def has_pending_work(self) -> bool:
        return len(self.jobs) > 0

    def reset_cache(self) -> bool:
        if self.jobs:
            return False
        self.say(list(self.stored), removed=True)
        self.spare.extend(self.stored.values())
        self.stored.clear()
        return True

    def shutdown(self) -> None:
        for _, _, blocks, _ in self.jobs.values():
            self.view.free_blocks(blocks)
        self.jobs.clear()


class ThreadWorker(kvview.WorkerConnector):
    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.lock = threading.Condition()
        self.finished: list[kvview.TransferResult] = []
        self.running: set[int] = set()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def register_kv_caches(self, kv_caches: kvview.CanonicalKVCaches[Any]) -> None:
        self.stream = kv_caches.compute_stream
        self.gpu = [cache.tensor for cache in kv_caches.tensors]
        self.host = [torch.zeros(self.num_pages, tensor.shape[1]).to(tensor) for tensor in self.gpu]

    def start_plan(self, plan: kvview.StepPlan) -> None:
        event = self.stream.record_event() if self.stream is not None else None
        with self.lock:
            self.running.update(job.job_id for job in (*plan.loads, *plan.stores))
        for job in plan.loads:
            self.inbox.put((job, self.host, self.gpu, event))
        for job in plan.stores:
            self.inbox.put((job, self.gpu, self.host, event))

    def work(self) -> None:
        while (item := self.inbox.get()) is not None:
            job, sources, targets, event = item
            if event is not None:
                event.synchronize()
            try:
                for source, target in zip(sources, targets, strict=True):
                    for a, b in zip(job.src.block_ids, job.dst.block_ids, strict=True):
                        target[b].copy_(source[a])
                result = kvview.TransferResult(job.job_id, success=True)
            except Exception as error:
                result = kvview.TransferResult(job.job_id, success=False, error=str(error))
            with self.lock:
                self.finished.append(result)
                self.running.discard(job.job_id)
                self.lock.notify_all()

    def get_finished(self) -> list[kvview.TransferResult]:
        with self.lock:
            finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: Any) -> None:
        with self.lock:
            self.lock.wait_for(lambda: not self.running.intersection(job_ids))

    def shutdown(self) -> None:
        self.inbox.put(None)
        self.thread.join()
