"""The counters of the reference engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvview import ConnectorError, GPULoadStoreSpec, LoadStoreSpec
from kvview.connector.job_tracker import EndedJob


@dataclass
class EngineStats:
    """Counters since the engine was built.

    Hits are counted in hash blocks of the prefix, once for all groups; transfers are counted in
    GPU blocks of every group.

    Args:
        gpu_hit_blocks: Blocks that requests hit in the GPU prefix cache at their first start.
        cpu_hit_blocks: Blocks that requests loaded from the connector at their first start.
        loaded_blocks: Blocks that were moved by load jobs (for windows, fewer than the hits).
        offloaded_blocks: Blocks that were moved by store jobs.
        media: Media that jobs used, except the GPU, in the order of their first use.
        first_failure: Job and error of the first failed transfer.
        bytes_verified: Bytes compared with their expected values.
        mismatches: Number of compared blocks with wrong bytes.
    """

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    steps: int = 0
    gpu_hit_blocks: int = 0
    cpu_hit_blocks: int = 0
    loaded_blocks: int = 0
    offloaded_blocks: int = 0
    failed_transfers: int = 0
    media: tuple[str, ...] = ()
    first_failure: str | None = None
    bytes_verified: int = 0
    mismatches: int = 0

    def count(self, end: EndedJob) -> None:
        """Count the end of a transfer."""
        job = end.job
        here, there = (job.dst, job.src) if end.is_load else (job.src, job.dst)
        num_blocks = num_gpu_blocks(here)
        if there.medium not in self.media:
            self.media += (there.medium,)
        if not end.result.success:
            self.failed_transfers += 1
            if self.first_failure is None:
                kind, why = "load" if end.is_load else "store", end.result.error
                self.first_failure = f"{kind} job {job.job_id}: {why or 'no reason given'}"
        elif end.is_load:
            self.loaded_blocks += num_blocks
        else:
            self.offloaded_blocks += num_blocks


def num_gpu_blocks(spec: LoadStoreSpec) -> int:
    """Count the blocks of a job's GPU side.

    Raises:
        ConnectorError: The spec does not name GPU blocks.
    """
    if not isinstance(spec, GPULoadStoreSpec):
        raise ConnectorError(
            f"CONN-3: the GPU side of a job must be a GPULoadStoreSpec, got {type(spec).__name__}"
        )
    return len(spec.block_ids)
