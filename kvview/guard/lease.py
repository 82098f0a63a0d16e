"""Leases: references that are given back exactly once, and the report of those that were not.

``GuardedView.lease`` makes them and keeps GUARD-2 and GUARD-3 (:mod:`kvview.guard`).

Source: vLLM issues #41383 and #46289.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvview.guard import GuardedView


@dataclass(frozen=True)
class Leak:
    """Blocks that were held too long, or at the end.

    Args:
        owner: Whose guard it is.
        job: The lease's job, or None for plain touches.
        block_ids: The blocks, one entry a reference.
        age: Seconds since the last of them was taken.
        taken_at: ``file:line in function`` of the caller when tracing, else None.
    """

    owner: str
    job: object
    block_ids: tuple[int, ...]
    age: float
    taken_at: str | None

    def __str__(self) -> str:
        where = self.taken_at or "unknown: trace=True tells"
        return (
            f"{self.owner!r} holds {len(self.block_ids)} references for {self.age:.1f} s "
            f"(job {self.job!r}, blocks {list(self.block_ids[:8])}, taken at {where})"
        )


class GuardedLease:
    """References that are given back exactly once (GUARD-2); made by ``lease``.

    As a context manager it ends with the block; as an object, by ``release``.
    """

    def __init__(
        self, guard: GuardedView, block_ids: tuple[int, ...], job: object, taken_at: str | None
    ) -> None:
        self.block_ids = block_ids
        self.job = job
        self.deadline: float | None = None
        self.is_active = True
        self._guard = guard
        self._since = guard.now()
        self._taken_at = taken_at

    def renew(self, ttl: float) -> None:
        """Move the deadline to ``ttl`` seconds from now.

        Raises:
            BlockNotHeldError: The lease has ended: its blocks may be anyone's.
            ConfigError: ``ttl`` is not positive.
        """
        self._guard._renew(self, ttl)

    def release(self) -> bool:
        """Give the references back; False when the lease had ended already."""
        return self._guard._release(self)

    def leak(self) -> Leak:
        """What a leak report says of this lease."""
        age = self._guard.now() - self._since
        return Leak(self._guard.owner, self.job, self.block_ids, age, self._taken_at)

    def __enter__(self) -> GuardedLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
