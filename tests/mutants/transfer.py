"""Wrong transfer workers."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvview import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    ConfigError,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    TransferResult,
    TransferSpecError,
)
from kvview.testing import Mutant
from kvview_reference.harness import ReferenceTransfer

from .planting import planter

if TYPE_CHECKING:
    from kvview_reference.transfer import CPUGPUTransferWorker

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)


class WrongWorker(ReferenceTransfer):
    """The worker, with methods of this harness put in the place of its own."""

    def make_worker(self) -> CPUGPUTransferWorker:
        worker = super().make_worker()
        self.spoil(worker)
        return worker

    def spoil(self, worker: Any) -> None:
        """Make the worker wrong."""


def _with_gpu(spec: Any, change: Any) -> Any:
    return tuple(change(side) if isinstance(side, GPULoadStoreSpec) else side for side in spec)


@planted("XFER-1", "vllm#28950")
class IgnoresTheFirstIndex(WrongWorker):
    """Every transfer begins at the start of a host block."""

    def spoil(self, worker: Any) -> None:
        start = worker.transfer_async

        def transfer_async(job_id: int, spec: Any) -> bool:
            zeros = [0] * len(self.kv_caches.group_data_refs)
            return bool(start(job_id, _with_gpu(spec, lambda s: replace(s, block_indices=zeros))))

        worker.transfer_async = transfer_async


@planted("XFER-1", "vllm#50687")
class TakesAnyBlockId(WrongWorker):
    """Ids that name no block are replaced by block 0 instead of refused."""

    def spoil(self, worker: Any) -> None:
        start = worker.transfer_async

        def transfer_async(job_id: int, spec: Any) -> bool:
            def clamp(side: Any) -> Any:
                ids = [b if 0 <= b < self.num_blocks else 0 for b in side.block_ids]
                return replace(side, block_ids=ids)

            return bool(start(job_id, _with_gpu(spec, clamp)))

        worker.transfer_async = transfer_async


@planted("XFER-1")
class MovesTheFirstGroupOnly(WrongWorker):
    """A job of several groups moves the blocks of the first one."""

    def spoil(self, worker: Any) -> None:
        pair = worker._pair
        worker._pair = lambda *sides: pair(*sides)[:1]


@planted("XFER-1")
class MovesTheFirstTensorOnly(WrongWorker):
    """Of a group with several tensors the pages of the first are moved."""

    def make_worker(self) -> CPUGPUTransferWorker:
        caches = self.kv_caches
        first = [refs[:1] for refs in caches.group_data_refs]
        self.kv_caches = CanonicalKVCaches(caches.tensors, first)
        worker = super().make_worker()
        self.kv_caches = caches
        return worker


@planted("XFER-2")
class WritesThePadding(WrongWorker):
    """Whole rows are moved: what another group keeps behind a page is overwritten."""

    def make_worker(self) -> CPUGPUTransferWorker:
        caches = self.kv_caches
        whole = [
            [
                CanonicalKVCacheRef(ref.tensor_idx, caches.tensors[ref.tensor_idx].page_size_bytes)
                for ref in refs
            ]
            for refs in caches.group_data_refs
        ]
        self.kv_caches = CanonicalKVCaches(caches.tensors, whole)
        worker = super().make_worker()
        self.kv_caches = caches
        return worker


@planted("XFER-2")
class ClearsTheHostBlockFirst(WrongWorker):
    """A store of one GPU block clears the rest of its host block."""

    def spoil(self, worker: Any) -> None:
        start = worker.transfer_async

        def transfer_async(job_id: int, spec: Any) -> bool:
            accepted = bool(start(job_id, spec))
            if isinstance(spec[1], CPULoadStoreSpec):
                worker.wait([job_id])
                for index in spec[0].block_indices:
                    for chunk in spec[1].block_ids if index else ():
                        first = chunk * self.blocks_per_chunk
                        worker._host[first : first + index % self.blocks_per_chunk] = 0
                        last = first + index % self.blocks_per_chunk + 1
                        worker._host[last : first + self.blocks_per_chunk] = 0
            return accepted

        worker.transfer_async = transfer_async


@planted("XFER-2")
class WritesTheNextHostBlockToo(WrongWorker):
    """A store runs over the end of its host block."""

    def spoil(self, worker: Any) -> None:
        start = worker.transfer_async

        def transfer_async(job_id: int, spec: Any) -> bool:
            accepted = bool(start(job_id, spec))
            if isinstance(spec[1], CPULoadStoreSpec) and spec[1].block_ids:
                worker.wait([job_id])
                after = (max(spec[1].block_ids) + 1) * self.blocks_per_chunk
                worker._host[after : after + 1] = 0
            return accepted

        worker.transfer_async = transfer_async


@planted("XFER-3", "vllm#45704")
class RunsLoadsOnAStreamOfTheirOwn(WrongWorker):
    """Loads do not wait for stores: garbled output."""

    def spoil(self, worker: Any) -> None:
        engine = worker._copier
        submit = engine.submit
        engine.submit = lambda job: submit(job) if job.to_host else engine._run(job)


@planted("XFER-3")
class RunsStoresOnAStreamOfTheirOwn(WrongWorker):
    """Stores do not wait for loads: blocks are stored before they are there."""

    def spoil(self, worker: Any) -> None:
        engine = worker._copier
        submit = engine.submit
        engine.submit = lambda job: engine._run(job) if job.to_host else submit(job)


@planted("XFER-4")
class ReportsFailuresAsSuccess(WrongWorker):
    """An error in the copy is logged, and the job reported as done."""

    def spoil(self, worker: Any) -> None:
        finished = worker.get_finished
        worker.get_finished = lambda: [
            TransferResult(result.job_id, True, result.transfer_size) for result in finished()
        ]


@planted("XFER-4")
class LosesFailures(WrongWorker):
    """A job that failed is never reported: whoever waits for it waits for ever."""

    def spoil(self, worker: Any) -> None:
        finished = worker.get_finished
        worker.get_finished = lambda: [result for result in finished() if result.success]


def _without_block(job: Any, number: int) -> Any:
    """The job, but for one of its blocks."""
    moves, at = [], 0
    for group, blocks, rows in job.moves:
        keep = np.arange(at, at + len(blocks)) != number
        moves.append((group, blocks[keep], rows[keep]))
        at += len(blocks)
    return replace(job, moves=moves)


@planted("XFER-4")
class ReportsSuccessWithoutABlock(WrongWorker):
    """A block that cannot be stored is left out, and the store reported as done."""

    def fail_block(self, number: int) -> None:
        copier: Any = self.worker._copier
        submit = copier.submit

        def submit_one(job: Any) -> None:
            copier.submit = submit
            submit(_without_block(job, number))

        copier.submit = submit_one


class ChangesResults(WrongWorker):
    """A worker whose results are changed by ``change``."""

    def spoil(self, worker: Any) -> None:
        finished = worker.get_finished
        worker.get_finished = lambda: [self.change(result) for result in finished()]

    def change(self, result: TransferResult) -> TransferResult:
        """Make a result wrong."""
        return result


@planted("XFER-4")
class SaysThatAllWasMoved(ChangesResults):
    """Of a failed store every block is said to be there."""

    def change(self, result: TransferResult) -> TransferResult:
        return replace(result, moved=result.moved and [True] * len(result.moved))


@planted("XFER-4")
class SaysWhatWasMovedInReverse(ChangesResults):
    """The entries of ``moved`` are those of the blocks from the last to the first."""

    def change(self, result: TransferResult) -> TransferResult:
        return replace(result, moved=result.moved and list(result.moved)[::-1])


@planted("XFER-4")
class SaysWhatWasMovedByGroup(ChangesResults):
    """``moved`` has an entry a group, not one a block."""

    def change(self, result: TransferResult) -> TransferResult:
        return replace(result, moved=result.moved and result.moved[:1])


@planted("XFER-4")
class SaysWhatALoadMoved(ChangesResults):
    """A load that failed is said to have succeeded in part: its blocks would be computed with."""

    def change(self, result: TransferResult) -> TransferResult:
        return result if result.success else replace(result, moved=[False, False])


def without_the_last(job: Any) -> Any:
    """The job less one page of its last group."""
    *others, (group, blocks, rows) = job.moves
    return replace(job, moves=[*others, (group, blocks[:-1], rows[:-1])])


@planted("XFER-1")
class SkipsTheCopyOnTheSpot(WrongWorker):
    """Jobs small enough for the caller's thread are reported, and not copied."""

    def spoil(self, worker: Any) -> None:
        copier = worker._copier
        copy, caller = copier._copy, threading.get_ident()
        copier._copy = lambda job: threading.get_ident() == caller or copy(job)


