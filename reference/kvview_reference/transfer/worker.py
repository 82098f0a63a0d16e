"""CPU<->GPU transfers in torch, for any groups, tensors, page sizes and chunk sizes.

On every device, a job becomes a list of byte copies, ``(destination, source, size)``. For tensors
in GPU memory the CUDA driver runs the list (:mod:`kvview_reference.transfer.cuda`); for tensors in
CPU memory, a background thread runs the list.

Source: vLLM PR #38453; ``vllm/v1/kv_offload/cpu/gpu_worker.py`` (0.33.0).
"""

from __future__ import annotations

import reprlib
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvview import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    CanonicalKVCaches,
    ConfigError,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    TransferResult,
    TransferSpec,
    TransferSpecError,
)
from kvview_reference.transfer.host_copy import (
    FEW_COPIES,
    SMALL_COPY_BYTES,
    copy_all,
    copy_pages,
    memmove_each,
)
from kvview_reference.transfer.pages import (
    Group,
    Ids,
    Job,
    allocate_host,
    check_host_bytes,
    check_tensors,
    failed,
    make_group,
)

if TYPE_CHECKING:
    from kvview import ComputeEvent, ComputeStream, TransferWorker

SHARED_BYTES = 1 << 20
"""Several threads share copies of at least this many bytes in total."""


class Copier(Protocol):
    """An object that runs jobs; jobs that touch the same page run in the order of submission."""

    def submit(self, job: Job) -> None:
        """Start a job; an error becomes a failed result."""

    def poll(self) -> list[TransferResult]:
        """Return the results since the last call, in order of completion, without blocking."""

    def wait(self, job_id: int) -> None:
        """Block until a job has ended; return immediately for an unknown job."""

    def close(self) -> None:
        """Finish every job, and release threads and pinned memory."""


