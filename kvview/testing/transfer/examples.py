"""Checks of the transfer contract that the model cannot state: races of threads, and memory."""

from __future__ import annotations

import gc
from weakref import ref

from kvview.testing.harness import Capability as C
from kvview.testing.search import example
from kvview.testing.transfer.model import Part
from kvview.testing.transfer.player import TransferPlayer
from kvview.testing.yield_points import new_threads_yield_often
from kvview.transfer import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)


@example(TransferPlayer, "XFER-5")
def check_xfer_5_race_of_wait_and_report(worker: TransferPlayer) -> None:
    """Threads: a report is available when ``wait`` returns, even if the worker is slow."""
    with new_threads_yield_often():
        worker.start_again()
        parts = {group: Part([group], [group]) for group in range(len(worker.model.groups))}
        worker.submit(True, parts)
        worker.finish_all()
        for _ in range(10):
            worker.submit(False, parts)
            worker.finish_all()


@example(TransferPlayer, "XFER-5", C.WORKERS)
def check_xfer_5_memory_after_shutdown(worker: TransferPlayer) -> None:
    """Memory: after a shutdown the KV caches are freed, even while the worker is referenced."""
    import torch

    tensor = torch.zeros(8, 64, dtype=torch.int8)
    kept = ref(tensor)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 64)], [[CanonicalKVCacheRef(0, 64)]])
    made = worker.harness.with_caches(caches, 4)
    made.transfer_async(1, (GPULoadStoreSpec([5], [1], [0]), worker.tier([0])))
    made.wait([1])
    made.get_finished()
    made.shutdown()
    del tensor, caches
    gc.collect()
    worker.line("# a worker over one tensor, with a job, a shutdown, and `del` of the tensor")
    worker.equal(kept(), None, "after its shutdown a worker has no KV cache")
