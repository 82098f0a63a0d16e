"""Transfers beside one plain copy of the same bytes, in the same run.

    python benchmarks/transfer.py [--json FILE] [--mib 256] [--rounds 9]

A round is one job of some MiB, and the plain copy of as many bytes before it and after it.
Its ratio is the mean time of the two copies over ours (1.0: as fast as the plain copy); a row
is the median of the rounds, with the quartiles as spread. The buffers are those of a tier at
work: larger than the caches, written before, other blocks of them in every round. With a GPU
the plain copy is ``copy_`` between pinned memory and the GPU, in wall time; without one it is
``copy_`` inside CPU memory, and what counts is the CPU time of all threads, so that a busy
machine tells little.

``job/...`` rows are about the cost of a job rather than of its bytes: the same
blocks in 1 group over the time in 8 groups, and microseconds of one small job.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
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
CLOCK = time.perf_counter if DEVICE == "cuda" else time.process_time


@dataclass(frozen=True)
class Row:
    """One measured line.

    Args:
        name: As in the JSON file.
        value: A ratio, or microseconds where the name ends in ``_us``.
        low: Lower quartile of the rounds.
        high: Upper quartile of the rounds.
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
            seconds = timed(call)
            if turn:
                times[side].append(seconds)
    return times


def timed(call: Callable[[], None]) -> float:
    start = CLOCK()
    call()
    return CLOCK() - start


def ratio(name: str, times: list[list[float]], note: str = "") -> Row:
    single = [peer / ours for ours, peer in zip(*times, strict=True)]
    low, median, high = statistics.quantiles(single, n=4)
    return Row(name, median, low, high, note)


def beside_copies(
    bench: Bench, specs: Sequence[TransferSpec], plain: Callable[[int], None]
) -> list[list[float]]:
    """Seconds of ``[ours, the plain copy]``; each job between two plain copies."""
    times: list[list[float]] = [[], []]
    for turn, spec in enumerate(specs):
        before = timed(partial(plain, turn))
        ours = timed(partial(bench.run, spec))
        after = timed(partial(plain, turn + 1))
        if turn:
            times[0].append(ours)
            times[1].append((before + after) / 2)
    return times


def bandwidth(total: int, job_bytes: int, rounds: int) -> list[Row]:
    rows = []
    for label, page_bytes in PAGE_SIZES.items():
        num_blocks, num_jobs = total // page_bytes, total // job_bytes
        count = num_blocks // num_jobs
        bench = Bench(page_bytes, num_blocks)
        host = torch.ones_like(bench.tensor, device="cpu", pin_memory=DEVICE == "cuda")
        every = list(range(num_blocks))
        bench.run(spec_of(every, every, to_host=True))  # the host tier is written once
        scatter = random.Random(0)
        shuffled = [scatter.sample(every, num_blocks) for _ in range(2)]
        for order, (blocks, chunks) in {
            "scattered": (shuffled[0], shuffled[1]),
            "runs": (every, every),
        }.items():
            for to_host in (True, False):
                parts = [slice(at * count, (at + 1) * count) for at in range(num_jobs)]
                specs = [spec_of(blocks[part], chunks[part], to_host) for part in parts]
                dst, src = (host, bench.tensor) if to_host else (bench.tensor, host)

                def plain(
                    turn: int,
                    parts: Sequence[slice] = parts,
                    dst: torch.Tensor = dst,
                    src: torch.Tensor = src,
                ) -> None:
                    part = parts[turn % len(parts)]
                    dst[part].copy_(src[part], non_blocking=True)
                    if DEVICE == "cuda":
                        torch.cuda.synchronize()

                jobs = [specs[turn % num_jobs] for turn in range(rounds + 1)]
                times = beside_copies(bench, jobs, plain)
                speeds = [count * page_bytes / statistics.median(side) / 1e9 for side in times]
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
        times = take_turns(partial(eight.run, specs[1]), partial(one.run, specs[0]), rounds)
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
    low, median, high = statistics.quantiles(micros, n=4)
    rows.append(Row("job/small_us", median, low, high, "4 pages of 1 KiB"))
    for bench in (one, eight, small, alone):
        bench.worker.shutdown()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write {name: value} to this file")
    parser.add_argument("--mib", type=int, default=256, help="MiB of the buffers")
    parser.add_argument("--job-mib", type=int, default=64, help="MiB of each copy")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if DEVICE == "cpu":
        torch.set_num_threads(1)  # CPU time of several threads is more than the time that they save
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU memory"
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    rows = bandwidth(arguments.mib << 20, arguments.job_mib << 20, arguments.rounds)
    rows += cost_per_job(arguments.rounds)
    print(f"{'':40} {'value':>8} {'low':>8} {'high':>8}")
    for row in rows:
        print(f"{row.name:40} {row.value:8.2f} {row.low:8.2f} {row.high:8.2f}  {row.note}")
    if arguments.json:
        values = {row.name: round(row.value, 4) for row in rows}
        arguments.json.write_text(json.dumps(values, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
