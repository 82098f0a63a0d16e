"""GPU blocks as rows of bytes in host memory, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

from kvview.transfer import CanonicalKVCaches, ComputeEvent, GPULoadStoreSpec

if TYPE_CHECKING:
    import torch

    from kvview.store_connector.cuda_copies import CUDADriver


class GPURows:
    """Reads and writes the blocks of one worker; the pages of a block in all tensors form one row.

    1. Reads and writes do not wait for the model, so call them after the event of
       :meth:`mark_compute` has ended.

    Args:
        kv_caches: KV caches of the worker.
    """

    def __init__(self, kv_caches: CanonicalKVCaches[torch.Tensor]) -> None:
        tensors = [cache.tensor for cache in kv_caches.tensors]
        self._compute_stream = kv_caches.compute_stream
        on_gpu = (tensor.device for tensor in tensors if tensor.is_cuda)
        self._driver: CUDADriver | None = None
        self.num_blocks = min((tensor.shape[0] for tensor in tensors), default=0)
        blocks: Callable[[list[torch.Tensor]], _Blocks] = _HostBlocks
        if (device := next(on_gpu, None)) is not None:  # all tensors of a worker are on one device
            from kvview.store_connector.cuda_copies import CUDADriver  # needs torch and numpy
            from kvview.store_connector.cuda_rows import CUDABlocks

            self._driver = CUDADriver(device)
            blocks = partial(CUDABlocks, driver=self._driver)
        self._groups: list[_Blocks] = []
        for refs in kv_caches.group_data_refs:
            parts = [tensors[ref.tensor_idx][:, : ref.page_size_bytes] for ref in refs]
            self._groups.append(blocks(parts))
        self.page_bytes = [group.page_bytes for group in self._groups]

    def mark_compute(self) -> ComputeEvent | None:
        """Record an event after all work of the model so far; None if no work can be in flight."""
        if self._compute_stream is not None:
            return self._compute_stream.record_event()
        event: ComputeEvent | None = None
        if self._driver is not None:
            event = self._driver.compute_stream().record_event()
        return event

    def read(self, gpu: GPULoadStoreSpec) -> Iterator[memoryview]:
        """Yield the bytes of each block of a job.

        The caller may keep a read-only row. A writable row is the memory of the block itself, so it
        is valid until the block changes.
        """
        for group, blocks in self._by_group(gpu):
            yield from group.read(blocks)

    def views(self, gpu: GPULoadStoreSpec) -> Iterator[memoryview]:
        """Yield the bytes of each block of a job, in parts that are not copied in host memory.

        A part that is not read-only is the memory of the block, as in :meth:`read`.
        """
        for group, blocks in self._by_group(gpu):
            yield from group.views(blocks)

    def write(self, gpu: GPULoadStoreSpec, rows: Iterator[memoryview]) -> None:
        """Write the bytes of each block of a job; each row is used before the next is taken."""
        for group, blocks in self._by_group(gpu):
            group.write(blocks, rows)

    def sizes(self, gpu: GPULoadStoreSpec) -> list[int]:
        """Return the bytes of each row of a job."""
        groups = zip(self.page_bytes, gpu.group_sizes, strict=True)
        return [page_bytes for page_bytes, size in groups for _ in range(size)]

    def _by_group(self, gpu: GPULoadStoreSpec) -> Iterator[tuple[_Blocks, Sequence[int]]]:
        if any(not 0 <= block < self.num_blocks for block in gpu.block_ids):
            raise IndexError(
                f"a job names a block outside the {self.num_blocks} blocks of the KV cache"
            )
        ends = accumulate(gpu.group_sizes, initial=0)
        for group, (first, end) in zip(self._groups, pairwise(ends), strict=True):
            yield group, gpu.block_ids[first:end]


class _Blocks(Protocol):
    """Blocks of one group, in any memory."""

    page_bytes: int

    def read(self, blocks: Sequence[int]) -> Iterator[memoryview]:
        """Yield the bytes of each block."""

    def views(self, blocks: Sequence[int]) -> Iterator[memoryview]:
        """Yield the bytes of each block in parts without a copy in host memory."""

    def write(self, blocks: Sequence[int], rows: Iterator[memoryview]) -> None:
        """Write as many rows as there are blocks."""


class _HostBlocks:
    """Blocks in host memory.

    Args:
        parts: Bytes of the blocks in each tensor.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        sizes = [part.shape[1] for part in parts]
        arrays = [ctypes.c_ubyte * size for size in sizes]
        strides = [part.stride(0) for part in parts]
        self._parts = list(zip(parts, strides, arrays, strict=True))
        self.page_bytes = sum(sizes)

    def read(self, blocks: Sequence[int]) -> Iterator[memoryview]:
        for block in blocks:
            pieces = self._pieces(block)
            yield pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def views(self, blocks: Sequence[int]) -> Iterator[memoryview]:
        for block in blocks:
            yield from self._pieces(block)

    def write(self, blocks: Sequence[int], rows: Iterator[memoryview]) -> None:
        for block, row in zip(blocks, rows):  # noqa: B905  # the next group takes the next rows
            if len(row) != self.page_bytes:
                raise ValueError(f"a page has {len(row)} bytes, expected {self.page_bytes}")
            first = 0
            for piece in self._pieces(block):
                piece[:] = row[first : first + len(piece)]
                first += len(piece)

    def _pieces(self, block: int) -> list[memoryview]:
        # The address is read for each copy, so that a watched tensor observes each copy.
        return [
            memoryview(array.from_address(part.data_ptr() + block * stride)).cast("B")
            for part, stride, array in self._parts
        ]
