"""The worker half of a :class:`~kvview.StoreConnector`.

One thread moves everything in the order of the plans, so that no page is overwritten while it is
read (XFER-3), and no copy comes before the compute that it depends on (XFER-6). Only the store
works meanwhile, on pages that belong to its jobs alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch
from typing_extensions import override

from kvview.connector import StepPlan, TransferJob, WorkerConnector
from kvview.errors import one_line
from kvview.store_connector.gpu_pages import GPUPages
from kvview.store_connector.page_levels import PageLevels
from kvview.store_connector.store_plan import StorePlan, StoreSpec
from kvview.store_connector.transform import Transform
from kvview.tier import GuardedTier
from kvview.transfer import CanonicalKVCaches, ComputeEvent, GPULoadStoreSpec, TransferResult

_LONGEST_SLEEP = 0.05  # seconds; the deadline of a store's job passes without a wake-up
_BETWEEN_LOOKS = 0.001  # seconds, at a mark that compute has not reached

_Item = tuple[ComputeEvent | None, StepPlan]


class StoreWorker(WorkerConnector):
    """Runs the plans of a :class:`~kvview.store_connector.scheduler.StoreScheduler`.

    Args:
        transform: Applied to every page; None for none.
        open_store: Opens the store; None for none.
        max_memory: Bytes that the pages in memory may take, None for any number.
    """

    def __init__(
        self,
        transform: Transform | None,
        open_store: Callable[[], GuardedTier] | None,
        max_memory: int | None,
    ) -> None:
        self._transform = transform
        self._open_store = open_store
        self._max_memory = max_memory
        self._thread: threading.Thread | None = None
        self._inbox: SimpleQueue[_Item | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._open_jobs: set[int] = set()
        self._finished: list[TransferResult] = []
        self._error: Exception | None = None  # of compute, before the plan that is started

    # --- the engine's thread ---

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        self._gpu = GPUPages(kv_caches)
        self._compute = kv_caches.compute_stream
        self._is_cuda = any(cache.tensor.is_cuda for cache in kv_caches.tensors)
        store = self._open_store() if self._open_store else None
        if store is not None:
            store.on_wake_up(lambda: self._inbox.put((None, StepPlan())))
        self._levels = PageLevels(
            self._gpu.page_bytes, self._transform, store, kv_caches.rank, self._max_memory
        )
        self._thread = threading.Thread(target=self._run, name="kvview-store", daemon=True)
        self._thread.start()

    @override
    def start_plan(self, plan: StepPlan) -> None:
        mark: ComputeEvent | None = None
        if self._compute is not None:
            mark = self._compute.record_event()
        elif self._is_cuda:
            mark = torch.cuda.current_stream().record_event()
        with self._changed:
            self._open_jobs.update(job.job_id for job in (*plan.loads, *plan.stores))
        self._inbox.put((mark, plan))

    @override
    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    @override
    def wait(self, job_ids: Sequence[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._open_jobs.isdisjoint(job_ids))

    @override
    def shutdown(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            thread.join()
            self._levels.close()

    # --- the thread ---

    def _run(self) -> None:
        plans: deque[_Item] = deque()  # in order, until compute has reached their mark
        while True:
            patience = _LONGEST_SLEEP if self._levels.is_waiting else None
            try:
                item = self._inbox.get(timeout=_BETWEEN_LOOKS if plans else patience)
            except Empty:
                item = (None, StepPlan())
            if item is None:
                return
            if item[1]:
                plans.append(item)
            self._levels.poll()
            while plans and self._is_reached(plans[0][0]):
                self._start(plans.popleft()[1])

    def _is_reached(self, mark: ComputeEvent | None) -> bool:
        self._error = None
        try:
            if mark is not None and self._levels.is_waiting:
                return mark.query()  # the jobs that the store works on must not wait for compute
            if mark is not None:
                mark.synchronize()
        except Exception as error:  # nothing is known of the pages then
            self._error = error
        return True

    def _start(self, plan: StepPlan) -> None:
        if isinstance(plan, StorePlan):
            try:
                self._levels.move(plan.moves)
            except Exception as error:
                self._error = error
        for job in (*plan.loads, *plan.stores):
            try:
                if self._error is not None:
                    raise self._error
                if isinstance(job.src, StoreSpec):
                    self._load(job)
                else:
                    self._save(job)
            except Exception as raised:
                self._report(TransferResult(job.job_id, success=False, error=one_line(raised)))

    def _report(self, result: TransferResult) -> None:
        with self._changed:
            self._finished.append(result)
            self._open_jobs.discard(result.job_id)
            self._changed.notify_all()

    def _load(self, job: TransferJob) -> None:
        assert isinstance(job.src, StoreSpec)
        assert isinstance(job.dst, GPULoadStoreSpec)
        gpu, (rows, pages) = job.dst, self._rows(job.dst)

        def end(flags: list[bool]) -> None:
            error = None
            if not all(flags):
                error = f"{flags.count(False)} of {len(flags)} pages were missing or damaged"
            else:
                try:
                    self._copy(self._gpu.write, gpu, rows)
                except Exception as raised:
                    error = one_line(raised)
            self._report(TransferResult(job.job_id, error is None, error=error))

        self._levels.load(job.src.names, pages, end)

    def _save(self, job: TransferJob) -> None:
        assert isinstance(job.dst, StoreSpec)
        assert isinstance(job.src, GPULoadStoreSpec)
        names, (rows, pages) = job.dst.names, self._rows(job.src)
        self._copy(self._gpu.read, job.src, rows)

        def end(flags: list[bool]) -> None:
            num_bytes = self._levels.num_bytes(names)
            if all(flags):
                self._report(TransferResult(job.job_id, True, num_bytes))
                return
            error = f"{flags.count(False)} of {len(flags)} pages were not stored"
            self._report(TransferResult(job.job_id, False, error=error, moved=flags))

        spec = job.dst
        self._levels.save(names, pages, end, in_memory=spec.in_memory, in_store=spec.in_store)

    def _rows(self, gpu: GPULoadStoreSpec) -> tuple[list[bytearray], list[memoryview]]:
        """Room for the blocks of a job: per group all of them in a row, and each of them."""
        rows = [
            bytearray(size * page_bytes)
            for size, page_bytes in zip(gpu.group_sizes, self._gpu.page_bytes, strict=True)
        ]
        pages = [
            memoryview(row)[at : at + page_bytes]
            for row, page_bytes in zip(rows, self._gpu.page_bytes, strict=True)
            for at in range(0, len(row), page_bytes)
        ]
        return rows, pages

    def _copy(
        self,
        copy: Callable[[int, Sequence[int], bytearray], None],
        gpu: GPULoadStoreSpec,
        rows: Sequence[bytearray],
    ) -> None:
        start = 0
        for group, (size, row) in enumerate(zip(gpu.group_sizes, rows, strict=True)):
            copy(group, gpu.block_ids[start : start + size], row)
            start += size
