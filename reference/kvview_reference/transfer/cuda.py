"""The CUDA side of transfers: one stream per direction, pinned host memory, one call per job.

:class:`StreamCopier` determines the order of the jobs. The copier uses streams and events only
through :class:`Driver`, so it can be tested without a GPU. The real driver is
:class:`~kvview_reference.transfer.cuda_copies.CUDADriver`.

Source: vLLM #45704, for the faults that occur without this order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvview import ComputeStream, TransferResult
from kvview_reference.transfer.pages import Ids, Job, failed

STORE, LOAD = 0, 1


class Driver(Protocol):
    """Streams, events and copies of one device; all calls except ``wait`` return immediately."""

    def pin(self, host: npt.NDArray[np.uint8]) -> None:
        """Pin host memory, so that the device can copy from and to this memory by itself."""

    def unpin(self, host: npt.NDArray[np.uint8]) -> None:
        """Undo ``pin``."""

    def stream(self) -> Any:
        """Make a stream, whose work runs in order, but concurrently with other streams."""

    def compute_stream(self) -> Any:
        """Return the stream on which the caller currently computes."""

    def record(self, stream: Any) -> Any:
        """Record an event on a stream."""

    def wait_event(self, stream: Any, event: Any) -> None:
        """Make later work of a stream wait for an event of another stream."""

    def copy(self, stream: Any, dst: Ids, src: Ids, sizes: Ids) -> object:
        """Queue copies on a stream; they may run in any order among themselves.

        Returns:
            An object that must be kept until the copies have ended.

        Raises:
            RuntimeError: Only some of the copies were queued.
        """

    def done(self, event: Any) -> bool:
        """Return whether an event has happened; raise an exception if the device has failed."""

    def wait(self, event: Any) -> None:
        """Block until an event has happened."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two events that have happened."""


@dataclass(eq=False, slots=True)
class _Launched:
    """A job on its stream; ``copies`` and ``kept`` keep the descriptors alive until it ends."""

    job: Job
    start: Any
    end: Any
    copies: tuple[Ids, Ids, Ids] | None = None
    kept: object = None
    error: Exception | None = None


class StreamCopier:
    """Runs stores on one stream and loads on another.

    1. A job starts after all work that the compute stream has at submission (XFER-6), because a
       store reads bytes that compute wrote, and because earlier writes to the blocks of a load
       (zeroing) must not overwrite the loaded bytes.
    2. Jobs of one direction run in order. A job waits for the last job of the other direction that
       touches one of its pages, and so also for all earlier jobs of that direction (XFER-3).
    3. Pages are distinguished only by block id, so jobs of two groups that use one block id in
       different tensors are also kept in order, which is safe and costs nothing.

    Args:
        driver: The device.
        host: The host tier, of shape ``(rows, row_bytes)``; this object pins it.
        num_gpu_blocks: Number of blocks of the KV cache; all block ids are smaller.
        compute_stream: Stream whose work must end before a job starts; None for the caller's
            current stream.

    Raises:
        ConfigError: The host tier cannot be pinned.
    """

    def __init__(
        self,
        driver: Driver,
        host: npt.NDArray[np.uint8],
        num_gpu_blocks: int,
        compute_stream: ComputeStream | None = None,
    ) -> None:
        self._driver = driver
        self._compute_stream = compute_stream
        self._host = host
        driver.pin(host)
        self._streams = (driver.stream(), driver.stream())
        # Per direction: the number of the last job that named a block, 0 for none.
        self._gpu_jobs = np.zeros((2, num_gpu_blocks), np.int64)
        self._host_jobs = np.zeros((2, len(host)), np.int64)
        self._launched: dict[int, _Launched] = {}
        self._numbers: dict[int, int] = {}
        self._count = 0

    def submit(self, job: Job) -> None:
        """Start a job; an error becomes a failed result."""
        direction = STORE if job.to_host else LOAD
        stream = self._streams[direction]
        driver = self._driver
        self._count += 1
        if self._compute_stream is not None:
            driver.wait_event(stream, self._compute_stream.record_event())
        else:
            driver.wait_event(stream, driver.record(driver.compute_stream()))
        last = 0
        for _, gpu_blocks, host_rows in job.moves:
            for numbers, ids in ((self._gpu_jobs, gpu_blocks), (self._host_jobs, host_rows)):
                last = max(last, int(numbers[1 - direction][ids].max()))
                numbers[direction][ids] = self._count
        if last in self._launched:
            driver.wait_event(stream, self._launched[last].end)
        launched = _Launched(job, driver.record(stream), None)
        try:
            launched.copies = job.copies()
            launched.kept = driver.copy(stream, *launched.copies)
        except Exception as error:
            launched.error = error
        # Also after an error, because some of the copies may be under way.
        launched.end = driver.record(stream)
        self._launched[self._count] = launched
        self._numbers[job.job_id] = self._count

    def poll(self) -> list[TransferResult]:
        """Return the results since the last call, in order of completion, without blocking."""
        results = []
        for number, launched in list(self._launched.items()):
            try:
                if not self._driver.done(launched.end):
                    continue
                if launched.error is not None:
                    raise launched.error
                seconds = self._driver.seconds(launched.start, launched.end)
                job = launched.job
                results.append(TransferResult(job.job_id, True, job.num_bytes, seconds))
            except Exception as error:
                results.append(failed(launched.job, error))
            del self._launched[number], self._numbers[launched.job.job_id]
        return results

    def wait(self, job_id: int) -> None:
        """Block until a job has ended; return immediately for an unknown job."""
        if job_id in self._numbers:
            self._driver.wait(self._launched[self._numbers[job_id]].end)

    def close(self) -> None:
        """Finish every job, and release threads and pinned memory."""
        try:
            for launched in self._launched.values():
                self._driver.wait(launched.end)
        finally:
            self._driver.unpin(self._host)
