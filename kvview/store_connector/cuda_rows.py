"""GPU blocks in CUDA memory as rows of bytes in pinned host memory, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch

_SLAB_BYTES = 16 << 20  # of pinned memory; a job needs up to twice as much GPU memory


class CUDABlocks:
    """Blocks of one group in CUDA memory, copied directly from and to rows of pinned memory.

    A caller may keep a row as long as needed, so pages stay in pinned memory without another copy.
    Rows in other memory are copied to pinned rows first.

    Args:
        parts: Bytes of the blocks in each tensor.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = parts
        self._sizes = [part.shape[1] for part in parts]
        self.page_bytes = sum(self._sizes)
        self._device = parts[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pinned = _PinnedRows(self.page_bytes)

    def read(self, blocks: Sequence[int]) -> Iterator[memoryview]:
        """Yield the row of each block, while the GPU copies the rows of the next chunk."""
        started: tuple[list[Any], Any] | None = None
        for at in self._chunks(blocks):
            before, started = started, self._start_read(at)
            yield from self._rows_of(before)
        yield from self._rows_of(started)

    views = read  # no part of GPU memory is a view

    def write(self, blocks: Sequence[int], rows: Iterator[memoryview]) -> None:
        """Write as many rows as there are blocks."""
        kept = []  # until the last copy has ended
        for at in self._chunks(blocks):
            pinned = [self._pinned.holding(row) for row in islice(rows, len(at))]
            kept.append(pinned)
            with self._copying():
                size = (len(at), self.page_bytes)
                on_gpu = torch.empty(size, dtype=torch.int8, device=self._device)
                for page, row in zip(on_gpu, pinned, strict=True):
                    page.copy_(row.tensor, non_blocking=True)
                columns = torch.split(on_gpu, self._sizes, dim=1)
                for part, column in zip(self._parts, columns, strict=True):
                    part.index_copy_(0, at, column)
        self._stream.synchronize()

    def _chunks(self, blocks: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield the ids of a few blocks, on the GPU."""
        if len(blocks):
            with self._copying():  # once, because this copy waits for the copies before it
                ids = torch.tensor(blocks, device=self._device)
            yield from torch.split(ids, max(1, _SLAB_BYTES // self.page_bytes))

    def _start_read(self, at: torch.Tensor) -> tuple[list[Any], Any]:
        rows = [self._pinned.take() for _ in range(len(at))]
        with self._copying():
            on_gpu = torch.cat([part.index_select(0, at) for part in self._parts], dim=1)
            for row, page in zip(rows, on_gpu, strict=True):
                row.tensor.copy_(page, non_blocking=True)
        return rows, self._stream.record_event()

    def _rows_of(self, started: tuple[list[Any], Any] | None) -> Iterator[memoryview]:
        if started is not None:
            rows, event = started
            event.synchronize()
            for row in rows:
                yield memoryview(row).cast("B").toreadonly()

    @contextmanager
    def _copying(self) -> Iterator[None]:
        # Engines allocate KV caches in inference mode, and other threads may not write them.
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            yield


class _PinnedRows:
    """Rows of pinned memory; the memory of a row is reused once no view refers to the row.

    Args:
        row_bytes: Bytes of a row.
    """

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._free: list[torch.Tensor] = []

        class Row(ctypes.Array[ctypes.c_ubyte]):
            _type_ = ctypes.c_ubyte
            _length_ = row_bytes
            tensor: torch.Tensor
            give_back = self._free.append

            def __del__(self) -> None:
                self.give_back(self.tensor)

        self._row_type = Row

    def take(self) -> Any:
        """Return a row with arbitrary bytes, whose memory is its ``tensor``."""
        if not self._free:
            num_rows = max(1, _SLAB_BYTES // self._row_bytes)
            slab = torch.empty(num_rows * self._row_bytes, dtype=torch.int8, pin_memory=True)
            self._free.extend(slab.view(num_rows, -1))
        tensor = self._free.pop()
        row = self._row_type.from_address(tensor.data_ptr())
        row.tensor = tensor
        return row

    def holding(self, data: memoryview) -> Any:
        """Return the row that a view belongs to, or a row with a copy of its bytes."""
        if len(data) != self._row_bytes:
            raise ValueError(f"a page has {len(data)} bytes, expected {self._row_bytes}")
        if isinstance(data.obj, self._row_type):
            return data.obj
        row = self.take()
        memoryview(row).cast("B")[:] = data
        return row
