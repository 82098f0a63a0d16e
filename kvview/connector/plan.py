"""What the scheduler half has the worker half do in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvview.transfer import LoadStoreSpec


@dataclass(frozen=True)
class TransferJob:
    """One transfer for the worker half.

    Args:
        job_id: Unique in the life of the connector (CONN-5).
        src: Where the bytes are.
        dst: Where they go.
        request_id: The request that waits for it; None for stores. A failed
            job with a request makes the engine compute its blocks anew.
        owner: The child that planned it, in a connector of several; for reports.
    """

    job_id: int
    src: LoadStoreSpec
    dst: LoadStoreSpec
    request_id: str | None = None
    owner: str = ""


@dataclass(frozen=True)
class StepPlan:
    """What the worker half starts in one step; must survive pickling.

    A subclass may carry more for its own worker half, keys to drop for example: it
    reaches the worker in every step, jobs or not.

    Args:
        loads: Started before the step's compute reads what they bring.
        stores: They read blocks whose compute was launched before (XFER-6).
    """

    loads: Sequence[TransferJob] = ()
    stores: Sequence[TransferJob] = ()

    def __bool__(self) -> bool:
        """Whether the worker half must hear of it."""
        return bool(self.loads or self.stores) or type(self) is not StepPlan