@planted("XFER-1")
class LosesTheShareOfTheOtherThreads(WrongWorker):
    """Of jobs that go to a thread the last copy is left out."""

    def spoil(self, worker: Any) -> None:
        copier = worker._copier
        copy, caller = copier._copy, threading.get_ident()

        def copy_less(job: Any) -> None:
            copy(job if threading.get_ident() == caller else without_the_last(job))

        copier._copy = copy_less


@planted("XFER-1")
class TakesADestinationTwice(WrongWorker):
    """Of two pages for one destination the last one wins."""

    def spoil(self, worker: Any) -> None:
        start = worker.transfer_async

        def transfer_async(job_id: int, spec: Any) -> bool:
            try:
                return bool(start(job_id, spec))
            except TransferSpecError as error:
                if "two pages" not in str(error):
                    raise
                return True

        worker.transfer_async = transfer_async


@planted("XFER-1")
class RefusesASourceTwice(WrongWorker):
    """A page that two requests of a step want is an error."""

    def spoil(self, worker: Any) -> None:
        start = worker.transfer_async

        def transfer_async(job_id: int, spec: Any) -> bool:
            if len({*spec[0].block_ids}) < len(spec[0].block_ids):
                raise TransferSpecError("XFER-1: a source is named twice")
            return bool(start(job_id, spec))

        worker.transfer_async = transfer_async


