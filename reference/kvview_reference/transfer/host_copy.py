"""Copies between pages in CPU memory, many pages per call, without the interpreter lock.

The table has speeds as fractions of the speed of one ``copy_`` of the same bytes (CPU time of one
thread, scattered pages, KV-cache tensors in memory pages of 4 KiB as torch allocates them). Each
pair of numbers is for stores and loads.

    page     memmove a page   kernel, host pinned   tensor pinned   take, then set   index_copy_
    1 KiB      0.11   0.08         0.13   0.12       0.10   0.09     0.29   0.22      0.05   0.05
    16 KiB     0.66   0.59         0.53   0.53       0.33   0.33     0.58   0.58      0.06   0.07
    64 KiB     0.83   0.85         0.68   0.67       0.39   0.35     0.64   0.57      0.06   0.06
    1 MiB      0.98   0.97         0.76   0.76       0.48   0.43     0.70   0.67      0.06   0.07

So numpy gathers and sets small pages, through a buffer that stays in the CPU's cache. Larger pages
are copied with one call per page while no other thread needs the interpreter lock. A thread that
computes in Python releases the lock only every 5 ms, and each page would wait for this. In this
case the kernel copies many pages per call, if it lets a process access its own memory in this way
(Linux). The kernel pins the memory of one side. This side is always the host tier, because the tier
is in huge pages, of which fewer must be pinned.

Torch is not used, because its copies share a pool of threads that spin at barriers. This costs
milliseconds per page as soon as another process needs one of the cores.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvview_reference.transfer.pages import Ids, Pages

SMALL_COPY_BYTES = 8 << 10
"""Pages below this size are gathered."""

FEW_COPIES = 32
"""Up to this number, copies are made one by one, which is less work than preparing arrays."""

_PIECE_BYTES = 512 << 10  # half of a core's second-level cache
_MAX_VECTORS = 1024  # IOV_MAX of Linux
_MAX_CALL_BYTES = 1 << 30  # Linux copies 2 GiB less one page per call, and reports no error
_COPIES_BETWEEN_LOOKS = 16
_LONG_WAIT_S = 0.002  # one wait for the lock is 5 ms


def copy_pages(dst: Pages, src: Pages, dst_ids: Ids, src_ids: Ids) -> None:
    """Assign ``dst[dst_ids] = src[src_ids]``, through a buffer that stays in the CPU's cache."""
    size = max(1, _PIECE_BYTES // dst.itemsize)
    buffer = np.empty(min(size, len(dst_ids)), dst.dtype)
    for at in range(0, len(dst_ids), size):
        piece = buffer[: len(dst_ids) - at]
        # "clip" takes no copy of the buffer; the ids were checked with the job.
        np.take(src, src_ids[at : at + size], out=piece, mode="clip")
        dst[dst_ids[at : at + size]] = piece


def memmove_each(dst: Iterable[int], src: Iterable[int], sizes: Iterable[int]) -> None:
    """Copy pages with one call for each page."""
    for _ in map(ctypes.memmove, dst, src, sizes):
        pass


def memmove_all(dst: Ids, src: Ids, sizes: Ids) -> None:
    """Copy pages with one call for each page, from arrays."""
    memmove_each(dst.tolist(), src.tolist(), sizes.tolist())


CopyAll = Callable[[Ids, Ids, Ids, bool], None]
"""Copies between addresses: destinations, sources, sizes in bytes, whether to the host tier."""


def _copies_of_the_kernel() -> CopyAll | None:
    """Return the kernel's copy function, or None if a process may not access itself in this way."""
    number, pointer = ctypes.c_ulong, ctypes.c_void_p
    calls: list[Any] = []
    try:
        for name in ("process_vm_readv", "process_vm_writev"):
            calls.append(call := getattr(ctypes.CDLL(None, use_errno=True), name))
            call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
            call.restype = ctypes.c_ssize_t
    except (AttributeError, OSError, TypeError):
        return None

    def copy(dst: Ids, src: Ids, sizes: Ids, to_host: bool) -> None:
        tensors, host = (src, dst) if to_host else (dst, src)
        local, remote = (np.stack((side, sizes), axis=1) for side in (tensors, host))
        vectors = min(_MAX_VECTORS, _MAX_CALL_BYTES // max(1, int(sizes.max(initial=1)))) or 1
        for at in range(0, len(sizes), vectors):
            count = len(sizes[at : at + vectors])
            sides = [side[at:].ctypes.data for side in (local, remote)]
            num_copied = calls[to_host](os.getpid(), sides[0], count, sides[1], count, 0)
            if num_copied != sizes[at : at + count].sum():
                raise OSError(ctypes.get_errno(), f"the kernel only copied {num_copied} bytes")

    probe = np.array([1, 0, 0], np.int64)
    address = np.array([probe.ctypes.data])
    try:
        copy(address + 8, address, np.array([8]), False)
        copy(address + 16, address + 8, np.array([8]), True)
    except OSError:
        return None
    return copy if probe[2] == 1 else None


_copy_by_kernel = _copies_of_the_kernel()  # decided once


def copy_all(dst: Ids, src: Ids, sizes: Ids, to_host: bool) -> None:
    """Copy one page per call until the lock or the core is contended, then let the kernel copy."""
    if _copy_by_kernel is None:
        memmove_all(dst, src, sizes)
        return
    at = 0
    while at < len(sizes):
        start, computed = time.perf_counter(), time.thread_time()
        end = at + _COPIES_BETWEEN_LOOKS
        memmove_all(dst[at:end], src[at:end], sizes[at:end])
        at = end
        waited = time.perf_counter() - start - (time.thread_time() - computed)
        if waited > _LONG_WAIT_S:
            break
    if at < len(sizes):
        _copy_by_kernel(dst[at:], src[at:], sizes[at:], to_host)
