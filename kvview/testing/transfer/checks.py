"""The laws of the transfer contract, one small scenario each."""

from __future__ import annotations

import random
from dataclasses import replace

from kvview.errors import TransferSpecError
from kvview.testing.harness import Capability
from kvview.testing.profiles import current_profile
from kvview.testing.transfer.driver import Part, Parts, TransferDriver, transfer_check
from kvview.transfer import GPULoadStoreSpec


def _part(worker: TransferDriver, group: int, num_blocks: int = 2, index: int = 0) -> Part:
    num_chunks = -(-(index % worker.k + num_blocks) // worker.k)
    return Part(worker.blocks_of(group)[:num_blocks], worker.chunks_of(group)[:num_chunks], index)


def _elsewhere(worker: TransferDriver, group: int, part: Part) -> Part:
    return replace(part, blocks=worker.blocks_of(group)[-len(part.blocks) :])


# --- XFER-1: exact bytes, exact specs ---


@transfer_check("XFER-1")
def check_xfer_1_each_group_comes_back_exactly(worker: TransferDriver) -> None:
    """A store and a load into other blocks, group by group."""
    for group in range(len(worker.groups)):
        part = _part(worker, group)
        worker.store({group: part})
        worker.finish()
        worker.scramble(group, part.blocks)
        worker.load({group: _elsewhere(worker, group, part)})
        worker.finish()
        worker.check_bytes(f"group {group} comes back exactly")


@transfer_check("XFER-1")
def check_xfer_1_all_groups_in_one_job(worker: TransferDriver) -> None:
    """One job with blocks of every group; then one that leaves the first group out."""
    parts = {group: _part(worker, group) for group in range(len(worker.groups))}
    worker.store(parts)
    worker.finish()
    for group, part in parts.items():
        worker.scramble(group, part.blocks)
    worker.load({group: part for group, part in parts.items() if group > 0} or parts)
    worker.finish()
    worker.check_bytes("every group of a job comes back exactly")
    worker.load(parts)
    worker.finish()
    worker.check_bytes("every group of a job comes back exactly")


@transfer_check("XFER-1")
def check_xfer_1_unaligned_chunks_come_back_exactly(worker: TransferDriver) -> None:
    """First blocks that do not begin a host block, and last ones that do not end one."""
    for group in range(len(worker.groups)):
        for index in range(worker.k + 1):
            num_blocks = min(3, len(worker.blocks_of(group)))
            part = _part(worker, group, num_blocks, index)
            worker.store({group: part})
            worker.finish()
            worker.scramble(group, part.blocks)
            worker.load({group: part})
            worker.finish()
            worker.check_bytes(f"blocks from number {index} on come back exactly")
            tail = Part(part.blocks[1:], part.chunks, index + 1)
            first = (index + 1) % worker.k == 0  # the tail begins the next host block
            worker.scramble(group, part.blocks)
            worker.load({group: replace(tail, chunks=part.chunks[1:]) if first else tail})
            worker.finish()
            worker.check_bytes(f"blocks from number {index + 1} on come back exactly")


@transfer_check("XFER-1")
def check_xfer_1_wrong_specs_are_refused(worker: TransferDriver) -> None:
    """Pages that do not exist and sides that do not pair up raise; nothing is started."""
    part = _part(worker, 0)
    gpu, tier = worker.sides({0: part})
    no_block = max(tensor.shape[0] for tensor in worker.tensors)
    rest, more = list(part.blocks[1:]), list(part.chunks[1:])
    one_group_more = GPULoadStoreSpec(gpu.block_ids, [*gpu.group_sizes, 0], [*gpu.block_indices, 0])
    wrong: list[tuple[object, object]] = [
        (replace(gpu, block_ids=[no_block, *rest]), tier),
        (replace(gpu, block_ids=[-1, *rest]), tier),
        (gpu, worker.tier([])),
        (gpu, worker.tier([*part.chunks, worker.chunks_of(0)[-1]])),
        (one_group_more, tier),
        (gpu, gpu),
        (tier, tier),
    ]
    if not worker.can(Capability.TIER_SPEC):  # else the checks know of no page that is none
        wrong += [(gpu, worker.tier([no_page, *more])) for no_page in (worker.num_cpu_blocks, -1)]
    worker.store({0: part})  # so that every host block has something in it
    worker.finish()
    for src, dst in wrong:
        worker.refused(TransferSpecError, worker.worker, "transfer_async", 900, (src, dst))
        worker.refused(TransferSpecError, worker.worker, "transfer_async", 900, (dst, src))
    worker.call(worker.worker, "wait", [900])
    got = list(worker.call(worker.worker, "get_finished"))
    worker.equal(got, [], "a refused job is not reported")
    worker.check_bytes("a refused job moves nothing")
    worker.load({0: part})
    worker.finish()
    worker.check_bytes("the worker goes on after a refused job")


@transfer_check("XFER-1")
def check_xfer_1_destination_is_named_once(worker: TransferDriver) -> None:
    """Two pages for one destination raise, in either direction."""
    blocks, chunks = worker.blocks_of(0), worker.chunks_of(0)
    across = Part(blocks[:2], chunks[:2], worker.k - 1)  # the end of a chunk, the next one's begin
    worker.store({0: across})
    worker.finish()
    onto_one_page = worker.sides({0: replace(across, chunks=[chunks[0]] * 2)})
    onto_one_block, tier = worker.sides({0: replace(across, blocks=[blocks[2]] * 2)})
    for spec in (onto_one_page, (tier, onto_one_block)):
        worker.refused(TransferSpecError, worker.worker, "transfer_async", 900, spec)
    worker.load({0: across})
    worker.finish()
    worker.check_bytes("a refused job moves nothing")


@transfer_check("XFER-1")
def check_xfer_1_source_may_be_named_twice(worker: TransferDriver) -> None:
    """One GPU block fills two pages, and one page two GPU blocks."""
    blocks, chunks = worker.blocks_of(0), worker.chunks_of(0)
    across = Part(blocks[:2], chunks[:2], worker.k - 1)
    worker.store({0: replace(across, blocks=[blocks[0]] * 2)})
    worker.load({0: replace(across, blocks=blocks[2:4])})
    worker.finish()
    worker.check_bytes("a block that is stored twice is in both pages")
    whole = blocks[: worker.k]
    if len(whole) == worker.k:
        worker.store({0: Part(whole, chunks[:1])})
        worker.load({0: replace(across, blocks=blocks[1:3], chunks=[chunks[0]] * 2)})
        worker.finish()
        worker.check_bytes("a page that is loaded twice is in both blocks")


# --- XFER-2: nothing else is written ---


@transfer_check("XFER-2")
def check_xfer_2_load_writes_the_named_pages_only(worker: TransferDriver) -> None:
    """Other blocks, other tensors, padding, and what lies between rows stay as they are."""
    for group in range(len(worker.groups)):
        part = _part(worker, group, 1)
        worker.store({group: part})
        worker.finish()
        worker.check_bytes("a store writes nothing on the GPU")
        worker.load({group: _elsewhere(worker, group, part)})
        worker.finish()
        worker.check_bytes("a load writes the named pages only")


@transfer_check("XFER-2")
def check_xfer_2_store_leaves_other_host_blocks(worker: TransferDriver) -> None:
    """What other host blocks hold survives a store beside them."""
    for group in range(len(worker.groups)):
        blocks, chunks = worker.blocks_of(group), worker.chunks_of(group)
        kept = [Part(blocks[:1], [chunk]) for chunk in chunks[::2]]
        for part in kept:
            worker.scramble(group, part.blocks)
            worker.store({group: part})
            worker.finish()
        for chunk in chunks[1::2]:
            worker.scramble(group, blocks[1:2])
            worker.store({group: Part(blocks[1:2], [chunk])})
            worker.finish()
        for part in kept:
            worker.load({group: part})
            worker.finish()
            worker.check_bytes("a store leaves other host blocks as they are")


@transfer_check("XFER-2")
def check_xfer_2_store_of_part_of_a_chunk_leaves_the_rest(worker: TransferDriver) -> None:
    """A host block that is filled one GPU block at a time holds all of them."""
    for group in range(len(worker.groups)):
        blocks, chunk = worker.blocks_of(group), worker.chunks_of(group)[0]
        together = blocks[: min(worker.k, len(blocks))]
        for index in reversed(range(len(together))):
            worker.store({group: Part([together[index]], [chunk], index)})
            worker.finish()
        worker.scramble(group, together)
        worker.load({group: Part(together, [chunk])})
        worker.finish()
        worker.check_bytes("a store of a part leaves the rest of the host block")


# --- XFER-3: order ---


@transfer_check("XFER-3")
def check_xfer_3_load_sees_the_store_before_it(worker: TransferDriver) -> None:
    """A load that is submitted behind the store of its page reads what was stored."""
    part = _part(worker, 0)
    worker.pause()
    worker.store({0: part})
    worker.load({0: _elsewhere(worker, 0, part)})
    worker.resume()
    worker.finish()
    worker.check_bytes("a load sees the store before it")


@transfer_check("XFER-3")
def check_xfer_3_store_sees_the_load_before_it(worker: TransferDriver) -> None:
    """A store that is submitted behind a load of its GPU page stores what was loaded."""
    blocks, chunks = worker.blocks_of(0), worker.chunks_of(0)
    worker.store({0: Part(blocks[:1], chunks[:1])})
    worker.finish()
    worker.pause()
    worker.load({0: Part(blocks[1:2], chunks[:1])})
    worker.store({0: Part(blocks[1:2], chunks[1:2])})
    worker.load({0: Part(blocks[2:3], chunks[1:2])})
    worker.resume()
    worker.finish()
    worker.check_bytes("a store sees the load before it")


@transfer_check("XFER-3")
def check_xfer_3_host_page_is_not_overwritten_before_it_was_read(worker: TransferDriver) -> None:
    """Store, load, store, load over one host page: each load gets what it should."""
    blocks, chunk = worker.blocks_of(0), worker.chunks_of(0)[:1]
    worker.pause()
    worker.store({0: Part(blocks[:1], chunk)})
    worker.load({0: Part(blocks[2:3], chunk)})
    worker.store({0: Part(blocks[1:2], chunk)})
    worker.load({0: Part(blocks[3:4], chunk)})
    worker.resume()
    worker.finish()
    worker.check_bytes("jobs on one page run in the order of submission")


# --- XFER-4: failures ---


@transfer_check("XFER-4", Capability.FAIL)
def check_xfer_4_failed_job_says_so(worker: TransferDriver) -> None:
    """A failed store, and a failed load, are reported with success False and an error."""
    part = _part(worker, 0)
    worker.store({0: part})
    worker.finish()
    other = replace(part, chunks=worker.chunks_of(0)[-len(part.chunks) :])
    for is_store in (True, False):
        worker.call(worker.harness, "fail_next")
        job_id = worker.store({0: other}) if is_store else worker.load({0: part})
        results = worker.results()
        said = [(result.job_id, result.success) for result in results]
        worker.equal(said, [(job_id, False)], "a failed job is reported as failed")
        worker.true(bool(results[0].error), "a failed job says what went wrong", results, "error")
    worker.forget(0, part.blocks)
    worker.load({0: part})
    worker.finish()
    worker.check_bytes("the worker goes on after failed jobs")


@transfer_check("XFER-4", Capability.FAIL_BLOCK)
def check_xfer_4_store_that_succeeds_in_part_says_which(worker: TransferDriver) -> None:
    """Whichever block fails, the job does; what it says was moved can be loaded."""
    parts = {group: _part(worker, group, index=1) for group in range(len(worker.groups))}
    places = [
        (group, number) for group, part in parts.items() for number in range(len(part.blocks))
    ]
    for lost in range(len(places)):
        for group, part in parts.items():
            worker.scramble(group, part.blocks)
        worker.call(worker.harness, "fail_block", lost)
        job_id = worker.store(parts)
        (result,) = worker.results()
        said = (result.job_id, result.success)
        worker.equal(said, (job_id, False), "a store that moved not all its blocks has failed")
        worker.true(bool(result.error), "a failed job says what went wrong", result, "error")
        moved = list(result.moved or [False] * len(places))
        worker.equal(moved[lost], False, "a block that was not moved is not said to be")
        for (group, number), is_moved in zip(places, moved, strict=True):
            if is_moved:
                block, at = worker.blocks_of(group)[-1], parts[group].index + number
                chunk = parts[group].chunks[at // worker.k - parts[group].index // worker.k]
                worker.load({group: Part([block], [chunk], at)})
                worker.finish()
                worker.check_bytes("what is said to be moved can be loaded")


# --- XFER-5: reports ---


@transfer_check("XFER-5")
def check_xfer_5_each_job_is_reported_once(worker: TransferDriver) -> None:
    """Waited for or not, a job is reported by one ``get_finished``, and ids can be reused."""
    part = _part(worker, 0)
    for _ in range(4):
        worker.store({0: part})
        worker.load({0: part})
    worker.finish()
    worker.equal(list(worker.call(worker.worker, "get_finished")), [], "a job is reported once")
    worker.submit(worker.sides({0: part}), job_id=1)
    worker.call(worker.worker, "wait", [1, 77])
    worker.call(worker.worker, "wait", [1])
    worker.finish()


@transfer_check("XFER-5")
def check_xfer_5_job_without_pages_is_reported(worker: TransferDriver) -> None:
    """A job that moves nothing is a job: accepted, successful, reported once."""
    worker.store({})
    worker.finish()
    worker.check_bytes("a job without pages moves nothing")


@transfer_check("XFER-5", Capability.PAUSE)
def check_xfer_5_caller_is_not_blocked(worker: TransferDriver) -> None:
    """While copies are held back jobs are accepted, and nothing is reported."""
    part = _part(worker, 0)
    worker.store({0: part})
    worker.finish()
    worker.scramble(0, part.blocks)
    worker.pause()
    with_old_bytes = {key: bytes(value) for key, value in worker._expected.items()}
    job_id = worker.load({0: part})
    loaded, worker._expected = (
        worker._expected,
        {key: bytearray(value) for key, value in with_old_bytes.items()},
    )
    worker.check_bytes("transfer_async returns before the bytes are moved")
    worker._expected = loaded
    got = list(worker.call(worker.worker, "get_finished"))
    worker.equal(got, [], "a job that has not ended is not reported")
    spec = worker.sides({0: part})
    worker.refused(TransferSpecError, worker.worker, "transfer_async", job_id, spec)
    worker.resume()
    worker.finish()
    worker.check_bytes("the job ends after resume")


@transfer_check("XFER-5")
def check_xfer_5_shutdown_may_be_called_twice(worker: TransferDriver) -> None:
    """Shutting down, and again, raises nothing; what is in flight ends first or is dropped."""
    worker.store({0: _part(worker, 0)})
    worker.call(worker.worker, "shutdown")
    worker.call(worker.worker, "shutdown")


@transfer_check("XFER-5", Capability.HOST_BYTES)
def check_xfer_5_shutdown_gives_memory_back(worker: TransferDriver) -> None:
    """The tier takes host memory while the worker runs, and none after its shutdown."""
    worker.store({0: _part(worker, 0)})
    num_bytes = worker.read(worker.worker, "host_bytes")
    worker.true(num_bytes > 0, "the tier takes host memory", num_bytes, "more than 0")
    worker.call(worker.worker, "shutdown")
    num_bytes = worker.read(worker.worker, "host_bytes")
    worker.equal(num_bytes, 0, "a worker that was shut down has no host memory")


# --- XFER-6: launched is not computed ---


@transfer_check("XFER-6", Capability.COMPUTE)
def check_xfer_6_store_reads_what_compute_writes(worker: TransferDriver) -> None:
    """A store that is submitted while its blocks are computed stores what is computed."""
    parts = {group: _part(worker, group) for group in range(len(worker.groups))}
    worker.hold_compute(parts)
    worker.store(parts)
    worker.nothing_ends("a store waits for the compute that was launched before it")
    worker.release_compute()
    worker.finish()
    for group, part in parts.items():
        worker.scramble(group, part.blocks)
    worker.load(parts)
    worker.finish()
    worker.check_bytes("a store reads what the compute before it wrote")


@transfer_check("XFER-6", Capability.COMPUTE)
def check_xfer_6_load_writes_after_compute(worker: TransferDriver) -> None:
    """A block that kernels still write is loaded into when they have ended."""
    parts = {group: _part(worker, group) for group in range(len(worker.groups))}
    worker.store(parts)
    worker.finish()
    worker.hold_compute(parts)
    worker.load(parts)
    worker.nothing_ends("a load waits for the compute that was launched before it")
    worker.release_compute()
    worker.finish()
    worker.check_bytes("a load is not overwritten by the compute before it")


@transfer_check("XFER-6", Capability.COMPUTE)
def check_xfer_6_caller_is_not_blocked_by_compute(worker: TransferDriver) -> None:
    """Jobs are accepted while compute runs, keep their order, and end after it."""
    blocks, chunks = worker.blocks_of(0), worker.chunks_of(0)
    worker.store({0: Part(blocks[:1], chunks[:1])})  # nothing to wait for: it ends by itself
    worker.finish()
    worker.hold_compute({0: Part(blocks[:1], [])})
    worker.load({0: Part(blocks[2:3], chunks[:1])})
    worker.store({0: Part(blocks[:1], chunks[:1])})
    worker.load({0: Part(blocks[3:4], chunks[:1])})
    worker.nothing_ends("a job waits for the compute that was launched before it")
    worker.release_compute()
    worker.finish()
    worker.check_bytes("jobs that waited for compute run in the order of submission")


@transfer_check("XFER-*")
def check_xfer_any_sequence_of_jobs(worker: TransferDriver) -> None:
    """Random stores and loads of random groups, a few in flight at a time."""
    profile = current_profile()
    rng = random.Random(profile.seed or 0)
    stored: dict[int, list[tuple[int, Part]]] = {}
    for _ in range(profile.num_examples):
        is_held = worker.can(Capability.COMPUTE) and rng.random() < 0.3
        if is_held:
            worker.finish()
            worker.hold_compute(
                {group: _part(worker, group) for group in range(len(worker.groups))}
            )
        parts: dict[int, Part] = {}
        for group in range(len(worker.groups)):
            if rng.random() < 0.7:
                blocks, chunks = worker.blocks_of(group), worker.chunks_of(group)
                index = rng.randrange(2 * worker.k)
                num_blocks = rng.randint(1, min(3, len(blocks)))
                num_chunks = -(-(index % worker.k + num_blocks) // worker.k)
                if num_chunks <= len(chunks):
                    where = rng.sample(chunks, num_chunks)
                    parts[group] = Part(rng.sample(blocks, num_blocks), where, index)
        worker.store(parts)
        for group, part in parts.items():
            kept = [p for p in stored.get(group, []) if not set(p[1].chunks) & set(part.chunks)]
            stored[group] = [*kept, (group, part)]
        loads: Parts = {
            group: replace(part, blocks=rng.sample(worker.blocks_of(group), len(part.blocks)))
            for group, part in (rng.choice(held) for held in stored.values() if held)
        }
        worker.load(loads)
        if is_held:
            worker.release_compute()
        if rng.random() < 0.4:
            worker.finish()
            worker.check_bytes("bytes are exact, and nothing else was written", "XFER-1")
    worker.finish()
    worker.check_bytes("bytes are exact, and nothing else was written", "XFER-1")
