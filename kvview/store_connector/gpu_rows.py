"""GPU blocks as rows of bytes in host memory, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvview.transfer import CanonicalKVCaches, GPULoadStoreSpec

_CHUNK_BYTES = 64 << 20  # of GPU memory that a job may need besides its pages


class GPURows:
    """Reads and writes the pages of one worker, those of all tensors of a group side by side.

    Args:
        kv_caches: KV caches of the worker.
    """

    def __init__(self, kv_caches: CanonicalKVCaches[torch.Tensor]) -> None:
        tensors = [cache.tensor for cache in kv_caches.tensors]
        self._parts = [
            [tensors[ref.tensor_idx][:, : ref.page_size_bytes] for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self.page_bytes = [sum(part.shape[1] for part in parts) for parts in self._parts]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._stream: Any = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def allocate(self, gpu: GPULoadStoreSpec) -> tuple[list[bytearray], list[memoryview]]:
        """Return memory for a job: an array for each group, and in it a row for each block."""
        sizes = list(zip(gpu.group_sizes, self.page_bytes, strict=True))
        arrays = [bytearray(number * page_bytes) for number, page_bytes in sizes]
        rows = [
            memoryview(array)[start : start + page_bytes]
            for array, (_, page_bytes) in zip(arrays, sizes, strict=True)
            for start in range(0, len(array), page_bytes)
        ]
        return arrays, rows

    def read(self, gpu: GPULoadStoreSpec, arrays: Sequence[bytearray]) -> None:
        """Copy the blocks of a job to host memory."""
        self._move(gpu, arrays, to_host=True)

    def write(self, gpu: GPULoadStoreSpec, arrays: Sequence[bytearray]) -> None:
        """Copy host memory to the blocks of a job."""
        self._move(gpu, arrays, to_host=False)

    def _move(self, gpu: GPULoadStoreSpec, arrays: Sequence[bytearray], *, to_host: bool) -> None:
        first = 0
        with torch.cuda.stream(self._stream):  # None changes nothing
            for group, (number, array) in enumerate(zip(gpu.group_sizes, arrays, strict=True)):
                blocks = gpu.block_ids[first : first + number]
                first += number
                if not blocks:
                    continue
                host = torch.frombuffer(array, dtype=torch.int8).view(number, -1)
                step = max(1, _CHUNK_BYTES // self.page_bytes[group])
                for start in range(0, number, step):
                    ids = torch.tensor(blocks[start : start + step], device=self._device)
                    _move_chunk(self._parts[group], ids, host[start : start + step], to_host)
        if self._stream is not None:
            self._stream.synchronize()


def _move_chunk(
    parts: Sequence[torch.Tensor], ids: torch.Tensor, host: torch.Tensor, to_host: bool
) -> None:
    columns = torch.split(host, [part.shape[1] for part in parts], dim=1)
    for part, column in zip(parts, columns, strict=True):
        if to_host:
            column.copy_(part.index_select(0, ids))
        else:
            part.index_copy_(0, ids, column.to(part.device))
