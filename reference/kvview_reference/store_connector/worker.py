"""The worker halves of a :class:`StoreConnector`: host memory alone, and pages by name."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from typing_extensions import override

from kvview.connector import StepPlan, TransferJob, WorkerConnector
from kvview.errors import one_line
from kvview.transfer import (
    CanonicalKVCaches,
    ComputeEvent,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    TransferResult,
)
from kvview_reference.store_connector.named_pages import FoundPage, Pages
from kvview_reference.store_connector.store_plan import StorePlan, StoreSpec
from kvview_reference.transfer import CPUGPUTransferWorker
from kvview_reference.transfer.host_pages import HostPages

_LONGEST_SLEEP = 0.05  # seconds, because a store's deadline passes without a wake-up
_FIRST_LOOK, _LAST_LOOK = 20e-6, 0.0005  # seconds between queries of an event; they double

MakePages = Callable[[HostPages, int, Callable[[], None]], Pages]
"""Makes the pages of a worker from its host memory, its rank, and a call that wakes its thread."""


class HostWorker(WorkerConnector):
    """A transfer worker that runs the jobs of each plan, for a connector without a store.

    Args:
        num_pages: Host pages.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._worker: CPUGPUTransferWorker | None = None
        self._refused: list[TransferResult] = []

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        self._worker = CPUGPUTransferWorker(kv_caches, self._num_pages)

    @override
    def start_plan(self, plan: StepPlan) -> None:
        assert self._worker is not None, "register_kv_caches comes first"
        for job in (*plan.loads, *plan.stores):
            if not self._worker.transfer_async(job.job_id, (job.src, job.dst)):
                # The worker does not report this job, so this half does (CONN-3).
                self._refused.append(TransferResult(job.job_id, False, error="refused"))

    @override
    def get_finished(self) -> list[TransferResult]:
        refused, self._refused = self._refused, []
        return refused + (self._worker.get_finished() if self._worker else [])

    @override
    def wait(self, job_ids: Sequence[int]) -> None:
        if self._worker:
            self._worker.wait(job_ids)

    @override
    def shutdown(self) -> None:
        if self._worker:
            self._worker.shutdown()


class StoreWorker(WorkerConnector):
    """Runs plans whose pages have names, in host memory and in a store.

    One thread moves all pages in the order of the plans, so that no page is overwritten while it is
    read (XFER-3), and no copy starts before the compute that it depends on (XFER-6). Only the store
    runs at the same time, on pages that no other job uses.

    Args:
        num_pages: Host pages that the scheduler half assigns.
        make_pages: Makes the object that moves the pages, and opens the store.
    """

    def __init__(self, num_pages: int, make_pages: MakePages) -> None:
        self._num_pages = num_pages
        self._make_pages = make_pages
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._plans: deque[tuple[ComputeEvent | None, StepPlan]] = deque()
        self._awake = threading.Event()
        self._changed = threading.Condition()
        self._open_jobs: set[int] = set()
        self._finished: list[TransferResult] = []

    # --- the engine's thread ---

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        self._host = HostPages(kv_caches, self._num_pages)
        self._pages = self._make_pages(self._host, kv_caches.rank, self._awake.set)
        self._thread = threading.Thread(target=self._run, name="kvview-store", daemon=True)
        self._thread.start()

    @override
    def start_plan(self, plan: StepPlan) -> None:
        mark = self._host.mark_compute()
        with self._changed:
            self._open_jobs.update(job.job_id for job in (*plan.loads, *plan.stores))
        self._plans.append((mark, plan))
        self._awake.set()

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
            self._is_closed = True
            self._awake.set()
            thread.join()
            self._pages.close()
            self._host.close()

    # --- the thread ---

    def _run(self) -> None:
        pause = _LONGEST_SLEEP
        while not self._is_closed:
            is_new = self._awake.wait(pause)
            self._awake.clear()
            self._pages.poll()
            while self._plans:
                mark, plan = self._plans[0]
                error: Exception | None = None
                try:
                    if mark is not None and not mark.query():
                        break
                except Exception as raised:  # compute failed, so the bytes of the pages are unknown
                    error = raised
                self._plans.popleft()
                self._start(plan, error)
            pause = _FIRST_LOOK if is_new else min(2 * pause, _LAST_LOOK)
            pause = pause if self._plans else _LONGEST_SLEEP

    def _start(self, plan: StepPlan, error: Exception | None) -> None:
        displaced: Sequence[bytes] = ()
        if isinstance(plan, StorePlan):
            try:
                displaced = self._pages.place(plan.places)
            except Exception as raised:
                error = raised
        for job in (*plan.loads, *plan.stores):
            try:
                if error is not None:
                    raise error
                if isinstance(job.src, StoreSpec):
                    self._load(job)
                else:
                    self._save(job, displaced)
            except Exception as raised:
                self._report(TransferResult(job.job_id, success=False, error=one_line(raised)))

    def _report(self, result: TransferResult) -> None:
        with self._changed:
            self._finished.append(result)
            self._open_jobs.discard(result.job_id)
            self._changed.notify_all()

    def _load(self, job: TransferJob) -> None:
        assert isinstance(job.src, StoreSpec)
        names = job.src.names

        def end(pages: Sequence[FoundPage | None]) -> None:
            found = [page for page in pages if page is not None]
            error = None
            if len(found) < len(pages):
                missing = len(pages) - len(found)
                error = f"{missing} of {len(pages)} pages were missing or damaged"
            else:
                try:
                    error = self._write(job, names, found)
                except Exception as raised:
                    error = one_line(raised)
            self._report(TransferResult(job.job_id, error is None, error=error))

        self._pages.load(names, end)

    def _write(
        self, job: TransferJob, names: Sequence[bytes], found: Sequence[FoundPage]
    ) -> str | None:
        """Write pages to the blocks of a job; returns the error, if a block was not written."""
        assert isinstance(job.dst, GPULoadStoreSpec)
        host_pages = [page.host_page for page in found if page.host_page is not None]
        if len(host_pages) == len(found):
            return self._host.copy((CPULoadStoreSpec(host_pages), job.dst)).error
        data = (page.data for page in found)
        self._host.write(job.dst, map(self._pages.decode, names, data))
        return None

    def _save(self, job: TransferJob, displaced: Sequence[bytes]) -> None:
        assert isinstance(job.dst, StoreSpec)
        spec = job.dst

        def end(flags: list[bool]) -> None:
            if all(flags):
                self._report(TransferResult(job.job_id, True, self._pages.num_bytes(spec.names)))
                return
            error = f"{flags.count(False)} of {len(flags)} pages were not stored"
            self._report(TransferResult(job.job_id, False, error=error, moved=flags))

        self._pages.save(spec, self._read(job, spec), end, displaced)

    def _read(self, job: TransferJob, spec: StoreSpec) -> Iterator[memoryview | None]:
        """Yield the bytes of the blocks of a job, from the host pages if it fills host pages."""
        assert isinstance(job.src, GPULoadStoreSpec)
        if not (spec.host_pages and self._num_pages):
            yield from self._host.read(job.src)
            return
        result = self._host.copy((job.src, CPULoadStoreSpec(spec.host_pages)))
        moved = [result.success] * len(spec.names) if result.moved is None else result.moved
        for name, host_page, is_moved in zip(spec.names, spec.host_pages, moved, strict=True):
            yield self._pages.view(name, host_page) if is_moved else None
