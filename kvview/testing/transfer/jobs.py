"""XFER-1, 3 and 5: large jobs, many on one page, ids as numpy has them, and the end."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from typing import Any

from kvview.errors import TransferSpecError
from kvview.testing.breathing import new_threads_breathe
from kvview.testing.checks import check
from kvview.testing.harness import Capability, Factory
from kvview.testing.profiles import current_profile
from kvview.testing.transfer.driver import Part, TransferDriver, transfer_check
from kvview.transfer import CPULoadStoreSpec


def _whole(worker: TransferDriver, group: int) -> Part:
    """As many blocks of a group as one job can move."""
    blocks, chunks = worker.blocks_of(group), worker.chunks_of(group)
    return Part(blocks[: len(chunks) * worker.k], chunks[: -(-len(blocks) // worker.k)])


# --- large jobs ---


@transfer_check("XFER-1")
def check_xfer_1_large_jobs_come_back_exactly(worker: TransferDriver) -> None:
    """All blocks of a group in one job, then all of every group."""
    parts = {group: _whole(worker, group) for group in range(len(worker.groups))}
    jobs = [*({group: part} for group, part in parts.items()), parts]
    for job in jobs:
        worker.store(job)
        worker.finish()
        for group, part in job.items():
            worker.scramble(group, part.blocks)
        backwards = {
            group: replace(part, blocks=worker.blocks_of(group)[: len(part.blocks)][::-1])
            for group, part in job.items()
        }
        for loaded in (backwards, job):
            worker.load(loaded)
            worker.finish()
            worker.check_bytes("a large job comes back exactly")


@transfer_check("XFER-3")
def check_xfer_3_small_jobs_wait_for_large_ones(worker: TransferDriver) -> None:
    """Jobs of any size, back to back, on one page of each group: none overtakes another."""
    groups = range(len(worker.groups))
    whole = {group: _whole(worker, group) for group in groups}
    for paused in (False, True):
        for group in groups:
            blocks, chunk = worker.blocks_of(group), worker.chunks_of(group)[:1]
            if paused:
                worker.pause()
            for block in blocks[1:-1]:
                worker.store(whole)
                worker.store({group: Part([block], chunk)})
                worker.load({group: Part(blocks[-1:], chunk)})
            worker.resume()
            worker.finish()
            worker.load({group: Part(blocks[:1], chunk)})
            worker.finish()
            worker.check_bytes("a small job waits for the large one before it")


@transfer_check("XFER-3")
def check_xfer_3_many_jobs_on_one_page(worker: TransferDriver) -> None:
    """Hundreds of stores and loads over the same few pages, as fast as they are accepted."""
    rng = random.Random(current_profile().seed or 0)
    for group in range(len(worker.groups)):
        blocks, chunks = worker.blocks_of(group)[:4], worker.chunks_of(group)[:2]
        for chunk in chunks:
            worker.store({group: Part(blocks[:1], [chunk])})
        for _ in range(60):
            part = Part([rng.choice(blocks)], [rng.choice(chunks)])
            worker.store({group: part}) if rng.random() < 0.5 else worker.load({group: part})
        worker.finish()
        worker.check_bytes("jobs on one page run in the order of submission")


# --- what a spec may name ---


@transfer_check("XFER-1")
def check_xfer_1_numpy_ids_are_ids(worker: TransferDriver) -> None:
    """Arrays, and lists of their scalars, are moved exactly or refused before anything is."""
    import numpy as np  # torch, which every worker has, brings it

    part = _whole(worker, 0)
    gpu, tier = worker.sides({0: part})
    worker.give_name(np, "np", "import numpy as np")
    worker.store({0: part})
    worker.finish()
    worker.scramble(0, part.blocks)
    for number, dtype in enumerate((np.int64, np.int32, np.uint16)):
        blocks: Any = np.array(part.blocks, dtype)
        chunks: Any = np.array(part.chunks, dtype)
        as_arrays = replace(gpu, block_ids=blocks)
        as_scalars = replace(
            gpu,
            block_ids=list(blocks),
            group_sizes=list(np.array(gpu.group_sizes, dtype)),
            block_indices=list(np.array(gpu.block_indices, dtype)),
        )
        for way, named in enumerate((as_arrays, as_scalars)):
            pages = tier
            if not worker.can(Capability.TIER_SPEC):
                pages = CPULoadStoreSpec(chunks if way else list(chunks))
            if _is_taken(worker, 800 + 2 * number + way, (pages, named)):
                worker.expect_loaded({0: part})
            worker.check_bytes("ids from numpy are ids, or refused before anything is moved")
            worker.scramble(0, part.blocks)


def _is_taken(worker: TransferDriver, job_id: int, spec: tuple[object, object]) -> bool:
    """Whether a load is accepted, and ends well; it may be refused."""
    code = f"worker.transfer_async({job_id}, {spec})"
    try:
        worker.worker.transfer_async(job_id, spec)
    except TransferSpecError:
        worker.line(f"with suppress(TransferSpecError): {code}")
        return False
    except Exception as error:
        worker.line(code)
        worker.fail(f"{code} is done or refused", repr(error), "TransferSpecError at most")
    worker.line(code)
    worker.call(worker.worker, "wait", [job_id])
    results = list(worker.call(worker.worker, "get_finished"))
    said = [(result.job_id, result.success) for result in results]
    worker.equal(said, [(job_id, True)], "an accepted job succeeds")
    return True


@transfer_check("XFER-1")
def check_xfer_1_gpu_page_is_loaded_once_wherever_it_is_named(worker: TransferDriver) -> None:
    """First and last of a job, in groups that share a tensor, and in one that is alone."""
    parts = {group: _whole(worker, group) for group in range(len(worker.groups))}
    worker.store(parts)
    worker.finish()
    for group, part in parts.items():
        blocks = [*part.blocks[:-1], part.blocks[0]]
        gpu, tier = worker.sides({**parts, group: replace(part, blocks=blocks)})
        worker.refused(TransferSpecError, worker.worker, "transfer_async", 900, (tier, gpu))
        tensors = {number for number, _ in worker.groups[group]}
        for other in range(group):
            same = {
                one: Part([parts[group].blocks[0]], parts[one].chunks[:1]) for one in (other, group)
            }
            if tensors & {number for number, _ in worker.groups[other]}:
                gpu, tier = worker.sides(same)
                spec = (tier, gpu)
                worker.refused(TransferSpecError, worker.worker, "transfer_async", 900, spec)
            else:
                worker.load(same)
                worker.finish()
                worker.check_bytes("one block id in two tensors is two pages")
    worker.check_bytes("a refused job moves nothing")


@transfer_check("XFER-1")
def check_xfer_1_host_page_is_stored_once_wherever_it_is_named(worker: TransferDriver) -> None:
    """By the first and the last group of one job too."""
    parts = {group: _whole(worker, group) for group in range(len(worker.groups))}
    worker.store(parts)
    worker.finish()
    first, last = 0, len(parts) - 1
    blocks = worker.blocks_of(0)
    twice = [parts[first].chunks[0]] * 2
    jobs = [{0: Part(blocks[:2], twice, worker.k - 1)}]
    if last:
        one = {first: Part(blocks[:1], twice[:1])}
        jobs.append({**one, last: Part(worker.blocks_of(last)[:1], twice[:1])})
    for job in jobs:
        worker.refused(TransferSpecError, worker.worker, "transfer_async", 900, worker.sides(job))
    for group, part in parts.items():
        worker.scramble(group, part.blocks)
    worker.load(parts)
    worker.finish()
    worker.check_bytes("a refused job moves nothing")


# --- many, and the end ---


@check("XFER-5", contract="transfer")
def check_xfer_5_report_is_there_when_wait_returns(factory: Factory) -> None:
    """However slowly the threads of the worker go on, and whatever else is waited for."""
    with new_threads_breathe():
        worker = TransferDriver(factory, "XFER-5")
        try:
            part = Part(worker.blocks_of(0)[:1], worker.chunks_of(0)[:1])
            worker.store({0: part})
            worker.finish()
            for _ in range(10):
                job_id = worker.load({0: part})
                worker.call(worker.worker, "wait", [10**9, job_id])
                results = worker.call(worker.worker, "get_finished")
                told = [result.job_id for result in results]
                worker.equal(told, [job_id], "what was waited for is reported")
        finally:
            worker.end()


@transfer_check("XFER-5")
def check_xfer_5_each_of_thousands_of_jobs_is_reported(worker: TransferDriver) -> None:
    """Before anybody asks for reports; a worker that takes no more says so at once."""
    parts = {0: Part(worker.blocks_of(0)[:1], worker.chunks_of(0)[:1])}
    worker.store(parts)
    worker.finish()
    worker.scramble(0, parts[0].blocks)
    gpu, tier = worker.sides(parts)
    worker.pause()
    accepted = []
    with worker.unrecorded():
        for job_id in range(1000, 3000):
            if not worker.call(worker.worker, "transfer_async", job_id, (tier, gpu)):
                break
            accepted.append(job_id)
    worker.resume()
    worker.expect_loaded(parts)
    with worker.unrecorded():
        worker.call(worker.worker, "wait", accepted)
    results = worker.call(worker.worker, "get_finished")
    told = sorted(result.job_id for result in results)
    what = f"each of {len(accepted)} jobs is reported exactly once"
    worker.true(told == accepted, what, f"{len(told)} reports", f"{len(accepted)}")
    worker.check_bytes("jobs that came together are run")


@transfer_check("XFER-5")
def check_xfer_5_shutdown_ends_what_is_in_flight(worker: TransferDriver) -> None:
    """Ended or dropped: nothing is written after it, and a success that is told is true."""
    groups = range(len(worker.groups))
    parts = {group: _whole(worker, group) for group in groups}
    worker.store(parts)
    worker.finish()
    worker.pause()
    jobs = {}
    for group, part in parts.items():
        worker.scramble(group, part.blocks)
        jobs[worker.load({group: part})] = group
    # A worker that ends its jobs waits in shutdown until then; one that does not is back before.
    resumed = threading.Timer(0.1, lambda: worker.harness.resume())
    if worker.can(Capability.PAUSE):
        worker.line("import threading; threading.Timer(0.1, h.resume).start()")
        resumed.start()
    worker.call(worker.worker, "shutdown")
    # One picture for both looks: between them is when a worker that goes on would write.
    before = {at: flat.clone() for at, flat in worker._flat.items()}
    _check_bytes_stay(worker, before)
    if worker.can(Capability.PAUSE):
        resumed.join()
        worker._is_paused = False
    _check_bytes_stay(worker, before)
    results = list(worker.call(worker.worker, "get_finished"))
    told = [result.job_id for result in results]
    worker.true(len(told) == len(set(told)), "a job is reported once", told, "no repeat")
    unknown = sorted(set(told) - set(jobs))
    worker.equal(unknown, [], "only jobs that were accepted are reported")
    done = {jobs[result.job_id] for result in results if result.success}
    for group in groups:
        if group not in done:
            worker.forget(group, parts[group].blocks)
    worker.check_bytes("a job that is said to have succeeded has moved its bytes")
    accepted = worker.call(worker.worker, "transfer_async", 900, worker.sides(parts))
    worker.equal(accepted, False, "no job is accepted after shutdown")
    worker.call(worker.worker, "wait", [*jobs, 900])
    worker.call(worker.worker, "shutdown")
    worker.equal(list(worker.call(worker.worker, "get_finished")), [], "nothing is told again")


def _check_bytes_stay(worker: TransferDriver, before: dict[Any, Any]) -> None:
    """Nobody writes for as long as a worker that goes on would need."""
    for _ in range(100):
        time.sleep(0.001)
        for at, flat in worker._flat.items():
            is_same = bool((flat == before[at]).all())
            worker.true(is_same, "nothing is written after shutdown", "new bytes", "none")
