"""Wrong connectors that only time shows: later requests, later hours, more of them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from examples.host_cache import HostCacheScheduler, HostCacheWorker
from kvview import (
    BlockIds,
    CanonicalKVCaches,
    ComputeEvent,
    ConnectorConfig,
    OffloadKey,
    ReqContext,
    RequestInfo,
    StepPlan,
    TransferJob,
    TransferResult,
)
from kvview.testing import Mutant
from kvview_reference.connector.offload import OffloadConnector, OffloadScheduler
from kvview_reference.offloading import CPUOffloadingManager

from .connector import STEADY_SEEDS, breaker
from .example import Host

MUTANTS: list[Mutant] = []
breaks = breaker(MUTANTS)
in_long_runs = breaker(MUTANTS, seeds=STEADY_SEEDS)


@in_long_runs("CONN-10", "pins the pages of a promise at each match, and unpins them once")
class PinsAtEachMatch(Host):
    class scheduler(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.promised: dict[str, list[OffloadKey]] = {}

        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
            num_tokens = super().match_prefix(request, num_computed_tokens)
            if num_tokens:
                group = self.geometry.groups[0]
                last = (num_computed_tokens + num_tokens) // group.block_size
                blocks = range(num_computed_tokens // group.block_size, last)
                keys = [self.key(request, 0, block) for block in blocks]
                self.loading.update(keys)
                self.promised[request.request_id] = keys
            return num_tokens

        def on_blocks_allocated(
            self,
            request: RequestInfo,
            block_ids: BlockIds,
            num_computed_tokens: int,
            num_external_tokens: int,
        ) -> None:
            self.loading -= Counter(self.promised.pop(request.request_id, ()))
            super().on_blocks_allocated(
                request, block_ids, num_computed_tokens, num_external_tokens
            )


@in_long_runs("CONN-10", "remembers every request forever")
class RemembersRequests(Host):
    class scheduler(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.num_matched: dict[str, int] = {}

        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
            num_tokens = super().match_prefix(request, num_computed_tokens)
            self.num_matched[request.request_id] = num_tokens
            return num_tokens


@in_long_runs("CONN-10", "does not free the host pages of a store that failed")
class LosesPagesOfFailedStores(Host):
    class scheduler(HostCacheScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            for result in results:
                if not result.success and result.job_id in self.stores:
                    self.stores[result.job_id][0].clear()
            super().on_transfers_finished(results)


class LosingManager(CPUOffloadingManager):
    def complete_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext | None = None, /, success: bool = True
    ) -> None:
        free = list(self._free_pages)
        super().complete_store(keys, ctx, success)
        if not success:
            self._free_pages = free


@in_long_runs("CONN-10", "has a manager that does not free the pages of failed stores")
class ManagerLosesFailedStores(OffloadConnector):
    def make_scheduler(self) -> OffloadScheduler:
        half = OffloadScheduler(self.config, self.options)
        if self.options.cpu_blocks:
            half._manager = LosingManager(
                self.options.cpu_blocks,
                self.options.policy,
                enable_events=self.options.enable_events,
            )
        return half


@breaks("CONN-2", "drops pages that are ten seconds old between a promise and its load")
class ExpiresPromises(Host):
    class scheduler(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.stored_at: dict[OffloadKey, float] = {}

        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            super().on_transfers_finished(results)
            now = time.monotonic()
            kept = {key: self.stored_at.get(key, now) for key in self.slots}
            self.stored_at = kept

        def on_blocks_allocated(
            self,
            request: RequestInfo,
            block_ids: BlockIds,
            num_computed_tokens: int,
            num_external_tokens: int,
        ) -> None:
            now = time.monotonic()
            for key in [key for key, then in self.stored_at.items() if now - then > 10]:
                del self.stored_at[key]
                if key in self.slots and key not in self.loading:
                    self.free_slots.append(self.slots.pop(key))
            super().on_blocks_allocated(
                request, block_ids, num_computed_tokens, num_external_tokens
            )


class _FourThreads(HostCacheWorker):
    """Each job on a thread of a pool, block by block, without an order of pages."""

    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.threads = ThreadPoolExecutor(4)
        self.lock = threading.Lock()
        self.jobs: dict[int, Future[None]] = {}

    def start_plan(self, plan: StepPlan) -> None:
        mark = self.compute.record_event() if self.compute else None
        for job in plan.loads:
            self.jobs[job.job_id] = self.threads.submit(self.run, mark, job, self.host, self.gpu)
        for job in plan.stores:
            self.jobs[job.job_id] = self.threads.submit(self.run, mark, job, self.gpu, self.host)

    def run(self, mark: ComputeEvent | None, job: TransferJob, source: Any, target: Any) -> None:
        if mark is not None:
            mark.synchronize()
        result = self.copy(job.job_id, job.src, source, job.dst, target)
        with self.lock:
            self.finished.append(result)

    def get_finished(self) -> list[TransferResult]:
        with self.lock:
            finished, self.finished = self.finished, []
        for result in finished:
            self.jobs.pop(result.job_id, None)
        return finished

    def wait(self, job_ids: Sequence[int]) -> None:
        for job_id in job_ids:
            if job_id in self.jobs:
                self.jobs[job_id].result()

    def shutdown(self) -> None:
        self.threads.shutdown()


@breaks("XFER-1", "stores into a page that a load still reads, on threads without an order")
class StoresIntoPagesThatAreRead(Host):
    class scheduler(HostCacheScheduler):
        def take_slot(self) -> int | None:
            for key in [] if self.free_slots else [*self.loading, *self.slots]:
                if key in self.slots:
                    return self.slots.pop(key)
            return super().take_slot()

    worker = _FourThreads