class ThreadCopier:
    """Copies pages in CPU memory, on a separate thread, one job after the other.

    1. A job of up to ``inline_bytes`` is copied by the caller if no job is in flight and compute
       has ended, because it takes longer to pass such a job to a thread than to copy it.
    2. The threads start with the first job that needs a thread, and end with the engine.
    3. The thread waits for compute, and the caller never does (XFER-6). Events of one stream happen
       in the order in which they were recorded, so the jobs keep their order.
    4. If a store fails, all groups that can be moved are still moved (XFER-4).

    Args:
        num_threads: Number of threads that share one large job.
        inline_bytes: Jobs of at most this size run on the caller's thread.
        compute_stream: Stream whose work must end before a job starts; None if compute has ended at
            submission.
    """

    def __init__(
        self, num_threads: int, inline_bytes: int, compute_stream: ComputeStream | None
    ) -> None:
        self._num_threads = num_threads
        self._inline_bytes = inline_bytes
        self._compute_stream = compute_stream
        self._lane = ThreadPoolExecutor(1, "kvview-transfer")
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 1), "kvview-copy")
        self._futures: dict[int, Future[None]] = {}
        self._last: Future[None] | None = None
        self._finished: deque[TransferResult] = deque()

    def submit(self, job: Job) -> None:
        """Start a job; an error becomes a failed result."""
        mark = None
        try:
            if self._compute_stream is not None:
                mark = self._compute_stream.record_event()
                if mark.query():
                    mark = None
        except Exception as error:
            self._finished.append(failed(job, error))
            return
        is_idle = mark is None and (self._last is None or self._last.done())
        if is_idle and job.num_bytes <= self._inline_bytes:
            self._run(job)
        else:
            self._last = self._futures[job.job_id] = self._lane.submit(self._run, job, mark)

    def poll(self) -> list[TransferResult]:
        """Return the results since the last call, in order of completion, without blocking."""
        results = []
        while self._finished:
            results.append(self._finished.popleft())
            self._futures.pop(results[-1].job_id, None)
        return results

    def wait(self, job_id: int) -> None:
        """Block until a job has ended; return immediately for an unknown job."""
        future = self._futures.get(job_id)
        if future is not None:
            future.result()

    def close(self) -> None:
        """Finish every job, and release threads and pinned memory."""
        self._lane.shutdown()
        self._helpers.shutdown()

    def _run(self, job: Job, mark: ComputeEvent | None = None) -> None:
        try:
            if mark is not None:
                mark.synchronize()
        except Exception as error:  # bytes after a failed compute are not stored
            self._finished.append(failed(job, error))
            return
        start = time.perf_counter()
        try:
            self._copy(job)
        except Exception as error:
            result = failed(job, error, self._store_by_group(job) if job.to_host else None)
        else:
            result = TransferResult(job.job_id, True, job.num_bytes, time.perf_counter() - start)
        self._finished.append(result)

    def _store_by_group(self, job: Job) -> list[bool]:
        """Move the groups that can be moved, and return for each GPU block whether it was moved."""
        moved = []
        for move in job.moves:
            try:
                self._copy(replace(job, moves=[move], num_bytes=move[0].row_bytes * len(move[1])))
            except Exception:
                moved += [False] * len(move[1])
            else:
                moved += [True] * len(move[1])
        return moved

    def _copy(self, job: Job) -> None:
        if job.num_bytes < SHARED_BYTES and job.num_pages <= FEW_COPIES:
            memmove_each(*job.few_copies())
            return
        copies = job.copies()
        num_copies = len(copies[0])
        if job.num_bytes < SHARED_BYTES and num_copies <= FEW_COPIES:
            memmove_each(*(part.tolist() for part in copies))
        elif job.num_bytes < num_copies * SMALL_COPY_BYTES:
            for dst, src, *ids in job.pages():
                self._share(partial(copy_pages, dst, src), ids, len(ids[0]) * dst.itemsize)
        else:
            self._share(partial(copy_all, to_host=job.to_host), copies, job.num_bytes)

    def _share(self, copy: Callable[..., None], arrays: Sequence[Ids], num_bytes: int) -> None:
        """Make the copies that the arrays describe; all threads share large copies."""
        num_copies = len(arrays[0])
        share = -(-num_copies // self._num_threads) if num_bytes >= SHARED_BYTES else num_copies
        others = [
            self._helpers.submit(copy, *(part[at : at + share] for part in arrays))
            for at in range(share, num_copies, share or 1)
        ]
        copy(*(part[:share] for part in arrays))
        for other in others:
            other.result()


class CPUGPUTransferWorker:
    """Moves pages between KV-cache tensors and a host tier that it owns.

    1. Jobs that touch the same page run in the order of submission, in both
       directions; other jobs may overlap.
    2. The whole spec of a job is checked before any copy starts (XFER-1).
    3. The cost of a job grows with the number of its pages, and not with the number of groups,
       because a group of size 0 costs only one comparison.
    4. Only one thread may call a worker. A job id is in flight until the job has been reported.
    5. After ``shutdown`` no job is accepted, but results of earlier jobs are still returned.

    Args:
        kv_caches: All tensors, which must be on one device, CUDA or CPU. The tensors are read and
            written in place, and must outlive the worker. For CUDA tensors, the compute stream must
            be a stream of torch.
        num_cpu_blocks: Host blocks of the tier, numbered from 0.
        blocks_per_chunk: Number k of GPU blocks that one host block holds.
        max_host_bytes: Maximum number of bytes of the host tier; None for the memory of the
            machine.
        num_threads: Number of threads that share one large copy in CPU memory; None for torch's
            number of threads, at most 8.
        inline_bytes: Maximum size of a job in CPU memory that is copied on the caller's thread if
            no job is in flight and compute has ended; 0 for never.

    Raises:
        ConfigError: The tensors and the references do not match, a number is not positive, or the
            host tier does not fit; nothing was allocated.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches[torch.Tensor],
        num_cpu_blocks: int,
        *,
        blocks_per_chunk: int = 1,
        max_host_bytes: int | None = None,
        num_threads: int | None = None,
        inline_bytes: int = 128 * 1024,
    ) -> None:
        if num_threads is None:
            num_threads = min(8, torch.get_num_threads())
        for name, number in (
            ("num_cpu_blocks", num_cpu_blocks),
            ("blocks_per_chunk", blocks_per_chunk),
            ("num_threads", num_threads),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(f"{name} must be a positive int, got {number!r}")
        device = check_tensors(kv_caches.tensors)
        self._groups = [
            make_group(index, refs, kv_caches.tensors)
            for index, refs in enumerate(kv_caches.group_data_refs)
        ]
        if not self._groups:
            raise ConfigError("group_data_refs is empty: a KV cache has at least one group")
        row_bytes = max(1, *(group.row_bytes for group in self._groups))
        num_rows = num_cpu_blocks * blocks_per_chunk
        check_host_bytes(
            num_rows * row_bytes,
            max_host_bytes,
            f"{num_cpu_blocks} host blocks of {blocks_per_chunk} x {row_bytes} bytes",
        )
        self._k = blocks_per_chunk
        self._num_cpu_blocks = num_cpu_blocks
        self._host = allocate_host(num_rows, row_bytes)
        num_gpu_blocks = max(cache.tensor.shape[0] for cache in kv_caches.tensors)
        self._fewest_blocks = min(group.num_blocks for group in self._groups)
        self._seen_host = np.zeros(num_cpu_blocks, np.int64)
        self._seen_gpu = np.zeros(num_gpu_blocks, np.int64)
        self._in_flight: set[int] = set()
        self._closed = False
        self._copier: Copier
        compute_stream = kv_caches.compute_stream
        if device.type == "cuda":
            from kvview_reference.transfer.cuda import StreamCopier
            from kvview_reference.transfer.cuda_copies import CUDADriver

            driver = CUDADriver(device)
            self._copier = StreamCopier(driver, self._host, num_gpu_blocks, compute_stream)
        else:
            self._copier = ThreadCopier(num_threads, inline_bytes, compute_stream)

    @property
    def num_cpu_blocks(self) -> int:
        """Host blocks of the tier."""
        return self._num_cpu_blocks

    @property
    def blocks_per_chunk(self) -> int:
        """GPU blocks that one host block holds."""
        return self._k

    @property
    def page_bytes(self) -> list[int]:
        """Bytes that one GPU block of each group takes in host memory."""
        return [group.row_bytes for group in self._groups]

    @property
    def host(self) -> npt.NDArray[np.uint8]:
        """The host tier, of shape ``(rows, row_bytes)`` with k rows for each host block, uint8."""
        return self._host

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier; 0 after ``shutdown``."""
        return self._host.nbytes

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start one job."""
        if self._closed:
            return False
        if isinstance(job_id, bool) or not isinstance(job_id, int):
            raise TransferSpecError(f"XFER-5: job_id must be an int, got {job_id!r}")
        if job_id in self._in_flight:
            raise TransferSpecError(
                f"XFER-5: job_id {job_id} is in flight; take its result with get_finished() first"
            )
        gpu, cpu, to_host = _sides(spec)
        moves = self._pair(gpu, cpu, to_host)
        num_bytes = sum(group.row_bytes * len(blocks) for group, blocks, _ in moves)
        self._copier.submit(Job(job_id, to_host, moves, self._host, num_bytes))
        self._in_flight.add(job_id)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call, in order, without blocking."""
        results = self._copier.poll()
        self._in_flight.difference_update(result.job_id for result in results)
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until each of these jobs has ended; unknown ids are ignored."""
        for job_id in job_ids:
            self._copier.wait(job_id)

    def shutdown(self) -> None:
        """Finish or drop the jobs in flight and release memory; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._copier.close()
            self._groups = []
            self._host = np.zeros((0, 1), np.uint8)

    def _pair(
        self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, to_host: bool
    ) -> list[tuple[Group, Ids, Ids]]:
        """Pair GPU blocks with host rows, group after group, and check all ids."""
        gpu_ids, host_ids = _as_ids(MEDIUM_GPU, gpu.block_ids), _as_ids(MEDIUM_CPU, cpu.block_ids)
        if len(gpu.group_sizes) != len(self._groups):
            raise TransferSpecError(
                f"XFER-1: group_sizes names {len(gpu.group_sizes)} KV-cache groups, but this "
                f"worker has {len(self._groups)}"
            )
        k, gpu_end, host_end = self._k, 0, 0
        named = []
        for index, size in enumerate(map(int, gpu.group_sizes)):  # small numpy ints wrap around
            if not size:
                continue
            skip = int(gpu.block_indices[index]) % k
            gpu_at, gpu_end = gpu_end, gpu_end + size
            host_at, host_end = host_end, host_end - (-(skip + size) // k)
            if host_end > len(host_ids):
                raise TransferSpecError(
                    f"XFER-1: group {index} needs {host_end - host_at} host blocks for {size} GPU "
                    f"blocks after {skip} skipped blocks ({k} GPU blocks per host block), but the "
                    f"CPU spec has only {len(host_ids) - host_at} of its {len(host_ids)} host "
                    "blocks left"
                )
            named.append((index, skip, gpu_ids[gpu_at:gpu_end], host_ids[host_at:host_end]))
        if (gpu_end, host_end) != (len(gpu_ids), len(host_ids)):
            raise TransferSpecError(
                f"XFER-1: the groups need {gpu_end} GPU blocks and {host_end} host blocks, but "
                f"the specs name {len(gpu_ids)} and {len(host_ids)}"
            )
        num_host = len(self._seen_host)
        if not (_all_below(gpu_ids, self._fewest_blocks) and _all_below(host_ids, num_host)):
            for index, _, blocks, chunks in named:
                _check_range(MEDIUM_GPU, index, blocks, self._groups[index].num_blocks)
                _check_range(MEDIUM_CPU, index, chunks, num_host)
        if to_host:
            twice = _duplicate(host_ids, self._seen_host)
            if twice is not None:
                raise TransferSpecError(
                    f"XFER-1: host block {twice} is the destination of two pages"
                )
        elif _duplicate(gpu_ids, self._seen_gpu) is not None:
            self._check_gpu_destinations([(index, blocks) for index, _, blocks, _ in named])
        moves = []
        for index, skip, blocks, chunks in named:
            rows = chunks
            if k > 1:
                position = np.arange(skip, skip + len(blocks))
                rows = chunks[position // k] * k + position % k
            moves.append((self._groups[index], blocks, rows))
        return moves

    def _check_gpu_destinations(self, named: Sequence[tuple[int, Ids]]) -> None:
        """Refuse a job in which two pages of one tensor have the same destination."""
        by_tensor: dict[int, list[tuple[int, Ids]]] = {}
        for index, blocks in named:
            for address in self._groups[index].addresses.tolist():
                by_tensor.setdefault(address, []).append((index, blocks))
        for users in by_tensor.values():
            twice = _duplicate(np.concatenate([blocks for _, blocks in users]), self._seen_gpu)
            if twice is not None:
                groups = [index for index, blocks in users if twice in blocks]
                raise TransferSpecError(
                    f"XFER-1: GPU block {twice} is the destination of two pages of one tensor "
                    f"(groups {groups})"
                )


def _sides(spec: TransferSpec) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec, bool]:
    """Return the GPU side, the host side, and whether the GPU side is the source."""
    src, dst = spec
    if isinstance(src, GPULoadStoreSpec) and isinstance(dst, CPULoadStoreSpec):
        return src, dst, True
    if isinstance(src, CPULoadStoreSpec) and isinstance(dst, GPULoadStoreSpec):
        return dst, src, False
    described = " -> ".join(
        f"{type(side).__name__} (medium {getattr(side, 'medium', None)!r})" for side in (src, dst)
    )
    raise TransferSpecError(
        f"XFER-1: a transfer pairs a GPULoadStoreSpec with a CPULoadStoreSpec, got {described}"
    )


def _as_ids(medium: str, ids: Sequence[int]) -> Ids:
    # A copy, because the job may run after the caller has changed its list.
    if isinstance(ids, list) and ids and type(ids[0]) is int:
        try:
            return np.frombuffer(array("q", ids), np.int64)  # faster than numpy does
        except (TypeError, OverflowError):
            pass  # said below
    try:
        found = np.array(ids)
    except (ValueError, OverflowError):
        found = np.array(None)
    if found.shape == (0,):
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TransferSpecError(
            f"XFER-1: {medium} block_ids must be a flat sequence of ints, got {reprlib.repr(ids)}"
        )
    return found.astype(np.int64, copy=False)


def _all_below(ids: Ids, bound: int) -> bool:
    # As an unsigned number, a negative id is above every bound, so one pass is enough.
    return not len(ids) or int(ids.view(np.uint64).max()) < bound


def _check_range(medium: str, group: int, ids: Ids, bound: int) -> None:
    bad = ids[(ids < 0) | (ids >= bound)]
    if len(bad):
        raise TransferSpecError(
            f"XFER-1: {medium} block id {bad[0]} of group {group} is out of range: "
            f"ids are 0 to {bound - 1} ({bound} blocks)"
        )


def _duplicate(ids: Ids, seen: Ids) -> int | None:
    """Return an id that occurs twice, or None.

    Args:
        ids: Ids, each of which is an index into ``seen``.
        seen: Scratch array, in which each id records the last position at which it occurs, so that
            an earlier position of the same id differs. So the search needs no sort, and the array
            is never cleared.
    """
    order = np.arange(len(ids))
    seen[ids] = order
    lost = np.flatnonzero(seen[ids] != order)
    return int(ids[lost[0]]) if len(lost) else None


if TYPE_CHECKING:

    def _keeps_the_contract(worker: CPUGPUTransferWorker) -> TransferWorker:
        return worker
