"""GPU blocks as rows of bytes in host memory, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvview.transfer import CanonicalKVCaches

_CHUNK_BYTES = 64 << 20  # of GPU memory that a job may need besides its pages


class GPUPages:
    """Reads and writes the pages of one worker, those of all tensors of a group side by side.

    Args:
        kv_caches: Of the worker.
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

    def read(self, group: int, block_ids: Sequence[int], rows: bytearray) -> None:
        """Copy blocks to host memory.

        Args:
            group: KV-cache group.
            block_ids: Blocks of that group.
            rows: One row of ``page_bytes[group]`` for each block.
        """
        self._move(group, block_ids, rows, to_host=True)

    def write(self, group: int, block_ids: Sequence[int], rows: bytearray) -> None:
        """Copy rows of host memory to blocks, as :meth:`read` does the other way round."""
        self._move(group, block_ids, rows, to_host=False)

    def _move(self, group: int, blocks: Sequence[int], rows: bytearray, *, to_host: bool) -> None:
        if not blocks:
            return
        host = torch.frombuffer(rows, dtype=torch.int8).view(len(blocks), -1)
        step = max(1, _CHUNK_BYTES // self.page_bytes[group])
        with torch.cuda.stream(self._stream):  # None changes nothing
            for start in range(0, len(blocks), step):
                ids = torch.tensor(blocks[start : start + step], device=self._device)
                self._move_chunk(self._parts[group], ids, host[start : start + step], to_host)
        if self._stream is not None:
            self._stream.synchronize()

    def _move_chunk(
        self, parts: Sequence[torch.Tensor], ids: torch.Tensor, host: Any, to_host: bool
    ) -> None:
        first = 0
        for part in parts:
            columns = host[:, first : first + part.shape[1]]
            if to_host:
                columns.copy_(part.index_select(0, ids))
            else:
                part.index_copy_(0, ids, columns.to(self._device))
            first += part.shape[1]
