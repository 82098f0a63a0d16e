"""Wrong transfer workers: one for each law, and those of public incidents."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvview import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    ConfigError,
    GPULoadStoreSpec,
    TransferResult,
)
from kvview.testing import Mutant
from kvview_reference.harness import ReferenceTransfer

from .planting import planter

if TYPE_CHECKING:
    from kvview_reference.transfer import CPUGPUTransferWorker

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)


class WrongWorker(ReferenceTransfer):
    """The worker, changed by a method of this harness."""

    def make_worker(self) -> CPUGPUTransferWorker:
        worker = super().make_worker()
        self.change_worker(worker)
        return worker

    def change_worker(self, worker: Any) -> None:
        """Make the worker wrong."""


class WrongSpec(WrongWorker):
    """The GPU side of each job is changed."""

    def change_worker(self, worker: Any) -> None:
        start = worker.transfer_async

        def transfer_async(job_id: int, spec: Any) -> bool:
            changed = (self.change(s) if isinstance(s, GPULoadStoreSpec) else s for s in spec)
            return bool(start(job_id, tuple(changed)))

        worker.transfer_async = transfer_async

    def change(self, gpu: GPULoadStoreSpec) -> GPULoadStoreSpec:
        """Make the side wrong."""
        return gpu


@planted("XFER-1", "vllm#28950")
class IgnoresTheFirstIndex(WrongSpec):
    """Every transfer starts at the first slot of a host block."""

    def change(self, gpu: GPULoadStoreSpec) -> GPULoadStoreSpec:
        return replace(gpu, block_indices=[0] * len(gpu.block_indices))


@planted("XFER-1", "vllm#50687")
class TakesAnyBlockId(WrongSpec):
    """Ids that name no block are replaced by block 0 instead of refused."""

    def change(self, gpu: GPULoadStoreSpec) -> GPULoadStoreSpec:
        ids = [block if block in range(self.num_blocks) else 0 for block in gpu.block_ids]
        return replace(gpu, block_ids=ids)


@planted("XFER-2")
class WritesThePadding(WrongWorker):
    """Whole rows are moved: a page of another group behind the first is overwritten."""

    def make_worker(self) -> CPUGPUTransferWorker:
        caches = self.kv_caches
        whole = [
            [
                CanonicalKVCacheRef(ref.tensor_idx, caches.tensors[ref.tensor_idx].page_size_bytes)
                for ref in refs
            ]
            for refs in caches.group_data_refs
        ]
        self.kv_caches = replace(caches, group_data_refs=whole)
        worker = super().make_worker()
        self.kv_caches = caches
        finished = worker.get_finished
        worker.get_finished = lambda: [  # type: ignore[method-assign]
            replace(result, transfer_size=None) for result in finished()
        ]
        return worker


@planted("XFER-3", "vllm#45704")
class RunsLoadsOnAStreamOfTheirOwn(WrongWorker):
    """Loads do not wait for stores: garbled output."""

    def change_worker(self, worker: Any) -> None:
        engine = worker._copier
        submit = engine.submit
        engine.submit = lambda job: submit(job) if job.to_host else engine._run(job)


@planted("XFER-4")
class ReportsFailuresAsSuccess(WrongWorker):
    """An error in the copy is logged, and the job reported as done."""

    def change_worker(self, worker: Any) -> None:
        finished = worker.get_finished
        worker.get_finished = lambda: [
            TransferResult(result.job_id, True, result.transfer_size) for result in finished()
        ]


@planted("XFER-5", "vllm#46014")
class CopiesAtOnce(WrongWorker):
    """Every job is done when it is submitted: the faults of a late completion stay hidden."""

    def change_worker(self, worker: Any) -> None:
        worker._copier.submit = worker._copier._run


@planted("XFER-5")
class KeepsItsCaches(ReferenceTransfer):
    """A worker that was shut down holds the KV caches as long as a reference to it exists."""

    def with_caches(self, kv_caches: Any, num_cpu_blocks: int) -> Any:
        worker: Any = super().with_caches(kv_caches, num_cpu_blocks)
        worker.kv_caches = kv_caches
        return worker


@planted("XFER-6")
class IgnoresTheComputeStream(WrongWorker):
    """Blocks are stored when they are submitted, without the KV that is still being computed."""

    def make_worker(self) -> CPUGPUTransferWorker:
        caches = self.kv_caches
        self.kv_caches = CanonicalKVCaches(caches.tensors, caches.group_data_refs)
        worker = super().make_worker()
        self.kv_caches = caches
        return worker


@planted("XFER-7")
class ServesWhatItWasMadeFor(ReferenceTransfer):
    """Caches that do not fit are refused only when a job names them."""

    def with_caches(self, kv_caches: Any, num_cpu_blocks: int) -> Any:
        try:
            return super().with_caches(kv_caches, num_cpu_blocks)
        except ConfigError:
            return super().with_caches(self.kv_caches, 1)
