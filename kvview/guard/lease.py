"""Leases: references that are given back exactly once, and the report of those that were not.

``GuardedView.lease`` makes them and keeps GUARD-2, 3 and 7 to 9 (:mod:`kvview.guard`).

Source: vLLM issues #41383 and #46289.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvview.errors import BlockNotHeldError
from kvview.guard.ledger import NotCopyable, Stamp

if TYPE_CHECKING:
    from kvview.guard.view import GuardedView
    from kvview.pool import Lease

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Leak:
    """Blocks that were held too long, or at the end.

    Args:
        owner: Whose guard it is.
        job: The lease's job, or None for plain touches.
        block_ids: The blocks, one entry a reference.
        age: Seconds for which they have been held without a break.
        taken_at: ``file:line in function`` of the first caller when tracing, else None.
        request_id: The request that the engine spoke of when they were taken, if it said so.
    """

    owner: str
    job: object
    block_ids: tuple[int, ...]
    age: float
    taken_at: str | None
    request_id: str | None = None

    def __str__(self) -> str:
        where = self.taken_at or "unknown: trace=True tells"
        return (
            f"{self.owner!r} holds {len(self.block_ids)} references for {self.age:.1f} s "
            f"(request {self.request_id!r}, job {self.job!r}, blocks {list(self.block_ids[:8])}, "
            f"taken at {where})"
        )


@dataclass(eq=False)
class Hold:
    """What the guard knows of one lease, also when nobody has the lease any more.

    Args:
        block_ids: What is held, one entry a reference.
        job: Named in reports.
        stamp: When it was taken, and by whom.
        deadline: Seconds on the guard's clock, or None.
        ticket: Of its entry in the heap of deadlines; every other entry is stale.
        is_active: False once it was released or expired.
    """

    block_ids: tuple[int, ...]
    job: object
    stamp: Stamp
    deadline: float | None = None
    ticket: int | None = None
    is_active: bool = True


class GuardedLease(NotCopyable):
    """References that are given back exactly once (GUARD-2); made by ``lease``.

    The class behind :class:`kvview.Lease`. As a context manager it ends with the
    block; as an object, by ``release``.
    """

    def __init__(self, guard: GuardedView, hold: Hold) -> None:
        self._guard = guard
        self._hold = hold

    @property
    def block_ids(self) -> tuple[int, ...]:
        """What is held, one entry a reference, without the null block."""
        return self._hold.block_ids

    @property
    def job(self) -> object:
        """Named in reports."""
        return self._hold.job

    @property
    def deadline(self) -> float | None:
        """When it ends by itself, seconds on the guard's clock."""
        return self._hold.deadline

    @property
    def is_active(self) -> bool:
        """False once it was released, expired, or the view was closed."""
        return self._hold.is_active and self._guard.is_open

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

    def check_active(self) -> None:
        """Raise ``BlockNotHeldError`` when the lease has ended (GUARD-7)."""
        if not self.is_active:
            raise BlockNotHeldError(
                f"GUARD-7: the lease of job {self.job!r} has ended, its blocks may be anyone's: "
                f"take a new one"
            )

    def __enter__(self) -> Self:
        self._guard._check_lease(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        with suppress(Exception):  # nothing may come out of here, also at the interpreter's end
            if self.is_active and self.deadline is None and self._guard.is_at_home:
                _logger.warning(
                    "GUARD-9: a lease of %r was dropped, nobody can release it any more: job %r, "
                    "%d references, blocks %s; keep it, or give it a ttl",
                    self._guard.owner,
                    self.job,
                    len(self.block_ids),
                    list(self.block_ids[:8]),
                )


if TYPE_CHECKING:
    _: type[Lease] = GuardedLease
