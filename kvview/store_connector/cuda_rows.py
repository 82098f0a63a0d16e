"""GPU blocks in CUDA memory as rows of bytes in pinned host memory, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof
from itertools import islice
from typing import Any

import numpy as np
import torch

from kvview.store_connector.cuda_copies import CUDADriver, Ids

_SLAB_BYTES = 16 << 20  # of pinned memory


class CUDABlocks:
    """Blocks of one group in CUDA memory, copied directly from and to rows of pinned memory.

    A caller may keep a row as long as needed, so pages stay in pinned memory without another copy.
    Rows in other memory are copied to pinned rows first.

    Args:
        parts: Bytes of the blocks in each tensor.
        driver: The driver of the blocks' device.
    """

    def __init__(self, parts: Sequence[torch.Tensor], driver: CUDADriver) -> None:
        self._parts = parts
        self._sizes = np.array([part.shape[1] for part in parts])
        self._columns = np.cumsum(self._sizes) - self._sizes
        self._strides = np.array([part.stride(0) for part in parts])
        self.page_bytes = int(self._sizes.sum())
        self._driver = driver
        self._stream = driver.stream()
        self._pinned = _PinnedRows(self.page_bytes)

    def read(self, blocks: Sequence[int]) -> Iterator[memoryview]:
        """Yield the row of each block, while the GPU copies the rows of the next chunk."""
        before: list[Any] = []
        event: Any = None
        with self._no_copy_afterwards() as kept:
            for chunk in self._chunks(blocks):
                rows = [self._pinned.take() for _ in chunk]
                in_rows, in_blocks, sizes = self._copies(chunk, rows)
                kept.append((rows, self._driver.copy(self._stream, in_rows, in_blocks, sizes)))
                copied = self._driver.record(self._stream)
                yield from _views(before, event)
                before, event = rows, copied
                del kept[:-2]
            yield from _views(before, event)

    views = read  # no part of GPU memory is a view

    def write(self, blocks: Sequence[int], rows: Iterator[memoryview]) -> None:
        """Write as many rows as there are blocks."""
        with self._no_copy_afterwards() as kept:
            for chunk in self._chunks(blocks):
                pinned = [self._pinned.holding(row) for row in islice(rows, len(chunk))]
                in_rows, in_blocks, sizes = self._copies(chunk, pinned)
                kept.append((pinned, self._driver.copy(self._stream, in_blocks, in_rows, sizes)))

    @contextmanager
    def _no_copy_afterwards(self) -> Iterator[list[object]]:
        """Yield a list whose objects are kept until all copies have ended, also after an error."""
        kept: list[object] = []
        try:
            yield kept
        finally:
            self._stream.synchronize()

    def _chunks(self, blocks: Sequence[int]) -> Iterator[Sequence[int]]:
        size = max(1, _SLAB_BYTES // self.page_bytes)
        return (blocks[first : first + size] for first in range(0, len(blocks), size))

    def _copies(self, blocks: Sequence[int], rows: Sequence[Any]) -> tuple[Ids, Ids, Ids]:
        """Return the addresses in rows and in blocks, and the sizes, of each copy."""
        # The addresses are read for each copy, so that a watched tensor observes each copy.
        starts = np.array([part.data_ptr() for part in self._parts])
        in_rows = np.array([addressof(row) for row in rows])[:, None] + self._columns
        in_blocks = np.array(blocks)[:, None] * self._strides + starts
        return in_rows.ravel(), in_blocks.ravel(), np.tile(self._sizes, len(blocks))


def _views(rows: list[Any], event: Any) -> Iterator[memoryview]:
    """Wait for the event after the copies into some rows, and yield views of these rows."""
    if rows:
        event.synchronize()
    for row in rows:
        yield memoryview(row).cast("B").toreadonly()


class _PinnedRows:
    """Rows of pinned memory; the memory of a row is reused once no view refers to the row.

    Args:
        row_bytes: Bytes of a row.
    """

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._free: list[int] = []  # addresses
        self._slabs: list[torch.Tensor] = []

        class Row(ctypes.Array[ctypes.c_ubyte]):
            _type_ = ctypes.c_ubyte
            _length_ = row_bytes
            slabs = self._slabs  # a row may live longer than this object
            give_back = self._free.append

            def __del__(self) -> None:
                self.give_back(addressof(self))

        self._row_type = Row

    def take(self) -> Any:
        """Return a row with arbitrary bytes."""
        if not self._free:
            size = max(1, _SLAB_BYTES // self._row_bytes) * self._row_bytes
            self._slabs.append(torch.empty(size, dtype=torch.int8, pin_memory=True))
            first = self._slabs[-1].data_ptr()
            self._free.extend(range(first, first + size, self._row_bytes))
        return self._row_type.from_address(self._free.pop())

    def holding(self, data: memoryview) -> Any:
        """Return the row that a view belongs to, or a row with a copy of its bytes."""
        if len(data) != self._row_bytes:
            raise ValueError(f"a page has {len(data)} bytes, expected {self._row_bytes}")
        if isinstance(data.obj, self._row_type):
            return data.obj
        row = self.take()
        memoryview(row).cast("B")[:] = data
        return row
