"""GPU blocks as rows of bytes in host memory, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from kvview.transfer import CanonicalKVCaches, GPULoadStoreSpec

_STAGED_BYTES = 16 << 20  # of pinned memory, and of GPU memory that a job needs besides its pages


class GPURows:
    """Reads and writes the pages of one worker, those of all tensors of a group side by side.

    Args:
        kv_caches: KV caches of the worker.
    """

    def __init__(self, kv_caches: CanonicalKVCaches[torch.Tensor]) -> None:
        tensors = [cache.tensor for cache in kv_caches.tensors]
        self._num_blocks = min((tensor.shape[0] for tensor in tensors), default=0)
        self._groups: list[_Blocks] = []
        for refs in kv_caches.group_data_refs:
            parts = [tensors[ref.tensor_idx][:, : ref.page_size_bytes] for ref in refs]
            is_cuda = any(part.is_cuda for part in parts)
            self._groups.append(_CUDABlocks(parts) if is_cuda else _HostBlocks(parts))
        self.page_bytes = [group.page_bytes for group in self._groups]

    def read(self, gpu: GPULoadStoreSpec) -> Iterator[memoryview]:
        """Yield the bytes of each block of a job; they are valid until the next is taken."""
        for group, blocks in self._by_group(gpu):
            yield from group.read(blocks)

    def write(self, gpu: GPULoadStoreSpec, rows: Iterator[memoryview]) -> None:
        """Write the bytes of each block of a job; each row is used before the next is taken."""
        for group, blocks in self._by_group(gpu):
            group.write(blocks, rows)

    def _by_group(self, gpu: GPULoadStoreSpec) -> Iterator[tuple[_Blocks, Sequence[int]]]:
        if any(not 0 <= block < self._num_blocks for block in gpu.block_ids):
            raise IndexError(f"a job names a block that is not one of {self._num_blocks}")
        ends = accumulate(gpu.group_sizes, initial=0)
        for group, (first, end) in zip(self._groups, pairwise(ends), strict=True):
            yield group, gpu.block_ids[first:end]


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

    def write(self, blocks: Sequence[int], rows: Iterator[memoryview]) -> None:
        for block, row in zip(blocks, rows):  # noqa: B905  # the next group takes the next rows
            if len(row) != self.page_bytes:
                raise ValueError(f"a page has {len(row)} bytes, expected {self.page_bytes}")
            first = 0
            for piece in self._pieces(block):
                piece[:] = row[first : first + len(piece)]
                first += len(piece)

    def _pieces(self, block: int) -> list[memoryview]:
        # The address is read for each copy, so that a tensor that is watched sees each copy.
        return [
            memoryview(array.from_address(part.data_ptr() + block * stride)).cast("B")
            for part, stride, array in self._parts
        ]


class _CUDABlocks:
    """Blocks in GPU memory, which are staged in pinned memory, a few at a time.

    Args:
        parts: Bytes of the blocks in each tensor.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = parts
        self._sizes = [part.shape[1] for part in parts]
        self.page_bytes = sum(self._sizes)
        self._device = parts[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._num_staged = max(1, _STAGED_BYTES // self.page_bytes)
        self._host = torch.empty(
            (self._num_staged, self.page_bytes), dtype=torch.int8, pin_memory=True
        )
        self._rows = _HostBlocks([self._host])

    def read(self, blocks: Sequence[int]) -> Iterator[memoryview]:
        for ids, host in self._chunks(blocks):
            with torch.cuda.stream(self._stream):
                rows = torch.cat([part.index_select(0, ids) for part in self._parts], dim=1)
                host.copy_(rows, non_blocking=True)
            self._stream.synchronize()
            yield from self._rows.read(range(len(host)))

    def write(self, blocks: Sequence[int], rows: Iterator[memoryview]) -> None:
        for ids, host in self._chunks(blocks):
            self._rows.write(range(len(host)), rows)
            with torch.cuda.stream(self._stream):
                on_gpu = host.to(self._device, non_blocking=True)
                columns = torch.split(on_gpu, self._sizes, dim=1)
                for part, column in zip(self._parts, columns, strict=True):
                    part.index_copy_(0, ids, column)
            self._stream.synchronize()

    def _chunks(self, blocks: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the ids of a few blocks, on the GPU, and the pinned memory for their rows."""
        for start in range(0, len(blocks), self._num_staged):
            chunk = blocks[start : start + self._num_staged]
            with torch.cuda.stream(self._stream):
                ids = torch.tensor(chunk, device=self._device)
            yield ids, self._host[: len(chunk)]


_Blocks = _HostBlocks | _CUDABlocks
