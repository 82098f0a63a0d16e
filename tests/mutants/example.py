"""Wrong connectors over the example, ``examples/host_cache.py``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

from examples.host_cache import HostCacheConnector, HostCacheScheduler, HostCacheWorker
from kvview import (
    BlockIds,
    CanonicalKVCaches,
    ConnectorConfig,
    RequestInfo,
    SchedulerConnector,
    SupportsFreeOrder,
    TransferResult,
    WorkerConnector,
)
from kvview.testing import Mutant

from .connector import NOT_EXERCISED, breaker

MUTANTS: list[Mutant] = []
breaks = breaker(MUTANTS)


class Host(HostCacheConnector):
    """The example, with places for other halves."""

    scheduler: ClassVar[type[HostCacheScheduler]] = HostCacheScheduler
    worker: ClassVar[type[Any]] = HostCacheWorker

    def make_scheduler(self) -> SchedulerConnector:
        return self.scheduler(self.config, self.cpu_blocks)

    def make_worker(self) -> WorkerConnector:
        worker: WorkerConnector = self.worker(self.cpu_blocks)
        return worker


@breaks("CONN-5", "pins are kept by request id, a second life takes their place", "vllm#51637")
class PinsByRequest(Host):
    class scheduler(HostCacheScheduler):
        def __init__(self, config: ConnectorConfig, cpu_blocks: int) -> None:
            super().__init__(config, cpu_blocks)
            self.pins: dict[str, list[int]] = {}
            self.request_of: dict[int, str] = {}

        def store(self, request: RequestInfo, block_ids: BlockIds) -> None:
            known = set(self.stores)
            super().store(request, block_ids)
            new = [job_id for job_id in self.stores if job_id not in known]
            if new:
                self.pins[request.request_id] = []
            for job_id in new:
                slots, gpu_blocks = self.stores[job_id]
                self.pins[request.request_id] += gpu_blocks
                self.stores[job_id] = slots, []
                self.request_of[job_id] = request.request_id

        def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
            pass

        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            super().on_transfers_finished(results)
            for result in results:
                name = self.request_of.pop(result.job_id, "")
                if name not in self.request_of.values():
                    self.release(self.pins.pop(name, []))

        def shutdown(self) -> None:
            super().shutdown()
            for pins in self.pins.values():
                self.release(pins)
            self.pins.clear()


@breaks("CONN-4", "pins first, and returns early when the host is full", "ascend#10843")
class PinsThenReturns(Host):
    class scheduler(HostCacheScheduler):
        def take_slot(self) -> int | None:
            slot = super().take_slot()
            if slot is None and isinstance(self.view, SupportsFreeOrder):
                self.view.touch_blocks(list(islice(self.view.iter_free_block_ids(), 1)))
            return slot


@breaks("CONN-4", "a preempted request asserts that it has no stores in flight", "vllm#52170")
class AssertsNoStores(Host):
    class scheduler(HostCacheScheduler):
        def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
            assert not self.stores, "the block list was cleared"


@breaks(NOT_EXERCISED, "copies blocks and does not register them")
class NeverRegisters(Host):
    class scheduler(HostCacheScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            super().on_transfers_finished(results)
            self.free_slots += self.slots.values()
            self.slots.clear()


@breaks("OFF-1", "evicts by giving the slot to another key, and keeps the old key", "vllm#54914")
class SharesSlots(Host):
    class scheduler(HostCacheScheduler):
        def take_slot(self) -> int | None:
            kept = dict(self.slots)
            slot = super().take_slot()
            self.slots.update(kept)
            return slot


@breaks("CONN-2", "forgets what it holds only when it is asked again: a reset is one behind")
class ForgetsLate(Host):
    class scheduler(HostCacheScheduler):
        def reset_cache(self) -> bool:
            kept = dict(self.slots)
            done = super().reset_cache()
            self.slots.update(kept)
            self.free_slots = [s for s in self.free_slots if s not in kept.values()]
            return done


@breaks("CONN-11", "never resets, whatever is in flight")
class RefusesResets(Host):
    class scheduler(HostCacheScheduler):
        def reset_cache(self) -> bool:
            return False


@breaks("CONN-12", "its worker half begins a thread, and never ends it")
class LeavesAThread(Host):
    def make_worker(self) -> WorkerConnector:
        class Worker(HostCacheWorker):
            def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
                super().register_kv_caches(kv_caches)
                threading.Thread(target=threading.Event().wait, args=(30,), daemon=True).start()

        return Worker(self.cpu_blocks)


@breaks("CONN-13", "counts what it stores as skipped")
class CountsWhatItStores(Host):
    class scheduler(HostCacheScheduler):
        def store(self, request: RequestInfo, block_ids: BlockIds) -> None:
            before = len(self.stores)
            super().store(request, block_ids)
            self.num_skipped_blocks += len(self.stores) - before


@breaks("CONN-2", "takes a store that was moved in part for one that was moved")
class TakesPartForAll(Host):
    class scheduler(HostCacheScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            super().on_transfers_finished(
                [replace(r, success=r.success or bool(r.moved)) for r in results]
            )
