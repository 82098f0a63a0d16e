"""What the reference engine counts."""

from __future__ import annotations

from dataclasses import dataclass

from kvview import ConnectorError, GPULoadStoreSpec, LoadStoreSpec
from kvview.connector.job_tracker import EndedJob


@dataclass
class EngineStats:
    """Counters since the engine was built.

    Hits are counted in hash blocks of the prefix, once for all groups; transfers
    in GPU blocks, of every group.

    Args:
        prompt_blocks: Of requests at their first start, the last one if it is partial too.
        gpu_hit_blocks: Blocks that requests found in the GPU prefix cache at their first start.
        cpu_hit_blocks: Blocks that they got from the connector instead.
        loaded_blocks: Blocks that load jobs moved (windows move fewer than they hit).
        offloaded_blocks: Blocks that store jobs moved.
        prefill_tokens: Tokens computed that were known before: of prompts, and once more after a
            preemption.
        media: Where jobs moved blocks to or from, beside the GPU, in order of appearance.
        first_failure: Of a transfer: which job, and what its result says.
        bytes_verified: Bytes compared with what they must be.
        mismatches: Blocks among them that differed.
    """

    requests: int = 0
    prompt_blocks: int = 0
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
    prefill_tokens: int = 0
    bytes_verified: int = 0
    mismatches: int = 0

    def count(self, end: EndedJob) -> None:
        """Take in the end of a transfer."""
        job = end.job
        here, there = (job.dst, job.src) if end.is_load else (job.src, job.dst)
        num_blocks = num_gpu_blocks(here)
        if there.medium not in self.media:
            self.media += (there.medium,)
        if not end.result.success:
            self.failed_transfers += 1
            if self.first_failure is None:
                kind, why = "load" if end.is_load else "store", end.result.error
                self.first_failure = f"{kind} job {job.job_id}: {why or 'it gives no reason'}"
        elif end.is_load:
            self.loaded_blocks += num_blocks
        else:
            self.offloaded_blocks += num_blocks


def num_gpu_blocks(spec: LoadStoreSpec) -> int:
    """The blocks of a job's GPU side.

    Raises:
        ConnectorError: It is another medium's.
    """
    if not isinstance(spec, GPULoadStoreSpec):
        raise ConnectorError(
            f"CONN-3: a load ends and a store begins at a GPULoadStoreSpec, got "
            f"{type(spec).__name__}"
        )
    return len(spec.block_ids)
