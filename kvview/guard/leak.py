"""An entry of a leak report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Leak:
    """Blocks that are held, as :meth:`kvview.GuardedView.leaks` reports them.

    Args:
        owner: Owner of the guard.
        block_ids: The blocks, one entry per reference.
        age: Seconds for which the blocks have been held without interruption.
        taken_at: The caller that first held the block, as ``file:line in function``; None if the
            guard does not trace.
        request_id: The request that the engine named when the blocks were taken, or None.
        job: The transfers of the request that are in flight, if the engine knows them.
    """

    owner: str
    block_ids: tuple[int, ...]
    age: float
    taken_at: str | None
    request_id: str | None = None
    job: str | None = None

    def __str__(self) -> str:
        where = self.taken_at or "an unknown line; trace=True records it"
        return (
            f"{self.owner!r} holds {len(self.block_ids)} references for {self.age:.1f} s "
            f"(request {self.request_id!r}, job {self.job!r}, blocks {list(self.block_ids[:8])}, "
            f"taken at {where})"
        )