@planted("XFER-6")
class IgnoresTheComputeStream(WrongWorker):
    """Blocks are stored when they are submitted: what is computed just now is not in them."""

    def make_worker(self) -> CPUGPUTransferWorker:
        caches = self.kv_caches
        self.kv_caches = CanonicalKVCaches(caches.tensors, caches.group_data_refs)
        worker = super().make_worker()
        self.kv_caches = caches
        return worker


@planted("XFER-6")
class LoadsBesideCompute(WrongWorker):
    """Only stores wait for compute: kernels of the step before write into what was loaded."""

    def spoil(self, worker: Any) -> None:
        copier = worker._copier
        submit = copier.submit
        copier.submit = lambda job: submit(job) if job.to_host else copier._run(job)


@planted("XFER-6")
class MarksComputeLate(WrongWorker):
    """The mark is made, and not waited for, on the worker's thread."""

    def spoil(self, worker: Any) -> None:
        copier = worker._copier
        run = copier._run
        copier._run = lambda job, mark=None: run(job)


@planted("XFER-6")
class WaitsForComputeOnTheCallersThread(WrongWorker):
    """The model stands still until its own kernels have ended."""

    def spoil(self, worker: Any) -> None:
        start = worker.transfer_async

        def transfer_async(job_id: int, spec: Any) -> bool:
            self._compute.record_event().synchronize()
            return bool(start(job_id, spec))

        worker.transfer_async = transfer_async


@planted("XFER-6")
class AsksForComputeUntilItHasEnded(WrongWorker):
    """The same, by polling."""

    def spoil(self, worker: Any) -> None:
        start = worker.transfer_async

        def transfer_async(job_id: int, spec: Any) -> bool:
            mark = self._compute.record_event()
            while not mark.query():
                pass
            return bool(start(job_id, spec))

        worker.transfer_async = transfer_async


