"""The CPU<->GPU worker against an oracle of plain bytes; CUDA is simulated where there is none."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvview_reference.transfer.worker as transfer_module
from kvview import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    TransferResult,
    TransferSpecError,
    TransferWorker,
)
from kvview_reference.transfer import CPUGPUTransferWorker, host_copy
from kvview_reference.transfer.cuda import (
    StreamCopier,
)

NO_GPU = not torch.cuda.is_available()
GUARD = 32
"""Bytes before, after and (``gap``) between rows that no transfer may touch."""


# A simulated device: streams are queues, and any stream may run ahead of the others.


@dataclass(eq=False)
class SimulatedEvent:
    happened: bool = False


class SimulatedDriver:
    """Runs queued operations in a random order that streams and events allow."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.compute: deque[tuple[str, Any]] = deque()
        self.streams = [self.compute]
        self.pinned: list[int] = []
        self.fail_next_copy = False
        self.lost: Exception | None = None

    def pin(self, host: Any) -> None:
        self.pinned.append(host.ctypes.data)

    def unpin(self, host: Any) -> None:
        self.pinned.remove(host.ctypes.data)

    def stream(self) -> Any:
        self.streams.append(deque())
        return self.streams[-1]

    def compute_stream(self) -> Any:
        return self.compute

    def record(self, stream: Any) -> SimulatedEvent:
        event = SimulatedEvent()
        stream.append(("event", event))
        return event

    def wait_event(self, stream: Any, event: SimulatedEvent) -> None:
        stream.append(("wait", event))

    def copy(self, stream: Any, dst: Any, src: Any, sizes: Any) -> None:
        copies = list(zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True))
        self.random.shuffle(copies)
        if self.fail_next_copy:
            self.fail_next_copy = False
            stream.extend(("copy", copy) for copy in copies[: len(copies) // 2])
            raise RuntimeError("the copy engine is on fire")
        stream.extend(("copy", copy) for copy in copies)

    def done(self, event: SimulatedEvent) -> bool:
        for _ in range(self.random.randrange(4)):
            self.step()
        if self.lost is not None:
            raise self.lost
        return event.happened

    def wait(self, event: SimulatedEvent) -> None:
        while not event.happened:
            assert self.step(), "streams wait for each other"

    def seconds(self, start: SimulatedEvent, end: SimulatedEvent) -> float:
        assert start.happened
        assert end.happened
        return 0.5

    def step(self) -> bool:
        able = [s for s in self.streams if s and (s[0][0] != "wait" or s[0][1].happened)]
        if not able:
            return False
        kind, what = self.random.choice(able).popleft()
        if kind == "event":
            what.happened = True
        elif kind == "copy":
            ctypes.memmove(*what)
        elif kind == "call":
            what()
        return True


# KV caches, and what must be in them.


@dataclass(frozen=True)
class Shape:
    pages: tuple[int, ...]  # row bytes, per tensor
    gaps: tuple[int, ...]  # bytes between rows, per tensor
    groups: tuple[tuple[tuple[int, int], ...], ...]  # (tensor, bytes used), per group
    num_blocks: int = 8
    k: int = 1
    num_cpu_blocks: int = 12


class World:
    """Tensors inside guarded buffers, and a plain-bytes copy of what they must hold."""

    def __init__(self, shape: Shape, seed: int = 0, device: str = "cpu") -> None:
        self.shape = shape
        self.buffers = []
        self.tensors = []
        generator = torch.Generator().manual_seed(seed)
        for page, gap in zip(shape.pages, shape.gaps, strict=True):
            stride = page + gap
            size = GUARD + shape.num_blocks * stride + GUARD
            buffer = torch.randint(-128, 128, (size,), dtype=torch.int8, generator=generator)
            self.buffers.append(buffer.to(device))
            self.tensors.append(
                self.buffers[-1].as_strided((shape.num_blocks, page), (stride, 1), GUARD)
            )
        self.expected = self.actual()
        self.host: dict[int, tuple[int, dict[int, list[bytes]]]] = {}

    def caches(self) -> CanonicalKVCaches[torch.Tensor]:
        return CanonicalKVCaches(
            [CanonicalKVCacheTensor(t, t.shape[1]) for t in self.tensors],
            [[CanonicalKVCacheRef(*ref) for ref in refs] for refs in self.shape.groups],
        )

    def actual(self) -> list[bytearray]:
        return [bytearray(buffer.cpu().numpy().tobytes()) for buffer in self.buffers]

    def pages(self, group: int, block: int) -> Iterator[tuple[int, slice]]:
        for tensor, width in self.shape.groups[group]:
            start = GUARD + block * (self.shape.pages[tensor] + self.shape.gaps[tensor])
            yield tensor, slice(start, start + width)

    def apply(self, to_host: bool, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> None:
        """Do to the plain bytes what the job must do, one page at a time."""
        blocks, chunks = list(gpu.block_ids), list(cpu.block_ids)
        for group, size in enumerate(gpu.group_sizes):
            chunk, sub = None, gpu.block_indices[group] % self.shape.k
            for _ in range(size):
                if chunk is None or sub == self.shape.k:
                    sub = 0 if chunk is not None else sub
                    chunk = chunks.pop(0)
                block = blocks.pop(0)
                if to_host:
                    owner, held = self.host.get(chunk, (group, {}))
                    held = held if owner == group else {}
                    held[sub] = [bytes(self.expected[t][s]) for t, s in self.pages(group, block)]
                    self.host[chunk] = (group, held)
                else:
                    for (t, s), data in zip(
                        self.pages(group, block), self.host[chunk][1][sub], strict=True
                    ):
                        self.expected[t][s] = data
                sub += 1
        assert not blocks
        assert not chunks

    def loadable(self, group: int, chunk: int, sub: int) -> bool:
        owner, held = self.host.get(chunk, (None, {}))
        return owner == group and sub in held

    def check(self) -> None:
        for index, (is_now, must_be) in enumerate(zip(self.actual(), self.expected, strict=True)):
            wrong = [
                i for i, pair in enumerate(zip(is_now, must_be, strict=True)) if len({*pair}) > 1
            ]
            assert not wrong, f"tensor {index}: bytes {wrong[:8]} (guard: {GUARD}) differ"


ONE = Shape(pages=(16,), gaps=(0,), groups=(((0, 16),),))
TWO = Shape(pages=(16, 24), gaps=(0, 3), groups=(((0, 16), (1, 20)), ((0, 12),)), k=2)


@contextmanager
def running(
    world: World, engine: str = "thread", seed: int = 0, **options: Any
) -> Iterator[CPUGPUTransferWorker]:
    if engine == "inline":
        options["inline_bytes"] = 1 << 40
    elif engine == "thread":
        options["inline_bytes"] = 0
    worker = CPUGPUTransferWorker(
        world.caches(), world.shape.num_cpu_blocks, blocks_per_chunk=world.shape.k, **options
    )
    if engine == "streams":
        worker._copier = StreamCopier(SimulatedDriver(seed), worker._host, world.shape.num_blocks)
    try:
        yield worker
    finally:
        worker.shutdown()


ENGINES = pytest.mark.parametrize("engine", ["inline", "thread", "streams"])


def store(
    blocks: Sequence[int],
    chunks: Sequence[int],
    sizes: Sequence[int] | None = None,
    at: Sequence[int] | None = None,
) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
    sizes = [len(blocks)] if sizes is None else sizes
    gpu = GPULoadStoreSpec(blocks, sizes, [0] * len(sizes) if at is None else at)
    return gpu, CPULoadStoreSpec(chunks)


def load(*args: Any, **kwargs: Any) -> tuple[CPULoadStoreSpec, GPULoadStoreSpec]:
    gpu, cpu = store(*args, **kwargs)
    return cpu, gpu


def finish(worker: TransferWorker, job_ids: Sequence[int]) -> list[TransferResult]:
    worker.wait(job_ids)
    return worker.get_finished()


def share_everything(monkeypatch: pytest.MonkeyPatch, small_copy_bytes: int) -> None:
    """Let two threads share even the smallest job; pages below the size are gathered."""
    monkeypatch.setattr(transfer_module, "SMALL_COPY_BYTES", small_copy_bytes)
    monkeypatch.setattr(transfer_module, "SHARED_BYTES", 1)
    monkeypatch.setattr(transfer_module, "FEW_COPIES", 0)


# XFER-1, XFER-2, XFER-3: exact bytes, nothing else, in order.


@st.composite
def shapes(draw: Callable[..., Any]) -> Shape:
    pages = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 7]), min_size=len(pages), max_size=len(pages)))
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        tensors = draw(st.lists(st.integers(0, len(pages) - 1), min_size=1, unique=True))
        groups.append(tuple((t, draw(st.integers(1, pages[t]))) for t in tensors))
    return Shape(tuple(pages), tuple(gaps), tuple(groups), k=draw(st.integers(1, 4)))


