"""Transfers beside one plain copy of the same bytes, in the same run.

    python benchmarks/transfer.py [--json FILE] [--mib 256] [--rounds 9]

Peers take turns; a round is one turn each. A ratio is the plain copy's time over
ours (1.0: as fast as the plain copy), best of the rounds each; the spread is the
lowest and highest ratio of single rounds, so it shows what else the machine did.
With a GPU the plain copy is ``copy_`` between pinned memory and the GPU, without
one it is ``copy_`` inside CPU memory.

``job/...`` rows are about the cost of a job rather than of its bytes: the same
blocks in 1 group over the time in 8 groups, and microseconds of one small job.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from kvview import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    TransferSpec,
)
from kvview_reference.transfer import CPUGPUTransferWorker

PAGE_SIZES = {"1KiB": 1 << 10, "16KiB": 16 << 10, "64KiB": 64 << 10, "1MiB": 1 << 20}
SHARES = {"1KiB": 0.2, "16KiB": 0.5, "64KiB": 0.8, "1MiB": 0.9}  # wanted of scattered pages
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Row:
    """One measured line.

    Args:
        name: As in the JSON file.
        value: A ratio, or microseconds where the name ends in ``_us``.
        low: Lowest value of a single round.
        high: Highest value of a single round.
        note: What else there is to know.
    """

    name: str
    value: float
    low: float
    high: float
    note: str = ""


class Bench:
    """A worker over one tensor per group set, and jobs on it.

    Args:
        page_bytes: Page size of the one tensor.
        num_blocks: GPU blocks, and as many host blocks.
        num_groups: Groups, all of which refer to the tensor.
    """

    def __init__(self, page_bytes: int, num_blocks: int, num_groups: int = 1) -> None:
        self.tensor = torch.ones(num_blocks, page_bytes, dtype=torch.int8, device=DEVICE)
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(self.tensor, page_bytes)],
            [[CanonicalKVCacheRef(0, page_bytes)]] * num_groups,
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


def take_turns(
    ours: Callable[[], None], peer: Callable[[], None], rounds: int
) -> list[list[float]]:
    """Seconds of ``[ours, peer]`` in every round, after one turn each that does not count."""
    times: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for side, call in enumerate((ours, peer)):
            start = time.perf_counter()
            call()
            if turn:
                times[side].append(time.perf_counter() - start)
    return times


def ratio(name: str, times: list[list[float]], note: str = "") -> Row:
    single = [peer / ours for ours, peer in zip(*times, strict=True)]
    return Row(name, min(times[1]) / min(times[0]), min(single), max(single), note)


def bandwidth(total: int, rounds: int) -> list[Row]:
    rows = []
    for label, page_bytes in PAGE_SIZES.items():
        num_blocks = total // page_bytes
        bench = Bench(page_bytes, num_blocks)
        host = torch.ones_like(bench.tensor, device="cpu", pin_memory=DEVICE == "cuda")
        scatter = random.Random(0)
        shuffled = [scatter.sample(range(num_blocks), num_blocks) for _ in range(2)]
        for order, (blocks, chunks) in {
            "scattered": (shuffled[0], shuffled[1]),
            "runs": (list(range(num_blocks)), list(range(num_blocks))),
        }.items():
            for to_host in (True, False):
                spec = spec_of(blocks, chunks, to_host)
                dst, src = (host, bench.tensor) if to_host else (bench.tensor, host)

                def plain(dst: torch.Tensor = dst, src: torch.Tensor = src) -> None:
                    dst.copy_(src, non_blocking=True)
                    if DEVICE == "cuda":
                        torch.cuda.synchronize()

                def ours(bench: Bench = bench, spec: TransferSpec = spec) -> None:
                    bench.run(spec)

                times = take_turns(ours, plain, rounds)
                speeds = [total / min(side) / 1e9 for side in times]
                direction = "store" if to_host else "load"
                note = f"{speeds[0]:.1f} of {speeds[1]:.1f} GB/s"
                row = ratio(f"copy/{label}/{order}/{direction}", times, note)
                if order == "scattered":
                    met = "met" if row.value >= SHARES[label] else "missed"
                    row = replace(row, note=f"{note}; >= {SHARES[label]:g} {met}")
                rows.append(row)
        bench.worker.shutdown()
    return rows


def cost_per_job(rounds: int) -> list[Row]:
    num_blocks, page_bytes = 1024, 64 << 10
    one, eight = (Bench(page_bytes, num_blocks, num_groups) for num_groups in (1, 8))
    rows = []
    for count in (64, 512):
        scatter = random.Random(0)
        blocks, chunks = (scatter.sample(range(num_blocks), count) for _ in range(2))
        specs = [spec_of(blocks, chunks, True, num_groups) for num_groups in (1, 8)]
        times = take_turns(partial(eight.run, specs[1]), partial(one.run, specs[0]), rounds * 4)
        rows.append(ratio(f"job/{count}_blocks_in_8_groups_over_1", times, "64 KiB pages"))
    gpu = GPULoadStoreSpec([1, 2, 3, 4], [0] * 7 + [4], [0] * 8)
    small, alone = Bench(1024, 16, 8), Bench(1024, 16, 1)
    cpu = CPULoadStoreSpec([1, 2, 3, 4])
    repeat = 200
    spec = spec_of([1, 2, 3, 4], [1, 2, 3, 4], True)

    def one_named_of_eight() -> None:
        for _ in range(repeat):
            small.run((gpu, cpu))

    def one_of_one() -> None:
        for _ in range(repeat):
            alone.run(spec)

    times = take_turns(one_named_of_eight, one_of_one, rounds)
    rows.append(ratio("job/1_named_of_8_groups_over_1", times, "4 pages of 1 KiB"))
    micros = [seconds / repeat * 1e6 for seconds in times[1]]
    rows.append(Row("job/small_us", min(micros), min(micros), max(micros), "4 pages of 1 KiB"))
    for bench in (one, eight, small, alone):
        bench.worker.shutdown()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write {name: value} to this file")
    parser.add_argument("--mib", type=int, default=256, help="MiB of each copy")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU memory"
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    rows = bandwidth(arguments.mib << 20, arguments.rounds) + cost_per_job(arguments.rounds)
    print(f"{'':40} {'value':>8} {'low':>8} {'high':>8}")
    for row in rows:
        print(f"{row.name:40} {row.value:8.2f} {row.low:8.2f} {row.high:8.2f}  {row.note}")
    if arguments.json:
        values = {row.name: round(row.value, 4) for row in rows}
        arguments.json.write_text(json.dumps(values, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
