"""The host memory of a transfer worker, with pages through which other blocks pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice

import torch

from kvview import (
    CanonicalKVCaches,
    ComputeEvent,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    TransferResult,
    TransferSpec,
)
from kvview_reference.transfer.worker import CPUGPUTransferWorker

_STAGING_BYTES = 16 << 20
_INLINE_BYTES = 1 << 62  # every job runs on the caller's thread, which waits for it anyway


class HostPages:
    """Copies blocks to and from host pages, and passes blocks without a host page as bytes.

    1. A copy waits neither for the model, nor for the caller's other jobs: call it after the event
       of :meth:`mark_compute` has ended.
    2. Only one thread calls all methods except ``mark_compute``.

    Args:
        kv_caches: KV caches of the worker.
        num_pages: Host pages with the numbers 0 to num_pages - 1.
    """

    def __init__(self, kv_caches: CanonicalKVCaches[torch.Tensor], num_pages: int) -> None:
        self._compute_stream = kv_caches.compute_stream
        device = kv_caches.tensors[0].tensor.device if kv_caches.tensors else torch.device("cpu")
        self._device = device if device.type == "cuda" else None
        row_bytes = max(
            sum(ref.page_size_bytes for ref in refs) for refs in kv_caches.group_data_refs
        )
        self._num_staged = max(1, _STAGING_BYTES // max(1, row_bytes) // 2)  # in each of two halves
        self._first_staged = num_pages
        self._worker = CPUGPUTransferWorker(
            replace(kv_caches, compute_stream=None),
            num_pages + 2 * self._num_staged,
            inline_bytes=_INLINE_BYTES,
        )
        self.page_bytes = self._worker.page_bytes
        self._host = self._worker.host.data.cast("B")
        self._row_bytes = self._worker.host.shape[1]
        self._job_ids = count()
        self._ended: dict[int, TransferResult] = {}

    def mark_compute(self) -> ComputeEvent | None:
        """Record an event after all work of the model so far; None if no work can be in flight."""
        if self._compute_stream is not None:
            return self._compute_stream.record_event()
        event: ComputeEvent | None = None
        if self._device is not None:
            event = torch.cuda.current_stream(self._device).record_event()
        return event

    def page(self, number: int, num_bytes: int) -> memoryview:
        """Return the first bytes of a host page; they change with the page."""
        first = number * self._row_bytes
        return self._host[first : first + num_bytes]

    def copy(self, spec: TransferSpec) -> TransferResult:
        """Copy between GPU blocks and host pages, and wait for the end.

        Raises:
            TransferSpecError: The spec names pages that do not exist or do not pair up.
        """
        return self._end(self._start(spec))

    def read(self, gpu: GPULoadStoreSpec) -> Iterator[memoryview]:
        """Yield the bytes of each block, valid until the next one is taken.

        Raises:
            RuntimeError: A block cannot be copied.
        """
        started: deque[tuple[int, list[memoryview]]] = deque()
        try:
            for pages, blocks in self._chunks(gpu):
                job_id = self._start((blocks, CPULoadStoreSpec(pages)))
                started.append((job_id, self._views(pages, blocks)))
                if len(started) == 2:
                    yield from self._copied(*started.popleft())
            while started:
                yield from self._copied(*started.popleft())
        finally:  # the caller may have stopped early
            for job_id, _ in started:
                self._end(job_id)

    def write(self, gpu: GPULoadStoreSpec, contents: Iterator[memoryview]) -> None:
        """Write the bytes of each block; each content is used before the next one is taken.

        Raises:
            ValueError: A content does not have the size of its block.
            RuntimeError: A block cannot be copied.
        """
        for pages, blocks in self._chunks(gpu):
            views = self._views(pages, blocks)
            for view, content in zip(views, islice(contents, len(views)), strict=True):
                if len(content) != len(view):
                    raise ValueError(f"a page has {len(content)} bytes, expected {len(view)}")
                view[:] = content
            self._check(self.copy((CPULoadStoreSpec(pages), blocks)))

    def sizes(self, gpu: GPULoadStoreSpec) -> list[int]:
        """Return the bytes of each block of a job."""
        groups = zip(self.page_bytes, gpu.group_sizes, strict=True)
        return [num_bytes for num_bytes, size in groups for _ in range(size)]

    def close(self) -> None:
        """Release the memory."""
        self._host.release()
        self._worker.shutdown()

    def _chunks(self, gpu: GPULoadStoreSpec) -> Iterator[tuple[list[int], GPULoadStoreSpec]]:
        """Yield parts of a job with the pages through which they pass, in turn from each half."""
        groups = [group for group, size in enumerate(gpu.group_sizes) for _ in range(size)]
        num_groups = range(len(gpu.group_sizes))
        for number, first in enumerate(range(0, len(groups), self._num_staged)):
            of_chunk = groups[first : first + self._num_staged]
            blocks = gpu.block_ids[first : first + self._num_staged]
            sizes = list(map(of_chunk.count, num_groups))
            first_page = self._first_staged + number % 2 * self._num_staged
            pages = list(range(first_page, first_page + len(blocks)))
            yield pages, GPULoadStoreSpec(blocks, sizes, [0] * len(sizes))

    def _views(self, pages: Sequence[int], blocks: GPULoadStoreSpec) -> list[memoryview]:
        return list(map(self.page, pages, self.sizes(blocks)))

    def _copied(self, job_id: int, views: list[memoryview]) -> Iterator[memoryview]:
        self._check(self._end(job_id))
        yield from views

    def _start(self, spec: TransferSpec) -> int:
        job_id = next(self._job_ids)
        if not self._worker.transfer_async(job_id, spec):
            raise RuntimeError("the transfer worker is closed")
        return job_id

    def _end(self, job_id: int) -> TransferResult:
        self._worker.wait([job_id])
        self._ended.update((result.job_id, result) for result in self._worker.get_finished())
        return self._ended.pop(job_id)

    @staticmethod
    def _check(result: TransferResult) -> None:
        if not result.success:
            raise RuntimeError(result.error)