@planted("XFER-6")
class RunsTheLastJobFirst(WrongWorker):
    """Jobs that wait for compute run in another order than submitted."""

    def spoil(self, worker: Any) -> None:
        copier = worker._copier
        submit = copier.submit
        waiting: list[Any] = []

        def run_last(mark: Any) -> None:
            mark.synchronize()
            copier._run(waiting.pop())

        def submit_together(job: Any) -> None:
            mark = self._compute.record_event()
            if mark.query():
                submit(job)
                return
            waiting.append(job)
            copier._last = copier._futures[job.job_id] = copier._lane.submit(run_last, mark)

        copier.submit = submit_together


@planted("XFER-5", "vllm#46014")
class CopiesAtOnce(WrongWorker):
    """Every job is done when it is submitted: what a late completion breaks stays hidden."""

    def spoil(self, worker: Any) -> None:
        worker._copier.submit = worker._copier._run


@planted("XFER-5")
class ReportsTheLastJobAgain(WrongWorker):
    """The result that was reported last comes once more with the next call."""

    def spoil(self, worker: Any) -> None:
        finished = worker.get_finished
        last: list[TransferResult] = []

        def get_finished() -> list[TransferResult]:
            results: list[TransferResult] = finished()
            again, last[:] = list(last), results[-1:]
            return again + results

        worker.get_finished = get_finished


@planted("XFER-5")
class RefusesEmptyJobs(WrongWorker):
    """A job that moves nothing raises."""

    def spoil(self, worker: Any) -> None:
        start = worker.transfer_async

        def transfer_async(job_id: int, spec: Any) -> bool:
            if not spec[0].block_ids:
                raise TransferSpecError("nothing to move")
            return bool(start(job_id, spec))

        worker.transfer_async = transfer_async


@planted("XFER-5")
class ShutsDownOnce(WrongWorker):
    """A second shutdown raises."""

    def spoil(self, worker: Any) -> None:
        shutdown = worker.shutdown
        times = iter((shutdown,))
        worker.shutdown = lambda: next(times)()


@planted("XFER-5")
class GoesOnAfterShutdown(WrongWorker):
    """Jobs in flight write into memory that is somebody else's by then."""

    def spoil(self, worker: Any) -> None:
        copier = worker._copier

        def close() -> None:
            copier._lane.shutdown(wait=False)

        copier.close = close


@planted("XFER-5")
class TakesJobsAfterShutdown(WrongWorker):
    """A job that comes too late is accepted, and never heard of again."""

    def spoil(self, worker: Any) -> None:
        start = worker.transfer_async
        worker.transfer_async = lambda job_id, spec: bool(start(job_id, spec)) or worker._closed


@planted("XFER-1")
class LosesTheEndOfLargeJobs(WrongWorker):
    """Of jobs of more than 2 MiB the last copy is left out."""

    def spoil(self, worker: Any) -> None:
        copy = worker._copier._copy

        def copy_less(job: Any) -> None:
            copy(without_the_last(job) if job.num_bytes > 2 << 20 else job)

        worker._copier._copy = copy_less


@planted("XFER-1")
class TakesAnArrayForItsFirstId(WrongWorker):
    """Ids in an array are replaced by the first one and those behind it."""

    def spoil(self, worker: Any) -> None:
        start = worker.transfer_async

        def transfer_async(job_id: int, spec: Any) -> bool:
            def change(side: Any) -> Any:
                ids = side.block_ids
                return replace(side, block_ids=sorted(ids) if hasattr(ids, "dtype") else ids)

            return bool(start(job_id, _with_gpu(spec, change)))

        worker.transfer_async = transfer_async


@planted("XFER-1")
class ComparesNeighboursOnly(WrongWorker):
    """A GPU page that is named twice is seen when its mentions stand side by side."""

    def spoil(self, worker: Any) -> None:
        start = worker.transfer_async

        def transfer_async(job_id: int, spec: Any) -> bool:
            try:
                return bool(start(job_id, spec))
            except TransferSpecError as error:
                ids = list(spec[1].block_ids)
                if "two pages" not in str(error) or any(a == b for a, b in pairwise(ids)):
                    raise
                return True

        worker.transfer_async = transfer_async


