"""Pages of several groups and tensors, as rows of bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kvview_reference.store_connector.gpu_rows import GPURows

from kvview import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from kvview_reference.store_connector import cuda_rows

NUM_BLOCKS = 20
JOB = GPULoadStoreSpec([3, 7, 1, 19, 0, 5], [4, 2], [0, 0])


@pytest.fixture(params=["cpu", "cuda"])
def tensors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setattr(cuda_rows, "_SLAB_BYTES", 300)  # of pages of 96 bytes
    wide = torch.randint(-128, 127, (NUM_BLOCKS, 100), dtype=torch.int8, device=request.param)
    narrow = torch.randint(-128, 127, (NUM_BLOCKS, 32), dtype=torch.int8, device=request.param)
    return [wide[:, :64], narrow]  # the first one has gaps between its pages


@pytest.fixture
def rows(tensors: list[torch.Tensor]) -> GPURows:
    """Of a group with pages in two tensors, and one with pages in the second alone."""
    first, second = CanonicalKVCacheRef(0, 64), CanonicalKVCacheRef(1, 32)
    caches = [CanonicalKVCacheTensor(one, one.shape[1]) for one in tensors]
    return GPURows(CanonicalKVCaches(caches, [[first, second], [second]]))


def pages(tensors: list[torch.Tensor]) -> list[bytes]:
    host = [tensor.cpu() for tensor in tensors]
    both = [[tensor[block] for tensor in host] for block in JOB.block_ids[:4]]
    alone = [[host[1][block]] for block in JOB.block_ids[4:]]
    return [bytes(torch.cat(parts).view(torch.uint8).tolist()) for parts in both + alone]


def test_rows_are_the_pages_of_all_tensors_of_a_group(
    rows: GPURows, tensors: list[torch.Tensor]
) -> None:
    assert rows.page_bytes == [96, 32]
    assert list(map(bytes, rows.read(JOB))) == pages(tensors)


def test_rows_are_written_to_the_blocks_of_the_job_alone(
    rows: GPURows, tensors: list[torch.Tensor]
) -> None:
    before = [tensor.clone() for tensor in tensors]
    new = [bytes([number + 1]) * (96 if number < 4 else 32) for number in range(6)]
    rows.write(JOB, map(memoryview, new))
    assert pages(tensors) == new
    others = [block for block in range(NUM_BLOCKS) if block not in JOB.block_ids]
    assert all(torch.equal(a[others], b[others]) for a, b in zip(tensors, before, strict=True))


def test_read_only_rows_may_be_kept(rows: GPURows, tensors: list[torch.Tensor]) -> None:
    kept = [row for row in rows.read(JOB) if row.readonly]
    expected = list(map(bytes, kept))
    for tensor in tensors:
        tensor.zero_()
    list(rows.read(JOB))
    assert list(map(bytes, kept)) == expected


def test_wrong_jobs_raise(rows: GPURows) -> None:
    with pytest.raises(IndexError, match="outside the 20 blocks"):
        list(rows.read(GPULoadStoreSpec([20], [1, 0], [0, 0])))
    with pytest.raises(ValueError, match="a page has 3 bytes, expected 96"):
        rows.write(GPULoadStoreSpec([1], [1, 0], [0, 0]), iter([memoryview(b"abc")]))


def test_memory_of_rows_is_used_again(rows: GPURows) -> None:
    if rows.mark_compute() is None:
        pytest.skip("rows in host memory are not pinned")
    pinned = rows._groups[0]._pinned  # type: ignore[attr-defined]
    list(rows.read(JOB))
    num_slabs = len(pinned._slabs)
    for _ in range(3):
        list(rows.read(JOB))
    assert len(pinned._slabs) == num_slabs


def delayed(rows: GPURows) -> torch.cuda.Stream:
    """Delay all later copies of the first group; return their stream."""
    if rows.mark_compute() is None:
        pytest.skip("copies in host memory are not delayed")
    stream: torch.cuda.Stream = rows._groups[0]._stream  # type: ignore[attr-defined]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    return stream


def test_no_copy_runs_after_a_write_that_raised(rows: GPURows) -> None:
    stream = delayed(rows)

    def failing() -> Iterator[memoryview]:
        yield from [memoryview(bytes(96))] * 3  # a whole chunk
        raise OSError("the store failed")

    with pytest.raises(OSError, match="the store failed"):
        rows.write(JOB, failing())
    assert stream.query()


def test_no_copy_runs_after_a_reader_stopped(rows: GPURows) -> None:
    reading = rows.read(JOB)
    next(reading)
    stream = delayed(rows)
    reading.close()  # type: ignore[attr-defined]
    assert stream.query()
