"""The plan of a step: the jobs that the scheduler half gives to the worker half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvview.transfer import LoadStoreSpec


@dataclass(frozen=True)
class TransferJob:
    """One transfer for the worker half.

    Args:
        job_id: Id of the job, unique in the life of the connector (CONN-5).
        src: Source of the bytes.
        dst: Destination of the bytes.
        request_id: The request that waits for the job; None for stores. If a job that
            belongs to a request fails, the engine recomputes that request's blocks.
        owner: Name of the child connector that planned the job, for reports; empty without
            children.
    """

    job_id: int
    src: LoadStoreSpec
    dst: LoadStoreSpec
    request_id: str | None = None
    owner: str = ""


@dataclass(frozen=True)
class StepPlan:
    """The jobs that the worker half starts in one step; must be picklable.

    A subclass may have further fields for its own worker half, for example keys to drop. The worker
    half receives a plan of a subclass in every step, even without jobs.

    Args:
        loads: Loads, which start before the step's compute reads their destination.
        stores: Stores, which read blocks whose compute was launched before this step (XFER-6).
    """

    loads: Sequence[TransferJob] = ()
    stores: Sequence[TransferJob] = ()

    def __bool__(self) -> bool:
        """Whether the worker half must receive the plan."""
        return bool(self.loads or self.stores) or type(self) is not StepPlan
