"""The CPU<->GPU worker, on each of its ways to copy; CUDA is simulated where there is none."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import settings

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
from kvview.testing.suites.capability import capabilities_of
from kvview_reference.harness import ReferenceTransfer
from kvview_reference.transfer import CPUGPUTransferWorker, host_copy
from kvview_reference.transfer.cuda import (
    StreamCopier,
)

NO_GPU = not torch.cuda.is_available()


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


# KV caches.


@dataclass(frozen=True)
class Shape:
    pages: tuple[int, ...]  # row bytes, per tensor
    groups: tuple[tuple[tuple[int, int], ...], ...]  # (tensor, bytes used), per group
    num_blocks: int = 8
    k: int = 1
    num_cpu_blocks: int = 12


class World:
    """Tensors with random bytes."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.tensors = [
            torch.randint(-128, 128, (shape.num_blocks, page), dtype=torch.int8)
            for page in shape.pages
        ]

    def caches(self) -> CanonicalKVCaches[torch.Tensor]:
        return CanonicalKVCaches(
            [CanonicalKVCacheTensor(t, t.shape[1]) for t in self.tensors],
            [[CanonicalKVCacheRef(*ref) for ref in refs] for refs in self.shape.groups],
        )


ONE = Shape(pages=(16,), groups=(((0, 16),),))
TWO = Shape(pages=(16, 24), groups=(((0, 16), (1, 20)), ((0, 12),)), k=2)


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


# The contract, on every way in which the worker copies.


class Engine(ReferenceTransfer):
    """A worker with two threads."""

    settings = settings(max_examples=6)
    options: ClassVar[dict[str, Any]] = {"num_threads": 2, "inline_bytes": 0}

    def make(self, kv_caches: Any, num_cpu_blocks: int, blocks_per_chunk: int) -> Any:
        sizes = num_cpu_blocks, blocks_per_chunk
        return CPUGPUTransferWorker(kv_caches, sizes[0], blocks_per_chunk=sizes[1], **self.options)


class TestThreads(Engine):
    """A separate thread copies every job."""


class TestInline(Engine):
    """The caller's thread copies every job."""

    options: ClassVar[dict[str, Any]] = {"inline_bytes": 1 << 40}


class TestStreams(Engine):
    """Copies on the streams of a simulated device."""

    lacks = frozenset(capabilities_of("transfer"))

    def make(self, kv_caches: Any, num_cpu_blocks: int, blocks_per_chunk: int) -> Any:
        worker = super().make(kv_caches, num_cpu_blocks, blocks_per_chunk)
        num_blocks = max(cache.tensor.shape[0] for cache in kv_caches.tensors)
        worker._copier = StreamCopier(SimulatedDriver(), worker._host, num_blocks)
        return worker


@dataclass(frozen=True)
class KeySpec:
    """Keys of a tier that has no pages."""

    medium: ClassVar[str] = "DISK"

    keys: Sequence[bytes]


class KeyedWorker(CPUGPUTransferWorker):
    """Keeps the bytes of each key in a page that only it knows."""

    def transfer_async(self, job_id: int, spec: Any, /) -> bool:
        return super().transfer_async(job_id, tuple(map(self._named, spec)))

    def _named(self, side: Any) -> Any:
        if not isinstance(side, KeySpec):
            return side
        known: dict[bytes, int] = vars(self).setdefault("_page_of", {})
        return CPULoadStoreSpec([known.setdefault(key, len(known)) for key in side.keys])


class TestKeys(Engine):
    """A tier that is addressed by key."""

    lacks = frozenset()

    def make(self, kv_caches: Any, num_cpu_blocks: int, blocks_per_chunk: int) -> Any:
        return KeyedWorker(kv_caches, num_cpu_blocks, blocks_per_chunk=blocks_per_chunk)

    def tier_spec(self, pages: Sequence[int]) -> KeySpec:
        return KeySpec([b"page %d" % page for page in pages])


@pytest.mark.parametrize("small_copy_bytes", [0, 1 << 20], ids=["copied", "gathered"])
@pytest.mark.slow
def test_threads_that_share_each_job_satisfy_the_contract(
    monkeypatch: pytest.MonkeyPatch, small_copy_bytes: int
) -> None:
    share_everything(monkeypatch, small_copy_bytes)
    Engine().test_calls()


@pytest.mark.skipif(NO_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("missing", [[], ["_kernel"], ["_kernel", "_batch"]])
def test_a_gpu_satisfies_the_contract(missing: list[str]) -> None:
    class OnCUDA(Engine):
        lacks = TestStreams.lacks
        device = "cuda"

        def make(self, kv_caches: Any, num_cpu_blocks: int, blocks_per_chunk: int) -> Any:
            worker = super().make(kv_caches, num_cpu_blocks, blocks_per_chunk)
            for way in missing:
                setattr(worker._copier._driver, way, None)
            return worker

    OnCUDA().test_calls()


def share_everything(monkeypatch: pytest.MonkeyPatch, small_copy_bytes: int) -> None:
    """Let two threads share even the smallest job; pages below the size are gathered."""
    monkeypatch.setattr(transfer_module, "SMALL_COPY_BYTES", small_copy_bytes)
    monkeypatch.setattr(transfer_module, "SHARED_BYTES", 1)
    monkeypatch.setattr(transfer_module, "FEW_COPIES", 0)


# Beyond the contract.


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
    assert world.tensors[0][4:6].equal(world.tensors[0][1:3])


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
    ((G([1], [0, 1], [0, 0]), C([12])), r"CPU block id 12 of group 1 .* 0 to 11 \(12 blocks\)"),
    ((G([1.0], [1, 0], [0, 0]), C([0])), r"GPU block_ids must be a flat sequence of ints.*1\.0"),
    ((G([1, 2, 3], [3, 0], [1, 0]), C([0])), r"group 0 needs 2 host .* 3 GPU blocks after 1"),
    ((G([1], [1, 0], [0, 0]), C([0, 1])), r"need 1 GPU blocks and 1 host blocks, .* name 1 and 2"),
    ((G([1], [1], [0]), C([0])), r"group_sizes names 1 KV-cache groups, but this worker has 2"),
    ((G([1, 2], [1, 1], [0, 0]), C([4, 4])), r"host block 4 is the destination of two pages"),
    ((C([4, 5]), G([2, 2, 2], [3, 0], [0, 0])), r"GPU block 2 is the destination of two pages"),
    ((G([1], [1, 0], [0, 0]),) * 2, r"GPULoadStoreSpec \(medium 'GPU'\) -> GPULoadStoreSpec"),
    ((DiskSpec(), G([1], [1, 0], [0, 0])), r"got DiskSpec \(medium 'DISK'\) -> GPULoad"),
    ((object(), C([1])), r"got object \(medium None\) -> CPULoadStoreSpec"),
]


@pytest.mark.parametrize(("spec", "message"), BAD_SPECS)
def test_the_error_of_a_wrong_spec_names_the_fault(spec: Any, message: str) -> None:
    with (
        running(World(TWO)) as worker,
        pytest.raises(TransferSpecError, match=f"^XFER-1: .*{message}"),
    ):
        worker.transfer_async(1, spec)


@pytest.mark.parametrize(
    "sides", [([1], [2], [0]), ([], [1, -1], [0, 0]), ([1], [1], []), ([1], [1], [-1])]
)
def test_xfer_1_a_gpu_side_that_does_not_add_up_is_refused(sides: Any) -> None:
    with pytest.raises(TransferSpecError, match=r"^XFER-1: "):
        GPULoadStoreSpec(*sides)


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
    world = World(Shape((8, 8), (((0, 8),), ((1, 8),))))
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