@planted("XFER-3")
class LetsSmallJobsOvertakeLargeOnes(WrongWorker):
    """A job for the caller's thread is run there, whatever large ones wait."""

    def spoil(self, worker: Any) -> None:
        copier = worker._copier
        submit = copier.submit

        def submit_one(job: Any) -> None:
            if job.num_pages > 4:
                copier._lane.submit(time.sleep, 0.002)  # as long as a really large one takes
                large.append(job)
                submit(job)
            elif large:
                copier._run(job)
            else:
                submit(job)

        large: list[Any] = []
        copier.submit = submit_one


@planted("XFER-5")
class KeepsAThousandReports(WrongWorker):
    """The oldest of more than 1,024 reports that nobody asked for is forgotten."""

    def spoil(self, worker: Any) -> None:
        get_finished = worker.get_finished
        worker.get_finished = lambda: list(get_finished())[-1024:]


@planted("XFER-5")
class StopsWaitingAtAnUnknownJob(WrongWorker):
    """``wait`` returns at the first id that it does not know."""

    def spoil(self, worker: Any) -> None:
        ask, get_finished = worker.wait, worker.get_finished
        known = set(range(10**6))
        late: list[bool] = []

        def wait(job_ids: Any) -> None:
            if known.issuperset(job_ids):
                ask(job_ids)
            else:
                late.append(True)

        worker.wait = wait
        worker.get_finished = lambda: [] if late and late.pop() else get_finished()


@planted("XFER-1")
class RoundsIds(WrongWorker):
    """Block 3.5 is block 3."""

    def spoil(self, worker: Any) -> None:
        start = worker.transfer_async

        def transfer_async(job_id: int, spec: Any) -> bool:
            ids = [[int(b) if type(b) is float else b for b in side.block_ids] for side in spec]
            rounded = tuple(replace(side, block_ids=b) for side, b in zip(spec, ids, strict=True))
            return bool(start(job_id, rounded))

        worker.transfer_async = transfer_async


@planted("XFER-4")
class TakesAFailedStreamForAnEndedOne(WrongWorker):
    """What kernels left behind when they failed is stored."""

    def spoil(self, worker: Any) -> None:
        copier = worker._copier
        run = copier._run
        copier._compute_stream = _Forgiving(copier._compute_stream)
        copier._run = lambda job, mark=None: run(job, None if mark is None else _Forgiving(mark))


class _Forgiving:
    """A stream or a mark that keeps to itself what went wrong."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def record_event(self) -> Any:
        try:
            return self._inner.record_event()
        except RuntimeError:
            return self._inner.record_event()

    def query(self) -> bool:
        return bool(self._inner.query())

    def synchronize(self) -> None:
        with suppress(RuntimeError):
            self._inner.synchronize()


@planted("XFER-7")
class ServesWhatItWasMadeFor(ReferenceTransfer):
    """Caches that do not fit are found out about when a job names them."""

    def with_caches(self, kv_caches: Any, num_cpu_blocks: int) -> Any:
        try:
            return super().with_caches(kv_caches, num_cpu_blocks)
        except ConfigError:
            return super().with_caches(self.kv_caches, 1)


@planted("XFER-7")
class TakesTheMemoryThatThereIs(ReferenceTransfer):
    """A tier that does not fit is a smaller one, and nobody is told."""

    def with_caches(self, kv_caches: Any, num_cpu_blocks: int) -> Any:
        return super().with_caches(kv_caches, min(num_cpu_blocks, 1000))


@planted("XFER-5")
class KeepsItsCaches(ReferenceTransfer):
    """A worker that was shut down holds the KV caches for as long as somebody holds it."""

    def with_caches(self, kv_caches: Any, num_cpu_blocks: int) -> Any:
        worker: Any = super().with_caches(kv_caches, num_cpu_blocks)
        worker.kv_caches = kv_caches
        return worker
