"""The transfer worker on streams: order, failures, configuration; on CUDA where there is one."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")


from kvview import (
    ConfigError,
    TransferResult,
)
from kvview_reference.transfer import CPUGPUTransferWorker
from kvview_reference.transfer.cuda import StreamCopier
from kvview_reference.transfer.cuda_copies import _BATCH_SIGNATURE, _CopyAttributes, batch_copy
from tests.transfer.test_transfer import (
    ONE,
    Shape,
    SimulatedDriver,
    SimulatedEvent,
    World,
    finish,
    load,
    running,
    store,
)


def streams(world: World, seed: int = 0) -> tuple[CPUGPUTransferWorker, SimulatedDriver]:
    worker = CPUGPUTransferWorker(world.caches(), world.shape.num_cpu_blocks)
    driver = SimulatedDriver(seed)
    worker._copier = StreamCopier(driver, worker._host, world.shape.num_blocks)
    return worker, driver


def test_stores_wait_for_the_compute_that_came_before() -> None:
    for seed in range(20):
        world = World(ONE)
        worker, driver = streams(world, seed)
        driver.compute.append(("call", lambda: world.tensors[0].__setitem__(1, 42)))  # noqa: B023
        worker.transfer_async(1, store([1], [0]))
        driver.compute.append(("call", lambda: world.tensors[0].__setitem__(1, 13)))  # noqa: B023
        (result,) = finish(worker, [1])
        assert (result.transfer_size, result.transfer_time) == (16, 0.5)
        assert set(worker._host[0].tolist()) <= {42, 13}
        worker.shutdown()


def test_xfer_6_jobs_wait_for_the_stream_that_is_named_and_no_other() -> None:
    """The model's stream is not the submitting thread's current one."""
    named: deque[tuple[str, Any]] = deque()

    class ComputeStream:
        def record_event(self) -> SimulatedEvent:
            return driver.record(named)

    for seed in range(20):
        world = World(ONE)
        driver = SimulatedDriver(seed)
        driver.streams.append(named)
        worker = CPUGPUTransferWorker(world.caches(), world.shape.num_cpu_blocks)
        blocks = world.shape.num_blocks
        worker._copier = StreamCopier(driver, worker._host, blocks, ComputeStream())  # type: ignore[arg-type]
        tensor = world.tensors[0]
        named.append(("call", lambda: tensor.__setitem__(slice(1, 3), 42)))  # noqa: B023
        # Never done, because no code waits for it.
        driver.compute.append(("wait", SimulatedEvent()))
        worker.transfer_async(1, store([1], [0]))
        worker.transfer_async(2, load([2], [0]))
        worker.wait([1, 2])
        worker.shutdown()
        assert tensor[1:3].eq(42).all()


def test_directions_overlap_unless_they_touch_the_same_page() -> None:
    world = World(ONE)
    worker, driver = streams(world)
    worker.transfer_async(1, store([1], [0]))
    worker.transfer_async(2, load([2], [3]))
    stores, loads = driver.streams[1], driver.streams[2]
    assert [kind for kind, _ in loads] == ["wait", "event", "copy", "event"]
    worker.transfer_async(3, load([1], [4]))
    assert [kind for kind, _ in loads][4:] == ["wait", "wait", "event", "copy", "event"]
    assert len(stores) == 4
    worker.shutdown()
    assert driver.pinned == []
    assert sorted(r.job_id for r in worker.get_finished()) == [1, 2, 3]


def test_a_copy_that_fails_or_a_device_that_is_lost_is_reported() -> None:
    worker, driver = streams(World(ONE))
    driver.fail_next_copy = True
    worker.transfer_async(1, store([1, 3], [0, 2]))
    worker.transfer_async(2, store([1], [0]))
    first, second = finish(worker, [1, 2]) or worker.get_finished()
    assert (first.success, first.error) == (False, "RuntimeError: the copy engine is on fire")
    assert second.success
    worker.transfer_async(3, store([1], [0]))
    driver.lost = RuntimeError("device lost")
    assert worker.get_finished() == [TransferResult(3, False, error="RuntimeError: device lost")]
    driver.lost = None
    worker.shutdown()


def test_the_batched_copy_passes_the_arguments_of_the_driver() -> None:
    data = np.arange(64, dtype=np.uint8)
    out = np.zeros(64, np.uint8)
    status, calls = 0, []

    def driver(dst: int, src: int, sizes: int, count: int, *rest: Any) -> int:
        attributes, first, num_attributes, failed_at, stream = rest
        lists = [(ctypes.c_size_t * count).from_address(at) for at in (dst, src, sizes)]
        for copy in zip(*lists, strict=True):
            ctypes.memmove(*copy)
        calls.append((_CopyAttributes.from_address(attributes).source_access_order, stream))
        assert ctypes.c_size_t.from_address(first).value == 0
        assert num_attributes == 1
        ctypes.c_size_t.from_address(failed_at).value = 5
        return status

    function = _BATCH_SIGNATURE(driver)
    at = np.array([0, 48])
    sizes = np.array([16, 8])
    batch_copy(function, 1234, out.ctypes.data + at, data.ctypes.data + at, sizes)
    assert calls == [(1, 1234)]
    assert out.tolist() == [*range(16), *[0] * 32, *range(48, 56), *[0] * 8]
    batch_copy(function, 1234, at[:0], at[:0], at[:0])
    assert len(calls) == 1
    status = 700
    with pytest.raises(RuntimeError, match="CUDA error 700 at copy 5"):
        batch_copy(function, 1, out.ctypes.data + at, data.ctypes.data + at, sizes)


# Construction; the kit tries KV caches that no worker can move (XFER-7).


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("cpu", {"num_cpu_blocks": 0}, "num_cpu_blocks must be a positive int, got 0"),
        ("cpu", {"max_host_bytes": 191}, r"192 bytes, more than max_host_bytes \(191\)"),
        ("meta", {}, "tensor 0 is on meta"),
    ],
)
def test_impossible_configuration(device: str, options: dict[str, Any], message: str) -> None:
    world = World(ONE)
    world.tensors = [tensor.to(device) for tensor in world.tensors]
    with pytest.raises(ConfigError, match=message):
        CPUGPUTransferWorker(world.caches(), **{"num_cpu_blocks": 12, **options})


def test_host_tier_leaves_out_padding_and_tensors_of_other_groups() -> None:
    shape = Shape((64, 64), (((0, 40),), ((1, 48),)), k=3, num_cpu_blocks=5)
    with running(World(shape), max_host_bytes=5 * 3 * 48) as worker:
        assert worker.host_bytes == 5 * 3 * 48
        assert (worker.num_cpu_blocks, worker.blocks_per_chunk) == (5, 3)
