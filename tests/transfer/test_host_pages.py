"""Host pages, and blocks that pass through them, of several groups and tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from kvview import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    TransferSpecError,
)
from kvview_reference.transfer import host_pages
from kvview_reference.transfer.host_pages import HostPages

NUM_BLOCKS = 20
JOB = GPULoadStoreSpec([3, 7, 1, 19, 0, 5], [4, 2], [0, 0])
SIZES = [96] * 4 + [32] * 2
IN_HOST = CPULoadStoreSpec([5, 0, 3, 1, 4, 2])


@pytest.fixture(params=["cpu", "cuda"])
def tensors(request: pytest.FixtureRequest) -> list[torch.Tensor]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    wide = torch.randint(-128, 127, (NUM_BLOCKS, 100), dtype=torch.int8, device=request.param)
    narrow = torch.randint(-128, 127, (NUM_BLOCKS, 32), dtype=torch.int8, device=request.param)
    return [wide[:, :64], narrow]  # the first one has gaps between its pages


@pytest.fixture(params=[0, 6], ids=["no host pages", "6 host pages"])
def host(
    request: pytest.FixtureRequest, tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> Iterator[HostPages]:
    """Of a group with pages in two tensors, and one with pages in the second alone."""
    monkeypatch.setattr(host_pages, "_STAGING_BYTES", 400)  # two pages of 96 bytes in each half
    first, second = CanonicalKVCacheRef(0, 64), CanonicalKVCacheRef(1, 32)
    caches = [CanonicalKVCacheTensor(one, one.shape[1]) for one in tensors]
    made = HostPages(CanonicalKVCaches(caches, [[first, second], [second]]), request.param)
    yield made
    assert not made._worker._in_flight
    made.close()


def blocks(tensors: list[torch.Tensor]) -> list[bytes]:
    """The bytes of the blocks of the job."""
    host = [tensor.cpu() for tensor in tensors]
    both = [[tensor[block] for tensor in host] for block in JOB.block_ids[:4]]
    alone = [[host[1][block]] for block in JOB.block_ids[4:]]
    return [bytes(torch.cat(parts).view(torch.uint8).tolist()) for parts in both + alone]


def new_blocks() -> Iterator[memoryview]:
    for number, size in enumerate(SIZES):
        yield memoryview(bytes([number + 1]) * size)


def test_blocks_are_read_from_all_tensors_of_a_group(
    host: HostPages, tensors: list[torch.Tensor]
) -> None:
    assert host.page_bytes == [96, 32]
    assert host.sizes(JOB) == SIZES
    assert list(map(bytes, host.read(JOB))) == blocks(tensors)


@pytest.mark.parametrize("host", [6], indirect=True)
def test_blocks_are_copied_to_host_pages_that_no_other_job_changes(
    host: HostPages, tensors: list[torch.Tensor]
) -> None:
    before = blocks(tensors)
    assert host.copy((JOB, IN_HOST)).success
    host.write(JOB, new_blocks())
    assert blocks(tensors) == list(map(bytes, host.read(JOB)))
    assert list(map(bytes, map(host.page, IN_HOST.block_ids, SIZES))) == before
    assert host.copy((IN_HOST, JOB)).success
    assert blocks(tensors) == before


def test_the_blocks_of_the_job_alone_are_written(
    host: HostPages, tensors: list[torch.Tensor]
) -> None:
    before = [tensor.clone() for tensor in tensors]
    host.write(JOB, new_blocks())
    assert blocks(tensors) == list(map(bytes, new_blocks()))
    others = [block for block in range(NUM_BLOCKS) if block not in JOB.block_ids]
    assert all(torch.equal(a[others], b[others]) for a, b in zip(tensors, before, strict=True))


def test_wrong_jobs_raise(host: HostPages) -> None:
    with pytest.raises(TransferSpecError, match="20"):
        list(host.read(GPULoadStoreSpec([1, 2, 3, 4, 20], [5, 0], [0, 0])))
    with pytest.raises(ValueError, match="a page has 3 bytes, expected 96"):
        host.write(GPULoadStoreSpec([1], [1, 0], [0, 0]), iter([memoryview(b"abc")]))


def delay(host: HostPages, direction: int) -> torch.cuda.Stream | None:
    """Delay all later copies in one direction; return their stream, if there is a GPU."""
    if host._device is None:
        return None
    stream: torch.cuda.Stream = host._worker._copier._streams[direction]  # type: ignore[attr-defined]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    return stream


@pytest.mark.parametrize("num_written", [0, 2, 3])
def test_no_copy_runs_after_a_write_that_raised(host: HostPages, num_written: int) -> None:
    stream = delay(host, 1)

    def failing() -> Iterator[memoryview]:
        yield from [memoryview(bytes(96))] * num_written
        raise OSError("the store failed")

    with pytest.raises(OSError, match="the store failed"):
        host.write(JOB, failing())
    if stream is not None and num_written:
        assert stream.query()


def test_no_copy_runs_after_a_reader_stopped(host: HostPages) -> None:
    stream = delay(host, 0)
    reading = host.read(JOB)
    next(reading)
    reading.close()  # type: ignore[attr-defined]
    assert stream is None or stream.query()
