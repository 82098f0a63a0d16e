"""Copies between GPU memory and pinned host memory, with one call for a list of copies.

Source: ``vllm/v1/simple_kv_offload/cuda_mem_ops.py`` (0.33.0) for the batched copy
and for pinning by registration.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvview.errors import ConfigError
from kvview_reference.transfer.pages import Ids

SMALL_PAGE_BYTES = 128 << 10
"""Smaller pages are copied by a kernel; on an H100, loads of 16 KiB are 6 times as fast so."""

_Copy = Callable[[Any, Ids, Ids, Ids], object]
"""Queues copies on a stream: destinations, sources and sizes."""

_cuda: Any = torch.cuda  # only partly typed


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


SOURCE_ACCESS_IN_STREAM_ORDER = 1
"""Sources are read when the stream comes to them, not when the call is made. For
loads too: the host page may be the destination of a store still in flight."""

_Pointer, _Size = ctypes.c_void_p, ctypes.c_size_t
_BATCH_SIGNATURE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(_Pointer, _Pointer, _Pointer, _Size),
    *(_Pointer, _Pointer, _Size, _Pointer, _Pointer),
)
_BATCH_SINCE = 12080
"""CUDA 12.8, whose version of the function has the arguments above."""


class CUDADriver:
    """CUDA through torch, and its batched copy through the driver library.

    1. ``cuMemcpyBatchAsync`` takes all copies of a job in one call. If the function is missing, or
       fails in a trial on a few bytes, each page is copied by one ``cuMemcpyAsync``.
    2. If Triton is installed, and after a similar trial, a kernel copies small pages.
    3. Host memory is registered instead of allocated as pinned memory, because torch's pinned
       allocator rounds a tier up to the next power of two.

    Args:
        device: The CUDA device of the KV cache.

    Raises:
        ConfigError: There is no CUDA driver library (ROCm is not supported).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(
                f"the tensors are on {device}, but libcuda cannot be loaded: {error}"
            ) from error
        self._one = self._library.cuMemcpyAsync
        self._one.argtypes = (_Pointer, _Pointer, _Size, _Pointer)
        self._batch = self._tried(self._find_batch())
        self._kernel = self._tried(_find_kernel())

    def pin(self, host: npt.NDArray[np.uint8]) -> None:
        """Lock host memory, so that the device can copy from and to it by itself."""
        status = int(_cuda.cudart().cudaHostRegister(host.ctypes.data, host.nbytes, 0))
        if status != 0:
            raise ConfigError(
                f"cudaHostRegister cannot pin {host.nbytes} bytes of host memory: CUDA error "
                f"{status}"
            )
        # A tier without a shutdown must not leave its addresses pinned, because the next tier may
        # get them.
        self._unpin = weakref.finalize(host, _cuda.cudart().cudaHostUnregister, host.ctypes.data)
        self._unpin.atexit = False

    def unpin(self, host: npt.NDArray[np.uint8]) -> None:
        """Undo ``pin``."""
        self._unpin()

    def stream(self) -> torch.cuda.Stream:
        """Make a stream, whose work runs in order and concurrently with other streams."""
        stream: torch.cuda.Stream = _cuda.Stream(self._device)
        return stream

    def compute_stream(self) -> torch.cuda.Stream:
        """The current stream of the calling thread."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record an event on a stream."""
        event: torch.cuda.Event = _cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait_event(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Make later work of a stream wait for an event of another stream."""
        stream.wait_event(event)

    def copy(self, stream: torch.cuda.Stream, dst: Ids, src: Ids, sizes: Ids) -> object:
        """Queue copies on a stream; they may run in any order among themselves."""
        with torch.cuda.device(self._device):
            is_small = (
                sizes.max(initial=0) < SMALL_PAGE_BYTES and not ((dst | src | sizes) % 8).any()
            )
            copy = self._kernel if is_small and self._kernel is not None else self._batch
            if copy is not None:
                return copy(stream, dst, src, sizes)
            for one in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
                status = self._one(*one, stream.cuda_stream)
                if status != 0:
                    raise RuntimeError(f"cuMemcpyAsync failed with CUDA error {status}")
            return None

    def done(self, event: torch.cuda.Event) -> bool:
        """Whether an event has happened; raises if the device has failed."""
        return bool(_cuda.Event.query(event))

    def wait(self, event: torch.cuda.Event) -> None:
        """Block until an event has happened."""
        event.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Time between two events that have happened."""
        return float(start.elapsed_time(end)) / 1000

    def _find_batch(self) -> _Copy | None:
        pointer = ctypes.c_void_p()
        status = self._library.cuGetProcAddress(
            b"cuMemcpyBatchAsync", ctypes.byref(pointer), _BATCH_SINCE, ctypes.c_uint64(0)
        )
        if status != 0 or not pointer.value:
            return None
        batch = _BATCH_SIGNATURE(pointer.value)
        return lambda stream, *copies: batch_copy(batch, stream.cuda_stream, *copies)

    def _tried(self, copy: _Copy | None) -> _Copy | None:
        """Try a copy function on a few bytes, which also compiles a kernel; None if it fails."""
        if copy is None:
            return None
        on_device = torch.arange(64, dtype=torch.uint8, device=self._device)
        on_host = torch.zeros(64, dtype=torch.uint8).pin_memory()
        stream = self.stream()
        stream.wait_stream(self.compute_stream())
        offsets = np.array([0, 32])
        try:
            with torch.cuda.device(self._device):
                dst, src = on_host.data_ptr() + offsets, on_device.data_ptr() + offsets
                kept = copy(stream, dst, src, np.full(2, 32))
        except Exception:
            return None
        stream.synchronize()
        del kept
        return copy if torch.equal(on_host, torch.arange(64, dtype=torch.uint8)) else None


def _find_kernel() -> _Copy | None:
    try:
        from kvview_reference.transfer.cuda_copy_kernel import copy_small_pages
    except ImportError:
        return None
    return copy_small_pages


def batch_copy(function: Any, stream: int, dst: Ids, src: Ids, sizes: Ids) -> None:
    """Call ``cuMemcpyBatchAsync``.

    Args:
        function: ``cuMemcpyBatchAsync``, or another function with the same signature.
        stream: Handle of the stream; not the default stream.
        dst: Addresses, int64, contiguous.
        src: Addresses, int64, contiguous.
        sizes: Sizes in bytes, int64, contiguous.

    Raises:
        RuntimeError: A copy failed; the message names the CUDA error and the first failed copy.
    """
    if not len(sizes):
        return
    arrays = [np.ascontiguousarray(array, dtype=np.int64) for array in (dst, src, sizes)]
    attributes = _CopyAttributes(source_access_order=SOURCE_ACCESS_IN_STREAM_ORDER)
    first = ctypes.c_size_t(0)
    failed_at = ctypes.c_size_t(0)
    status = function(
        *(array.ctypes.data for array in arrays),
        len(sizes),
        ctypes.addressof(attributes),
        ctypes.addressof(first),
        1,
        ctypes.addressof(failed_at),
        stream,
    )
    if status != 0:
        raise RuntimeError(
            f"cuMemcpyBatchAsync failed with CUDA error {status} at copy {failed_at.value}"
        )
