"""Copies between pages in CPU memory, many to a call, without the interpreter lock.

A call a page costs 0.3 us, and on several threads a fight for the lock besides. Shares of
one ``copy_`` of the same bytes, CPU time of one core (benchmarks/transfer.py has both):

    page        memmove a page   process_vm_readv   take, then set, in pieces
    1 KiB                 0.08               0.08                        0.19
    16 KiB                0.41               0.37                        0.35
    64 KiB                0.68               0.64                        0.42
    1 MiB                 0.83               0.85                        0.71

So small pages are gathered by numpy, and others copied by the kernel where it does that
for a process that reads itself (Linux), else by ``memmove``. Not by torch: its copies share
a pool that spins at barriers, which costs milliseconds a page as soon as another process
wants one of the cores.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvview_reference.transfer.pages import Ids, Pages

SMALL_COPY_BYTES = 8 << 10
"""Pages below are gathered."""

FEW_COPIES = 32
"""So many are made one by one: that is less work than to prepare anything."""

_PIECE_BYTES = 512 << 10  # half of a core's second-level cache
_MAX_VECTORS = 1024  # IOV_MAX of Linux
_MAX_CALL_BYTES = 1 << 30  # Linux copies 2 GiB less a page at once, and says no error

CopyAll = Callable[[Ids, Ids, Ids], None]
"""Copies between addresses: destinations, sources, sizes in bytes."""


def copy_pages(dst: Pages, src: Pages, dst_ids: Ids, src_ids: Ids) -> None:
    """``dst[dst_ids] = src[src_ids]``, through a buffer that stays in the cache."""
    size = max(1, _PIECE_BYTES // dst.itemsize)
    buffer = np.empty(min(size, len(dst_ids)), dst.dtype)
    for at in range(0, len(dst_ids), size):
        piece = buffer[: len(dst_ids) - at]
        # "clip" takes no copy of the buffer; the ids were checked with the job.
        np.take(src, src_ids[at : at + size], out=piece, mode="clip")
        dst[dst_ids[at : at + size]] = piece


def memmove_each(dst: Iterable[int], src: Iterable[int], sizes: Iterable[int]) -> None:
    """One call a copy."""
    for _ in map(ctypes.memmove, dst, src, sizes):
        pass


def memmove_all(dst: Ids, src: Ids, sizes: Ids) -> None:
    """The same, of arrays."""
    memmove_each(dst.tolist(), src.tolist(), sizes.tolist())


def _reads_of_the_kernel() -> CopyAll | None:
    """Copies by ``process_vm_readv``, or None where a process may not read itself so."""
    try:
        read: Any = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError, TypeError):
        return None
    number, pointer = ctypes.c_ulong, ctypes.c_void_p
    read.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
    read.restype = ctypes.c_ssize_t

    def read_all(dst: Ids, src: Ids, sizes: Ids) -> None:
        local, remote = np.stack((dst, sizes), axis=1), np.stack((src, sizes), axis=1)
        vectors = min(_MAX_VECTORS, _MAX_CALL_BYTES // max(1, int(sizes.max(initial=1)))) or 1
        for at in range(0, len(sizes), vectors):
            count = len(sizes[at : at + vectors])
            sides = [side[at:].ctypes.data for side in (local, remote)]
            num_read = read(os.getpid(), sides[0], count, sides[1], count, 0)
            if num_read != sizes[at : at + count].sum():
                raise OSError(ctypes.get_errno(), f"process_vm_readv copied {num_read} bytes")

    probe = np.array([1, 0], np.int64)
    address = np.array([probe.ctypes.data])
    try:
        read_all(address + 8, address, np.array([8]))
    except OSError:
        return None
    return read_all if probe[1] == 1 else None


copy_all: CopyAll = _reads_of_the_kernel() or memmove_all
"""The faster of the two here; decided once."""
