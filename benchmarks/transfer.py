"""Transfers compared with one plain copy of the same bytes, in the same run.

    python benchmarks/transfer.py [--mib 256] [--rounds 15]

A round is one job of some MiB, and the plain copy of as many bytes before it and after it. Its
ratio is the mean time of the two copies over kvview's (1.0: as fast as the plain copy). The buffers
are those of a tier at work: larger than the caches, written before, and with other blocks in every
round. With a GPU the plain copy is ``copy_`` between pinned memory and the GPU, in wall time;
without one it is ``copy_`` inside CPU memory, in the CPU time of all threads, so that a busy
machine has little effect.

The second table is about the cost of a job rather than of its bytes: jobs of 8 groups, with the
same blocks in 1 group as their peer. The third compares the worker halves of a ``StoreConnector``
with the worker of the first table: host memory alone, and the same with a store below, whose pages
have names.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from harness import (  # type: ignore[import-not-found, unused-ignore]
    ROOT,
    Figures,
    take_turns,
)

from kvview import (
    CacheGeometry,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    ConnectorConfig,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    StepPlan,
    TransferJob,
    TransferSpec,
    make_offload_key,
)
from kvview_reference.store_connector import StoreConnector
from kvview_reference.store_connector.store_plan import EPOCH_BYTES, StoreSpec
from kvview_reference.transfer import CPUGPUTransferWorker

PAGE_SIZES = {"1 KiB": 1 << 10, "16 KiB": 16 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20}
TARGETS = {"1 KiB": 0.2, "16 KiB": 0.5, "64 KiB": 0.8, "1 MiB": 0.9}  # of scattered pages
HOST_MEMORY = f"{ROOT / 'examples' / 'host_memory.py'}:HostMemoryStore"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOCK = time.perf_counter if DEVICE == "cuda" else time.process_time


class Bench:
    """A worker over one tensor, and jobs on it.

    Args:
        page_bytes: Page size of the tensor.
        num_blocks: GPU blocks, and as many host blocks.
        num_groups: Groups, all of which refer to the tensors.
        num_layers: Tensors.
    """

    def __init__(
        self, page_bytes: int, num_blocks: int, num_groups: int = 1, num_layers: int = 1
    ) -> None:
        tensors = [
            torch.ones(num_blocks, page_bytes, dtype=torch.int8, device=DEVICE)
            for _ in range(num_layers)
        ]
        self.tensor = tensors[0]
        self.caches = caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, page_bytes) for tensor in tensors],
            [[CanonicalKVCacheRef(layer, page_bytes) for layer in range(num_layers)]] * num_groups,
        )
        self.worker = CPUGPUTransferWorker(caches, num_blocks)
        self._job_id = 0

    def run(self, spec: TransferSpec) -> None:
        self._job_id += 1
        self.worker.transfer_async(self._job_id, spec)
        self.worker.wait([self._job_id])
        (result,) = self.worker.get_finished()
        if not result.success:
            raise RuntimeError(result.error)


def spec_of(
    blocks: Sequence[int], chunks: Sequence[int], to_host: bool, num_groups: int = 1
) -> TransferSpec:
    sizes = [len(blocks) // num_groups] * num_groups
    gpu, cpu = GPULoadStoreSpec(blocks, sizes, [0] * num_groups), CPULoadStoreSpec(chunks)
    return (gpu, cpu) if to_host else (cpu, gpu)


def copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src, non_blocking=True)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object]) -> float:
    start = CLOCK()
    call()
    return CLOCK() - start


def bandwidth(total: int, rounds: int) -> None:
    job_bytes = min(total, 64 << 20)
    figures = Figures("ms a job", 1e3, "plain copy")
    for label, page_bytes in PAGE_SIZES.items():
        num_blocks, count = total // page_bytes, job_bytes // page_bytes
        bench = Bench(page_bytes, num_blocks)
        host = torch.ones_like(bench.tensor, device="cpu", pin_memory=DEVICE == "cuda")
        every = list(range(num_blocks))
        bench.run(spec_of(every, every, to_host=True))  # writes the host tier once
        dice = random.Random(0)
        orders = {"scattered": [dice.sample(every, num_blocks) for _ in "ab"], "runs": [every] * 2}
        for order, (blocks, chunks) in orders.items():
            for to_host in (True, False):
                dst, src = (host, bench.tensor) if to_host else (bench.tensor, host)
                times: list[list[float]] = [[], []]
                for turn in range(rounds + 1):
                    first = turn * count % (num_blocks - count + 1)
                    part = slice(first, first + count)
                    plain = partial(copy, dst[part], src[part])
                    job = partial(bench.run, spec_of(blocks[part], chunks[part], to_host))
                    before, ours, after = map(seconds, (plain, job, plain))
                    if not turn:
                        continue
                    times[0].append(ours)
                    times[1].append((before + after) / 2)
                target = TARGETS[label] if order == "scattered" else None
                direction = "store" if to_host else "load"
                figures.ratio(f"{label}, {order}, {direction}", times, target)
        bench.worker.shutdown()
    figures.show()


def cost_of_a_job(rounds: int) -> None:
    figures = Figures("us a job", 1e6, "1 group")
    one, eight = (Bench(64 << 10, 1024, num_groups) for num_groups in (1, 8))
    for count in (64, 512):
        dice = random.Random(0)
        blocks, chunks = (dice.sample(range(1024), count) for _ in range(2))
        jobs = [
            partial(bench.run, spec_of(blocks, chunks, True, num_groups))
            for bench, num_groups in ((eight, 8), (one, 1))
        ]
        figures.ratio(
            f"{count} pages of 64 KiB", take_turns(jobs, rounds=rounds, clock=CLOCK), None
        )
    small, alone = Bench(1024, 16, 8), Bench(1024, 16, 1)
    blocks = [1, 2, 3, 4]
    spec = (GPULoadStoreSpec(blocks, [0] * 7 + [4], [0] * 8), CPULoadStoreSpec(blocks))
    jobs = [partial(small.run, spec), partial(alone.run, spec_of(blocks, blocks, True))]
    times = take_turns(jobs, repeats=200, rounds=rounds, clock=CLOCK)
    figures.ratio("4 pages of 1 KiB, in 1 of 8 groups", times, None)
    figures.show()
    for bench in (one, eight, small, alone):
        bench.worker.shutdown()


class StoreBench:
    """The worker half of a ``StoreConnector``, and jobs on its host memory.

    Args:
        bench: The raw worker with the same tensors.
        num_blocks: Blocks of each tensor.
        store: Target of the store below; None for host memory alone.
    """

    def __init__(self, bench: Bench, num_blocks: int, store: str | None) -> None:
        options = {"cpu_blocks": num_blocks, **({"store": store} if store else {})}
        self.worker = StoreConnector(
            ConnectorConfig(CacheGeometry.single(16), options)
        ).make_worker()
        self._has_names = store is not None
        self.worker.register_kv_caches(bench.caches)
        epoch = bytes(EPOCH_BYTES)
        self._names = [make_offload_key(b"%d" % n, 0) + epoch for n in range(num_blocks)]
        self._job_id = 0

    def run(self, blocks: Sequence[int], chunks: Sequence[int], to_host: bool) -> None:
        self._job_id += 1
        gpu = GPULoadStoreSpec(blocks, [len(blocks)], [0])
        spec: LoadStoreSpec = CPULoadStoreSpec(chunks)
        if self._has_names:
            spec = StoreSpec([self._names[chunk] for chunk in chunks], chunks)
        if to_host:
            self.worker.start_plan(StepPlan(stores=[TransferJob(self._job_id, gpu, spec)]))
        else:
            self.worker.start_plan(StepPlan(loads=[TransferJob(self._job_id, spec, gpu)]))
        self.worker.wait([self._job_id])
        (result,) = self.worker.get_finished()
        if not result.success:
            raise RuntimeError(result.error)


def store_connector(total: int, rounds: int) -> None:
    figures = Figures("ms a job", 1e3, "raw worker")
    for label, page_bytes, num_layers in (
        ("16 KiB", 16 << 10, 1),
        ("64 KiB", 64 << 10, 1),
        ("1 MiB", 1 << 20, 1),
        ("32 layers of 64 KiB", 64 << 10, 32),
    ):
        num_blocks = total // page_bytes // num_layers
        bench = Bench(page_bytes, num_blocks, num_layers=num_layers)
        every = list(range(num_blocks))
        dice = random.Random(0)
        blocks, chunks = (dice.sample(every, num_blocks // 4) for _ in range(2))
        for kind, store in (("host memory", None), ("above a store", HOST_MEMORY)):
            ours = StoreBench(bench, num_blocks, store)
            for _ in range(2):  # the allocator recycles memory from then on
                ours.run(every, every, True)
            for to_host in (True, False):
                raw = partial(bench.run, spec_of(blocks, chunks, to_host))
                sides = [partial(ours.run, blocks, chunks, to_host), raw]
                times = take_turns(sides, rounds=rounds, clock=CLOCK)
                target = 0.9 if page_bytes * num_layers >= 1 << 20 else None
                direction = "store" if to_host else "load"
                figures.ratio(f"{label}, {kind}, {direction}", times, target)
            ours.worker.shutdown()
        bench.worker.shutdown()
    figures.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="MiB of the buffers")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if DEVICE == "cpu":
        torch.set_num_threads(1)  # several threads need more CPU time than one
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU memory"
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    bandwidth(arguments.mib << 20, arguments.rounds)
    cost_of_a_job(arguments.rounds)
    store_connector(arguments.mib << 20, arguments.rounds)


if __name__ == "__main__":
    main()
