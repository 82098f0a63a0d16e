"""Checks of planned jobs against the engine's blocks: their references, keys and requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvview import GPULoadStoreSpec, LoadStoreSpec, OffloadKey
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.connector.judge.jobs import PlannedJob
from kvview.testing.connector.run.engine import SimulatedEngine
from kvview.testing.supervision.source_lines import at_places


def gpu_blocks(spec: LoadStoreSpec, num_blocks: int) -> list[int]:
    """Return the GPU blocks of one side of a job; empty for another medium.

    Args:
        spec: One side of a job.
        num_blocks: Blocks of the pool.

    Raises:
        InvariantBroken: XFER-1 is broken, because a block does not exist.
    """
    if not isinstance(spec, GPULoadStoreSpec):
        return []
    for block in spec.block_ids:
        if type(block) is not int or not 0 < block < num_blocks:
            raise InvariantBroken(
                "XFER-1",
                f"a plan names GPU block {block!r}, which does not exist; blocks are 1 to "
                f"{num_blocks - 1}",
                hint="Skip block 0 of a block table: it is in the place of a block that a window "
                "has left (full_blocks, required_blocks).",
            )
    return list(spec.block_ids)


def check_load(job: PlannedJob, engine: SimulatedEngine) -> Mapping[int, OffloadKey]:
    """Require that the request of a load waits for the blocks of the load.

    Returns:
        Key that must be loaded into each block.

    Raises:
        InvariantBroken: XFER-2 is broken, because the request does not wait for a block.
    """
    request_id = job.transfer.request_id
    expected = engine.expected_keys(request_id or "")
    if foreign := [block for block in job.gpu_blocks if block not in expected]:
        raise InvariantBroken(
            "XFER-2",
            f"load job {job.job_id} would write blocks {foreign}, for which request "
            f"{request_id!r} does not wait",
        )
    return expected


def check_store(job: PlannedJob, engine: SimulatedEngine) -> None:
    """Require references to the source blocks of a store, and record the keys of their KV.

    Raises:
        InvariantBroken: A block is free or belongs to another request (CONN-6), or is not
            completely computed (CONN-8).
    """
    blocks = job.gpu_blocks
    if free := _free_blocks(job, engine):
        raise InvariantBroken(
            "CONN-6",
            f"store job {job.job_id} reads blocks {free}, which are free, so they may be "
            f"overwritten at any time; hold them first",
        )
    job.block_keys = dict(zip(blocks, engine.block_keys(blocks), strict=True))
    keyless = [block for block in blocks if not job.block_keys[block]]
    if not keyless:
        return
    reads = f"store job {job.job_id} reads blocks {keyless}, whose KV is not completely computed"
    if engine.held_blocks().keys() >= set(keyless):
        raise InvariantBroken(
            "CONN-8",
            f"{reads}, so they have no key yet; only store blocks that num_computed_tokens covers "
            f"(kvview.full_blocks), or hashed free blocks of the same step",
            hint="",
        )
    raise InvariantBroken(
        "CONN-6", f"{reads}, because they were not held and now belong to another request"
    )


def check_held(
    stores: Iterable[PlannedJob], engine: SimulatedEngine, freed_at: Mapping[int, Sequence[str]]
) -> None:
    """Require references to the source blocks of stores until the stores are reported.

    Args:
        stores: The stores.
        engine: The engine.
        freed_at: The lines of the author's code that last released each block.

    Raises:
        InvariantBroken: CONN-6 is broken, because a source block is free.
    """
    for job in stores:
        if free := _free_blocks(job, engine):
            raise InvariantBroken(
                "CONN-6",
                f"blocks {free} are free although store job {job.job_id}, which reads them, is "
                f"not reported yet{_released(free[0], freed_at)}; hold the blocks of a store "
                f"until its report, even if another owner releases them",
                hint="",
            )


def _released(block: int, freed_at: Mapping[int, Sequence[str]]) -> str:
    place = at_places(freed_at.get(block, ()))
    return f"; the connector released block {block}{place}" if place else ""


def _free_blocks(job: PlannedJob, engine: SimulatedEngine) -> list[int]:
    refs = engine.ref_counts(job.gpu_blocks)
    return [block for block, count in zip(job.gpu_blocks, refs, strict=True) if not count]