def draw_job(
    draw: Callable[..., Any], world: World
) -> tuple[bool, GPULoadStoreSpec, CPULoadStoreSpec] | None:
    shape, to_host = world.shape, not world.host or draw(st.booleans())
    free = draw(st.permutations(range(shape.num_cpu_blocks)))
    taken: set[tuple[int, int]] = set()
    blocks, chunks, sizes, indices = [], [], [], []
    for group, refs in enumerate(shape.groups):
        held = [(c, s) for c in world.host for s in range(shape.k) if world.loadable(group, c, s)]
        index, size, chosen = draw(st.integers(0, 9)), 0, []
        if to_host:
            size = draw(st.integers(0, 5))
            chosen = free[: -(-(index % shape.k + size) // shape.k) if size else 0]
            free = free[len(chosen) :]
        elif held:
            # A stretch of what this group stored; its chunks need not follow each other.
            chunk, sub = draw(st.sampled_from(held))
            index = shape.k * index + sub
            while (chunk, sub) in held and size < 6 and draw(st.integers(0, 4)) < 4:
                if not size or sub == 0:
                    chosen.append(chunk)
                size, sub = size + 1, (sub + 1) % shape.k
                if sub == 0:
                    chunk = draw(st.sampled_from(held))[0]
        if len(chosen) < -(-(index % shape.k + size) // shape.k) and size:
            return None
        allowed = draw(st.permutations(range(shape.num_blocks)))
        if not to_host:
            allowed = [b for b in allowed if all((t, b) not in taken for t, _ in refs)]
        if size > len(allowed):
            return None
        taken.update((t, b) for t, _ in refs for b in allowed[:size])
        blocks += allowed[:size]
        chunks += chosen
        sizes.append(size)
        indices.append(index)
    return to_host, GPULoadStoreSpec(blocks, sizes, indices), CPULoadStoreSpec(chunks)


@ENGINES
@pytest.mark.parametrize("way", ["one-by-one", "gathered-by-two", "copied-by-two"])
def test_random_jobs_move_exactly_the_named_bytes(
    engine: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "one-by-one":
        share_everything(monkeypatch, 1 << 20 if way == "gathered-by-two" else 0)
    jobs_run = {True: 0, False: 0}

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        world = World(data.draw(shapes()), seed=data.draw(st.integers(0, 99)))
        reported = []
        with running(world, engine, data.draw(st.integers(0, 99)), num_threads=2) as worker:
            accepted = []
            for job_id in range(data.draw(st.integers(1, 8))):
                job = draw_job(data.draw, world)
                if job is None:
                    continue
                to_host, gpu, cpu = job
                assert worker.transfer_async(job_id, (gpu, cpu) if to_host else (cpu, gpu))
                world.apply(*job)
                jobs_run[to_host] += bool(gpu.block_ids)
                accepted.append((job_id, bytes_of(world.shape, gpu)))
                # Mostly without waiting: order is the worker's affair (XFER-3).
                if data.draw(st.integers(0, 3)) == 0:
                    worker.wait([job_id])
                    reported += worker.get_finished()
                    assert job_id in [result.job_id for result in reported]
            reported += finish(worker, [job_id for job_id, _ in accepted])
            assert worker.get_finished() == []
            world.check()
        assert sorted((r.job_id, r.transfer_size) for r in reported) == accepted
        assert all(r.success and r.error is None for r in reported)
        assert all((r.transfer_time or 0.0) >= 0 for r in reported)

    run()
    assert min(jobs_run.values()) > 20, jobs_run


def bytes_of(shape: Shape, gpu: GPULoadStoreSpec) -> int:
    return sum(
        size * sum(width for _, width in refs)
        for size, refs in zip(gpu.group_sizes, shape.groups, strict=True)
    )


@ENGINES
@pytest.mark.parametrize("first", range(4))
def test_unaligned_first_chunk_of_each_group(engine: str, first: int) -> None:
    """k = 4: five blocks from number ``first`` lie in ceil((first % 4 + 5) / 4) chunks."""
    shape = Shape((8, 8), (0, 1), (((0, 8),), ((1, 5),), ((0, 3), (1, 8))), 20, 4, 8)
    world = World(shape)
    chunks = 2 if first < 4 else 3
    with running(world, engine) as worker:
        job = GPULoadStoreSpec([7, 2, 5, 1, 9, 11], [5, 0, 1], [first, 3, 2])
        host = CPULoadStoreSpec([*range(6, 6 - chunks, -1), 0])
        worker.transfer_async(1, (job, host))
        world.apply(True, job, host)
        back = GPULoadStoreSpec([12, 13, 14, 15, 16, 17], [5, 0, 1], [first, 3, 2])
        worker.transfer_async(2, (host, back))
        world.apply(False, back, host)
        assert [r.success for r in finish(worker, [1, 2])] == [True, True]
        world.check()
    assert world.tensors[0][12:17].equal(world.tensors[0][[7, 2, 5, 1, 9]])


@ENGINES
def test_jobs_on_one_page_run_in_order_of_submission(engine: str) -> None:
    for seed in range(30):
        world = World(ONE)
        with running(world, engine, seed) as worker:
            # Host page 0: written, read, written again, read again. GPU page 5: loaded, stored.
            jobs = [
                (True, [1], [0]),
                (False, [5], [0]),
                (True, [2], [0]),
                (False, [6], [0]),
                (True, [5], [1]),
                (False, [2], [1]),
                (False, [5], [0]),
            ]
            for job_id, (to_host, blocks, chunks) in enumerate(jobs):
                gpu, cpu = store(blocks, chunks)
                worker.transfer_async(job_id, (gpu, cpu) if to_host else (cpu, gpu))
                world.apply(to_host, gpu, cpu)
            assert len(finish(worker, range(len(jobs)))) == len(jobs)
            world.check()


def test_large_pages_in_runs_and_scattered_with_two_copiers() -> None:
    shape = Shape((1 << 16,), (0,), (((0, 1 << 16),),), num_blocks=64, num_cpu_blocks=64)
    for order in (range(60), [*range(30, 60), *range(30)], random.Random(1).sample(range(60), 60)):
        world = World(shape)
        with running(world, num_threads=2) as worker:
            gpu, cpu = store(list(range(60)), list(order))
            worker.transfer_async(1, (gpu, cpu))
            world.apply(True, gpu, cpu)
            back, _ = store([63, *range(1, 60)], list(order))
            worker.transfer_async(2, (cpu, back))
            world.apply(False, back, cpu)
            assert [r.transfer_size for r in finish(worker, [1, 2])] == [60 << 16] * 2
            world.check()


@ENGINES
def test_one_block_id_in_two_groups_is_two_pages_unless_they_share_a_tensor(engine: str) -> None:
    apart = Shape((8, 8), (0, 0), (((0, 8),), ((1, 8),)))
    world = World(apart)
    with running(world, engine) as worker:
        gpu, cpu = store([3, 3], [0, 1], sizes=[1, 1])
        worker.transfer_async(1, (gpu, cpu))
        world.apply(True, gpu, cpu)
        into = GPULoadStoreSpec([4, 4], [1, 1], [0, 0])
        worker.transfer_async(2, (cpu, into))
        world.apply(False, into, cpu)
        assert all(r.success for r in finish(worker, [1, 2]))
        world.check()
    with running(World(TWO), engine) as worker:
        message = r"GPU block 4 is the destination of two pages of one tensor \(groups \[0, 1\]\)"
        with pytest.raises(TransferSpecError, match=message):
            worker.transfer_async(1, load([4, 4], [0, 1], sizes=[1, 1]))
        # As sources they are fine: reading a page twice is no conflict.
        assert worker.transfer_async(1, store([4, 4], [0, 1], sizes=[1, 1]))


@ENGINES
def test_one_source_may_fill_several_destinations(engine: str) -> None:
    world = World(ONE)
    with running(world, engine) as worker:
        gpu, cpu = store([3, 3], [0, 1])
        worker.transfer_async(1, (gpu, cpu))
        world.apply(True, gpu, cpu)
        into = GPULoadStoreSpec([4, 5], [2], [0])
        worker.transfer_async(2, (CPULoadStoreSpec([1, 1]), into))
        world.apply(False, into, CPULoadStoreSpec([1, 1]))
        finish(worker, [1, 2])
        world.check()


def test_empty_jobs_groups_without_tensors_and_doubled_references() -> None:
    shape = Shape((16,), (0,), ((), ((0, 4), (0, 9))))
    world = World(shape)
    with running(world) as worker:
        worker.transfer_async(1, store([], [], sizes=[0, 0]))
        worker.transfer_async(2, store([1], [0], sizes=[1, 0]))
        worker.transfer_async(3, store([1], [0], sizes=[0, 1]))
        assert [r.transfer_size for r in finish(worker, [1, 2, 3])] == [0, 0, 9]
        worker.transfer_async(4, load([2], [0], sizes=[0, 1]))
        finish(worker, [4])
    assert world.tensors[0][2, :9].equal(world.tensors[0][1, :9])
    assert worker.host_bytes == 0


class Gate:
    """Holds back every copy of the threads until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self._copy = host_copy.memmove_each
        monkeypatch.setattr(transfer_module, "memmove_each", self._copy_when_open)

    def _copy_when_open(self, *copies: Any) -> None:
        assert self.opened.wait(30)
        self._copy(*copies)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_ids_are_read_at_submission(gate: Gate) -> None:
    world = World(ONE)
    blocks, chunks = np.array([4, 5]), [0, 1]
    with running(world) as worker:
        gpu, cpu = store([1, 2], [0, 1])
        worker.transfer_async(1, (gpu, cpu))
        worker.transfer_async(2, load(blocks, chunks))
        blocks[:] = 7
        chunks[:] = [5, 6]
        gate.opened.set()
        finish(worker, [1, 2])
    world.apply(True, gpu, cpu)
    world.apply(False, GPULoadStoreSpec([4, 5], [2], [0]), cpu)
    world.check()


def test_a_small_job_does_not_overtake_a_large_one(gate: Gate) -> None:
    """A job small enough for the caller's thread still waits its turn (XFER-3)."""
    world = World(ONE)
    with running(world, "", inline_bytes=16) as worker:
        gpu, cpu = store([1, 2], [0, 1])
        worker.transfer_async(1, (gpu, cpu))
        worker.transfer_async(2, load([3], [1]))
        threading.Timer(0.02, gate.opened.set).start()
        assert [r.job_id for r in finish(worker, [2])] == [1, 2]
    world.apply(True, gpu, cpu)
    world.apply(False, GPULoadStoreSpec([3], [1], [0]), CPULoadStoreSpec([1]))
    world.check()


def test_tensors_made_in_inference_mode() -> None:
    """Engines allocate KV caches in inference mode, which is a state of one thread only."""
    with torch.inference_mode():
        world = World(ONE)
    with running(world) as worker:
        worker.transfer_async(1, store([1], [0]))
        worker.transfer_async(2, load([2], [0]))
        assert [r.success for r in finish(worker, [1, 2])] == [True, True]
    assert world.tensors[0][2].equal(world.tensors[0][1])


# XFER-1: bad specs, before anything starts.


class DiskSpec:
    medium = "DISK"


G: Any = GPULoadStoreSpec
C: Any = CPULoadStoreSpec
BAD_SPECS: list[tuple[Any, str]] = [
    ((G([8], [1, 0], [0, 0]), C([0])), r"GPU block id 8 of group 0 .* 0 to 7 \(8 blocks\)"),
    ((G([1, -1], [1, 1], [0, 0]), C([0, 1])), r"GPU block id -1 of group 1 is out of range"),
    ((G([1 << 63], [1, 0], [0, 0]), C([0])), r"GPU block id .* of group 0 is out of range"),
    ((G([1 << 99], [1, 0], [0, 0]), C([0])), r"GPU block_ids must be a flat sequence of ints"),
    ((G([1], [0, 1], [0, 0]), C([12])), r"CPU block id 12 of group 1 .* 0 to 11 \(12 blocks\)"),
    ((C([-3]), G([1], [1, 0], [0, 0])), r"CPU block id -3 of group 0 is out of range"),
    ((G([1.0], [1, 0], [0, 0]), C([0])), r"GPU block_ids must be a flat sequence of ints.*1\.0"),
    ((G([1], [1, 0], [0, 0]), C([True])), r"CPU block_ids must be a flat sequence of ints"),
    ((G(["1"], [1, 0], [0, 0]), C([0])), r"GPU block_ids must be a flat sequence of ints"),
    ((G([1], [1, 0], [0, 0]), C([[0], [1, 2]])), r"CPU block_ids must be a flat sequence"),
    ((G([1, 2, 3], [3, 0], [1, 0]), C([0])), r"group 0 needs 2 host .* 3 GPU blocks after 1"),
    ((G([1, 2, 3], [2, 1], [0, 1]), C([0])), r"group 1 needs 1 host blocks .* 0 left of 1"),
    ((G([1], [1, 0], [0, 0]), C([0, 1])), r"need 1 GPU and 1 host blocks, .* name 1 and 2"),
    ((G([1], [1], [0]), C([0])), r"group_sizes names 1 KV-cache groups, this worker has 2"),
    ((G([1, 2], [1, 1], [0, 0]), C([4, 4])), r"host block 4 is the destination of two pages"),
    ((C([4, 5]), G([2, 2, 2], [3, 0], [0, 0])), r"GPU block 2 is the destination of two pages"),
    ((G([1], [1, 0], [0, 0]),) * 2, r"GPULoadStoreSpec \(medium 'GPU'\) -> GPULoadStoreSpec"),
    ((C([1]), C([2])), r"CPULoadStoreSpec \(medium 'CPU'\) -> CPULoadStoreSpec"),
    ((DiskSpec(), G([1], [1, 0], [0, 0])), r"got DiskSpec \(medium 'DISK'\) -> GPULoad"),
    ((object(), C([1])), r"got object \(medium None\) -> CPULoadStoreSpec"),
]


@ENGINES
@pytest.mark.parametrize(("spec", "message"), BAD_SPECS)
def test_bad_spec_is_refused_and_changes_nothing(engine: str, spec: Any, message: str) -> None:
    world = World(TWO)
    with running(world, engine) as worker:
        host = worker._host.copy()
        with pytest.raises(TransferSpecError, match=f"^XFER-1: .*{message}"):
            worker.transfer_async(1, spec)
        assert worker.get_finished() == []
        assert (worker._host == host).all()
        world.check()
        # The id was never in flight.
        assert worker.transfer_async(1, store([1], [0], sizes=[1, 0]))
        assert [r.job_id for r in finish(worker, [1])] == [1]


@pytest.mark.parametrize(
    "sides", [([1], [2], [0]), ([], [1, -1], [0, 0]), ([1], [1], []), ([1], [1], [-1])]
)
def test_xfer_1_a_gpu_side_that_does_not_add_up_is_refused(sides: Any) -> None:
    with pytest.raises(TransferSpecError, match=r"^XFER-1: "):
        GPULoadStoreSpec(*sides)


def test_a_group_is_bounded_by_its_smallest_tensor() -> None:
    tensors = [torch.zeros(n, 4, dtype=torch.int8) for n in (3, 6)]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(t, 4) for t in tensors],
        [[CanonicalKVCacheRef(0, 4)], [CanonicalKVCacheRef(1, 4)]],
    )
    worker = CPUGPUTransferWorker(caches, 4)
    assert worker.transfer_async(1, store([5], [0], sizes=[0, 1]))
    with pytest.raises(TransferSpecError, match="GPU block id 3 of group 0 is out of range"):
        worker.transfer_async(2, store([3], [0], sizes=[1, 0]))
    worker.shutdown()


# XFER-4, XFER-5: results.


def test_the_caller_never_waits_and_results_come_once(gate: Gate) -> None:
    world = World(ONE)
    with running(world) as worker:
        assert isinstance(worker, TransferWorker)
        assert worker.transfer_async(7, store([1], [0]))
        assert worker.transfer_async(3, load([2], [0]))
        assert worker.get_finished() == []
        world.check()
        with pytest.raises(TransferSpecError, match=r"^XFER-5: job_id 7 is in flight"):
            worker.transfer_async(7, store([1], [1]))
        gate.opened.set()
        worker.wait([3, 7, 999])
        worker.wait([3])
        # Ended, not yet reported: the id is still in flight.
        with pytest.raises(TransferSpecError, match="job_id 3 is in flight"):
            worker.transfer_async(3, store([1], [1]))
        assert [r.job_id for r in worker.get_finished()] == [7, 3]
        assert worker.get_finished() == []
        assert worker.transfer_async(7, store([1], [1]))
        assert [r.job_id for r in finish(worker, [7])] == [7]
        assert not worker._copier._futures, "what was reported is forgotten"  # type: ignore[attr-defined]


@pytest.mark.parametrize("job_id", [True, 1.0, "1", None])
def test_job_id_must_be_an_int(job_id: Any) -> None:
    with (
        running(World(ONE)) as worker,
        pytest.raises(TransferSpecError, match=r"^XFER-5: job_id must be"),
    ):
        worker.transfer_async(job_id, store([1], [0]))


@ENGINES
@pytest.mark.parametrize("new_size", [0, 1 << 20], ids=["freed", "moved"])
def test_a_freed_tensor_fails_the_job_that_needs_it(engine: str, new_size: int) -> None:
    """An engine that sleeps frees its KV caches; a job of that moment must say so."""
    world = World(Shape((8, 8), (0, 0), (((0, 8),), ((1, 8),))))
    # Anew, because memory that numpy has seen cannot be freed under it.
    world.tensors = [torch.full((8, 8), 1, dtype=torch.int8) for _ in range(2)]
    with running(world, engine) as worker:
        world.tensors[0].untyped_storage().resize_(new_size)
        worker.transfer_async(1, store([1], [0], sizes=[1, 0]))
        worker.transfer_async(2, store([1], [1], sizes=[0, 1]))
        worker.transfer_async(3, store([1, 2], [2, 3], sizes=[1, 1]))
        results = {r.job_id: r for r in finish(worker, [1, 2, 3])}
        assert [results[i].success for i in (1, 2, 3)] == [False, True, False]
        assert results[1].error is not None
        assert "was freed or moved" in results[1].error
        assert (results[1].transfer_size, results[1].transfer_time) == (None, None)
        # Of the store of both groups, what can be stored is stored, where one copy is one call.
        partly = [3] if engine != "streams" else []
        assert results[3].moved == ([False, True] if partly else None)
        assert worker._host.any(axis=1).tolist() == [i in (1, *partly) for i in range(12)]


def test_an_error_in_any_copying_thread_fails_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    share_everything(monkeypatch, 0)
    copy = host_copy.copy_all

    def broken(*copies: Any, **side: Any) -> None:
        if threading.current_thread().name.startswith("kvview-copy"):
            raise OSError("bus error")
        copy(*copies, **side)

    with running(World(ONE), num_threads=2) as worker:
        monkeypatch.setattr(transfer_module, "copy_all", broken)
        worker.transfer_async(1, store([1, 3], [0, 2]))
        (result,) = finish(worker, [1])
        assert (result.success, result.error) == (False, "OSError: bus error")
        monkeypatch.setattr(transfer_module, "copy_all", copy)
        worker.transfer_async(2, store([1, 3], [0, 2]))
        assert finish(worker, [2])[0].success


def test_shutdown_finishes_what_is_in_flight_and_is_callable_twice(gate: Gate) -> None:
    world = World(ONE)
    worker = CPUGPUTransferWorker(world.caches(), 4, inline_bytes=0)
    for job_id in range(5):
        worker.transfer_async(job_id, store([job_id], [job_id % 4]))
    before = threading.active_count()
    opener = threading.Timer(0.05, gate.opened.set)
    opener.start()
    worker.shutdown()
    opener.join()
    assert threading.active_count() < before + 1
    worker.shutdown()
    assert not worker.transfer_async(9, store([1], [0]))
    assert [(r.job_id, r.success) for r in worker.get_finished()] == [(i, True) for i in range(5)]
    assert worker.get_finished() == []
    worker.wait([0, 9])
    assert worker.host_bytes == 0


# The CUDA engine over a simulated device.
