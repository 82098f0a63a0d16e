"""XFER-1, 4, 5 and 7: workers over other caches: what they refuse and let go, failed streams."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

from kvview.errors import ConfigError, TransferSpecError
from kvview.testing.harness import Capability
from kvview.testing.transfer.driver import Part, TransferDriver, transfer_check
from kvview.transfer import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

_WORKERS = Capability.WORKERS


def _caches(tensors: Sequence[Any], refs: Sequence[Sequence[tuple[int, int]]]) -> Any:
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, tensor.shape[-1]) for tensor in tensors],
        [[CanonicalKVCacheRef(*ref) for ref in group] for group in refs],
    )


def _wrong_caches() -> dict[str, Any]:
    """What no worker can move exactly, by what is wrong with it."""
    import torch

    def zeros(*shape: int, dtype: Any = torch.int8) -> Any:
        return torch.zeros(shape, dtype=dtype)

    page = [[(0, 16)]]
    return {
        "a group that refers to a tensor after the last": _caches([zeros(8, 16)], [[(1, 16)]]),
        "a group that refers to tensor -1": _caches([zeros(8, 16)], [[(-1, 16)]]),
        "a page that is wider than its row": _caches([zeros(8, 16)], [[(0, 17)]]),
        "a page of no bytes": _caches([zeros(8, 16)], [[(0, 0)]]),
        "a tensor without blocks": _caches([zeros(0, 16)], page),
        "a tensor without bytes": _caches([zeros(8, 16), zeros(8, 0)], page),
        "rows that overlap": _caches([zeros(9 * 8).as_strided((8, 16), (8, 1))], page),
        "rows whose bytes lie apart": _caches([zeros(16, 8).T], [[(0, 16)]]),
        "elements that are no bytes": _caches([zeros(8, 16, dtype=torch.int16)], page),
        "a tensor of three dimensions": _caches([zeros(8, 4, 16)], page),
        "rows of another length than is said": CanonicalKVCaches(
            [CanonicalKVCacheTensor(zeros(8, 16), 8)], [[CanonicalKVCacheRef(0, 8)]]
        ),
        "no tensor": _caches([], [[]]),
        "no group": _caches([zeros(8, 16)], []),
    }


def _serve(worker: TransferDriver, caches: Any, num_cpu_blocks: int) -> None:
    """Make a worker, and have it store and load the last block of each group."""
    made = worker.harness.with_caches(caches, num_cpu_blocks)
    try:
        for number, refs in enumerate(caches.group_data_refs):
            if refs:
                used = [caches.tensors[one.tensor_idx].tensor for one in refs]
                last = min(len(tensor) for tensor in used) - 1
                sizes = [int(other == number) for other in range(len(caches.group_data_refs))]
                gpu = GPULoadStoreSpec([last], sizes, [0] * len(sizes))
                made.transfer_async(2 * number, (gpu, worker.tier([0])))
                made.transfer_async(2 * number + 1, (worker.tier([0]), gpu))
                made.wait([2 * number, 2 * number + 1])
                if failed := [one for one in made.get_finished() if not one.success]:
                    raise RuntimeError(f"a worker that was made does not serve: {failed}")
    finally:
        with suppress(Exception):
            made.shutdown()


@transfer_check("XFER-7", _WORKERS)
def check_xfer_7_caches_that_do_not_fit_are_refused(worker: TransferDriver) -> None:
    """When the worker is made; what is unusual and right is not refused."""
    import torch

    wide = torch.zeros(4, 64, dtype=torch.int8)
    fine = {
        "one block": _caches([wide[:1]], [[(0, 64)]]),
        "padding": _caches([wide[:, :32]], [[(0, 16)]]),
        "a group without layers": _caches([wide], [[(0, 64)], []]),
        "a tensor that two groups share": _caches([wide, wide[1:]], [[(0, 64)], [(0, 8), (1, 2)]]),
    }
    for what, caches in fine.items():
        worker._run(f"h.with_caches(kv_caches, 1)  # {what}", partial(_serve, worker, caches, 1))
    for what, caches in _wrong_caches().items():
        code = f"h.with_caches(kv_caches, 4)  # {what}"
        worker.refuses(ConfigError, code, partial(_serve, worker, caches, 4))
    for number in (0, -1):
        code = f"h.with_caches(kv_caches, {number})"
        worker.refuses(ConfigError, code, partial(_serve, worker, fine["padding"], number))


@transfer_check("XFER-7", _WORKERS)
def check_xfer_7_tier_larger_than_memory_is_refused(worker: TransferDriver) -> None:
    """Where the system says how much memory there is."""
    if Path("/proc/meminfo").exists():
        caches = worker.harness.kv_caches
        code = "h.with_caches(h.kv_caches, 1 << 50)"
        worker.refuses(ConfigError, code, partial(_serve, worker, caches, 1 << 50))


@transfer_check("XFER-1")
def check_xfer_1_ids_that_are_no_ints_are_refused(worker: TransferDriver) -> None:
    """Halves, words, lists and nothing name no block; nothing is moved."""
    part = Part(worker.blocks_of(0)[:1], worker.chunks_of(0)[:1])
    worker.store({0: part})
    worker.finish()
    gpu, tier = worker.sides({0: part})
    worker.scramble(0, part.blocks)
    for wrong in (part.blocks[0] + 0.5, str(part.blocks[0]), [part.blocks[0]], None, 1 << 70):
        named = replace(gpu, block_ids=[wrong])  # type: ignore[list-item]
        worker.refused(TransferSpecError, worker.worker, "transfer_async", 900, (tier, named))
        if not worker.can(Capability.TIER_SPEC):
            pages = replace(tier, block_ids=[wrong])  # type: ignore[type-var]
            worker.refused(TransferSpecError, worker.worker, "transfer_async", 900, (pages, gpu))
    worker.check_bytes("a refused job moves nothing")


@transfer_check("XFER-4", Capability.COMPUTE_FAILS)
def check_xfer_4_stream_that_fails_fails_the_job(worker: TransferDriver) -> None:
    """Nobody knows what compute has left: no store has it, the job says so, the next one runs."""
    part = Part(worker.blocks_of(0)[:1], worker.chunks_of(0)[:1])
    worker.store({0: part})
    worker.finish()
    worker.load({0: part})
    worker.finish()
    gpu, tier = worker.sides({0: part})
    for number, when in enumerate(("mark", "wait")):
        for way, spec in enumerate(((gpu, tier), (tier, gpu))):
            worker.scramble(0, part.blocks)
            worker.call(worker.harness, "fail_compute", when)
            job_id = 800 + 2 * number + way
            worker.submit(spec, job_id)
            (result,) = worker.results()
            what = "a job whose compute failed has failed"
            worker.equal((result.job_id, result.success), (job_id, False), what)
            if way:
                worker.forget(0, part.blocks)
            worker.load({0: part})  # what was stored before
            worker.finish()
            worker.check_bytes("a store whose compute failed leaves its page as it was")


@transfer_check("XFER-5", _WORKERS)
def check_xfer_5_shutdown_lets_go_of_the_caches(worker: TransferDriver) -> None:
    """An engine that sleeps needs the memory of its KV caches, though somebody has the worker."""
    import torch

    tensor = torch.zeros(8, 64, dtype=torch.int8)
    kept = ref(tensor)
    made = worker.harness.with_caches(_caches([tensor], [[(0, 64)]]), 4)
    made.transfer_async(1, (GPULoadStoreSpec([5], [1], [0]), worker.tier([0])))
    made.wait([1])
    made.get_finished()
    made.shutdown()
    del tensor
    gc.collect()
    worker.line("# a worker over one tensor, with a job, a shutdown, and `del` of the tensor")
    worker.equal(kept(), None, "after its shutdown a worker has no KV cache")
