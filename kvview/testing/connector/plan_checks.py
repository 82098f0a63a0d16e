"""Checks of planned jobs against the engine's blocks: their references, keys and requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvview import GPULoadStoreSpec, LoadStoreSpec, OffloadKey
from kvview.testing.connector.harness import ConnectorHarness
from kvview.testing.connector.invariants import InvariantBroken
from kvview.testing.connector.jobs import PlannedJob


def gpu_blocks(spec: LoadStoreSpec, num_blocks: int) -> list[int]:
    """GPU blocks of one side of a job; none if it is not the GPU's, which the engine refuses.

    Args:
        spec: One side of a job.
        num_blocks: Blocks of the pool.

    Raises:
        InvariantBroken: XFER-1, a block does not exist.
    """
    if not isinstance(spec, GPULoadStoreSpec):
        return []
    for block in spec.block_ids:
        if type(block) is not int or not 0 < block < num_blocks:
            raise InvariantBroken(
                "XFER-1", f"a plan names GPU block {block!r}: blocks are 1 to {num_blocks - 1}"
            )
    return list(spec.block_ids)


def check_load(job: PlannedJob, engine: ConnectorHarness) -> Mapping[int, OffloadKey]:
    """Require that the request of a load waits for its blocks.

    Returns:
        The key that must come into each block.

    Raises:
        InvariantBroken: XFER-2.
    """
    request_id = job.transfer.request_id
    expected = engine.expected_keys(request_id or "")
    if foreign := [block for block in job.gpu_blocks if block not in expected]:
        raise InvariantBroken(
            "XFER-2",
            f"load job {job.job_id} writes blocks {foreign}, for which request {request_id!r} "
            f"does not wait",
        )
    return expected


def check_store(job: PlannedJob, engine: ConnectorHarness) -> None:
    """Require references to the source blocks of a store, and note the keys of their KV.

    Raises:
        InvariantBroken: CONN-6 for a block that is free or another request's, CONN-8 for one
            that is not computed wholly.
    """
    blocks = job.gpu_blocks
    if free := _free_blocks(job, engine):
        raise InvariantBroken(
            "CONN-6",
            f"store job {job.job_id} reads blocks {free}, which are free: they may be overwritten "
            f"at any time",
        )
    job.block_keys = dict(zip(blocks, engine.block_keys(blocks), strict=True))
    keyless = [block for block in blocks if not job.block_keys[block]]
    if not keyless:
        return
    reads = f"store job {job.job_id} reads blocks {keyless}, in which no KV is computed whole"
    if engine.held_blocks().keys() >= set(keyless):
        raise InvariantBroken(
            "CONN-8",
            f"{reads}: store blocks that num_computed_tokens covers (kvview.full_blocks); the last "
            f"token that a request sampled is not computed, nor is the KV that a step schedules",
        )
    raise InvariantBroken(
        "CONN-6", f"{reads} any more, because another request got blocks that were not held"
    )


def check_held(stores: Iterable[PlannedJob], engine: ConnectorHarness) -> None:
    """Require references to the source blocks of stores until they are reported.

    Raises:
        InvariantBroken: CONN-6.
    """
    for job in stores:
        if free := _free_blocks(job, engine):
            raise InvariantBroken(
                "CONN-6",
                f"blocks {free} are free, and store job {job.job_id}, which reads them, is not "
                f"reported yet: hold the blocks of a store until then, even if another owner "
                f"releases them",
            )


def _free_blocks(job: PlannedJob, engine: ConnectorHarness) -> list[int]:
    return [block for block in job.gpu_blocks if not engine.ref_count(block)]
