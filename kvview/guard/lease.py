"""Leases: references that are released exactly once and may expire.

``GuardedView.lease`` makes a lease. Leases satisfy GUARD-2, 3 and 7 to 9.

Source: vLLM issues #41383 and #46289.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvview.errors import BlockNotHeldError, ConfigError
from kvview.guard.home import AtHome, here
from kvview.guard.ledger import LedgerView, Stamp
from kvview.guard.not_copyable import NotCopyable

if TYPE_CHECKING:
    from kvview.pool import Lease

_logger = logging.getLogger(__name__)

NEVER = float("inf")
_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Leak:
    """An entry of a leak report: blocks that are held.

    Args:
        owner: Owner of the guard.
        job: The lease's job, or None for plain touches.
        block_ids: The blocks, one entry per reference.
        age: Seconds for which the blocks have been held without interruption.
        taken_at: The caller that first held the block, as ``file:line in function``; None if the
            guard does not trace.
        request_id: The request that the engine named when the blocks were taken, or None.
    """

    owner: str
    job: object
    block_ids: tuple[int, ...]
    age: float
    taken_at: str | None
    request_id: str | None = None

    def __str__(self) -> str:
        where = self.taken_at or "an unknown line; trace=True records it"
        return (
            f"{self.owner!r} holds {len(self.block_ids)} references for {self.age:.1f} s "
            f"(request {self.request_id!r}, job {self.job!r}, blocks {list(self.block_ids[:8])}, "
            f"taken at {where})"
        )


@dataclass(eq=False)
class Hold:
    """The guard's record of one lease, which outlives the lease object.

    Args:
        block_ids: The blocks, one entry per reference.
        job: Name of the job, for reports.
        stamp: Time, request and caller of the lease.
        deadline: Seconds on the guard's clock; infinite for no deadline.
        is_active: Whether the lease was not released and has not expired.
    """

    block_ids: tuple[int, ...]
    job: object
    stamp: Stamp
    deadline: float = NEVER
    is_active: bool = True


class GuardedLease(NotCopyable):
    """References that are released exactly once (GUARD-2): a :class:`kvview.Lease`.

    A lease ends with its ``with`` block, by ``release``, or at its deadline.
    """

    def __init__(self, guard: GuardedLeases, hold: Hold) -> None:
        self._guard = guard
        self._hold = hold

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks, one entry per reference, without the null block."""
        return self._hold.block_ids

    @property
    def job(self) -> object:
        """Name of the job, for reports."""
        return self._hold.job

    @property
    def deadline(self) -> float | None:
        """Seconds on the guard's clock at which the lease expires, or None."""
        return None if self._hold.deadline == NEVER else self._hold.deadline

    @property
    def is_active(self) -> bool:
        """Whether the lease still holds its blocks: not released, not expired, view not closed."""
        return self._hold.is_active and self._guard.is_open

    def renew(self, ttl: float) -> None:
        """Move the deadline to ``ttl`` seconds from now.

        Raises:
            BlockNotHeldError: The lease has ended, so other owners may hold its blocks.
            ConfigError: ``ttl`` is not positive.
        """
        self._guard._renew(self, ttl)

    def release(self) -> bool:
        """Release the references; returns False if the lease has already ended."""
        return self._guard._release(self)

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
        with suppress(Exception):  # a finaliser must not raise, even at interpreter exit
            if self.is_active and self.deadline is None and self._guard.is_at_home:
                _logger.warning(
                    "GUARD-9: a lease of %r was garbage-collected before it was released, so it "
                    "can no longer be released: job %r, %d references, blocks %s; keep the lease "
                    "or set a ttl",
                    self._guard.owner,
                    self.job,
                    len(self.block_ids),
                    list(self.block_ids[:8]),
                )


class GuardedLeases(AtHome):
    """Makes, renews, releases and expires the leases of a guard.

    Args:
        owner: Name of the owner, for errors and reports.
        view: The guard's ledger view; the leases have a ledger view that is opened from it.
        clock: Returns monotonic seconds.
    """

    def __init__(self, owner: str, view: LedgerView, clock: Callable[[], float]) -> None:
        super().__init__(owner, view)
        self.now = clock
        self._lease_view: LedgerView | None = None
        # The records of leases whose blocks are not released yet, in the order of their last
        # renewal.
        self._holds: dict[Hold, None] = {}
        self.next_deadline = NEVER
        """Time before which no lease expires; the lease that set this time may have ended."""

    @property
    def now(self) -> Callable[[], float]:
        """The clock of the deadlines; tests and simulations may set another clock."""
        return self._clock

    @now.setter
    def now(self, clock: Callable[[], float]) -> None:
        self._clock = self._view.clock = clock

    def _enter(self) -> None:
        if here.home is not self._home or not self._view.is_open:  # faster, as it is called often
            self._check_open()
        if self.next_deadline != NEVER and self.next_deadline <= self.now():
            self._expire()

    def _take(self, block_ids: list[int], job: object, ttl: float | None) -> GuardedLease:
        if ttl is not None:
            with self._counted():
                _check_ttl(ttl)
        stamp = self._stamp()
        if self._lease_view is None:
            self._lease_view = self._view.open_view(self.owner)
            self._lease_view.leases = self._holds
        self._lease_view.touch_blocks(block_ids)
        null = self._view.ledger.null_block_id
        real = tuple(block_id for block_id in block_ids if block_id != null)
        hold = Hold(real, job, stamp)
        self._holds[hold] = None
        self.stats.leases += 1
        self.stats.active_leases += 1
        if ttl is not None:
            self._schedule(hold, ttl)
        return GuardedLease(self, hold)

    def release_expired(self) -> list[Leak]:
        """Release the leases whose deadline has passed; every other call of the guard also does so.

        Returns:
            The leases that ended, earliest deadline first.
        """
        self._check_open()
        return self._expire() if self.next_deadline <= self.now() else []

    def expiring(self) -> list[Hold]:
        """Return the active leases with a deadline; for engines."""
        return [hold for hold in self._holds if hold.is_active and hold.deadline != NEVER]

    def _expire(self) -> list[Leak]:
        expired = []
        now = self.now()
        due = [hold for hold in self._holds if hold.deadline <= now]
        for hold in sorted(due, key=lambda hold: hold.deadline):
            leak = self._leak(hold, self.owner)
            is_first = hold.is_active
            if is_first:
                expired.append(leak)
                self.stats.expired += 1
                hold.is_active = False
            try:
                self._end(hold)
            except Exception:
                # The current call did not cause the error, so the call must not fail (GUARD-8).
                if is_first:
                    _logger.exception("GUARD-8: the engine refused an expired lease: %s", leak)
                hold.deadline = now + _RETRY_SECONDS
        self.next_deadline = min((hold.deadline for hold in self._holds), default=NEVER)
        return expired

    def _schedule(self, hold: Hold, ttl: float) -> None:
        hold.deadline = self.now() + ttl
        self.next_deadline = min(self.next_deadline, hold.deadline)
        self._holds[hold] = self._holds.pop(hold)

    def _check_lease(self, lease: GuardedLease) -> None:
        self._enter()
        with self._counted():
            if not lease.is_active:
                raise BlockNotHeldError(
                    f"GUARD-7: the lease of job {lease.job!r} has ended, so other owners may hold "
                    f"its blocks; take a new lease"
                )

    def _renew(self, lease: GuardedLease, ttl: float) -> None:
        self._check_lease(lease)
        with self._counted():
            _check_ttl(ttl)
        self._schedule(lease._hold, ttl)

    def _release(self, lease: GuardedLease) -> bool:
        if lease.is_active:
            self._enter()
        if not lease.is_active:
            return False  # close() or expiry came first
        self._end(lease._hold)
        lease._hold.is_active = False
        return True

    def _end(self, hold: Hold) -> None:
        assert self._lease_view is not None, "_take opened it"
        self._lease_view.free_blocks(hold.block_ids)
        self._holds.pop(hold, None)
        self.stats.active_leases -= 1

    def _leak(self, hold: Hold, owner: str) -> Leak:
        seconds, request_id, taken_at = hold.stamp
        return Leak(owner, hold.job, hold.block_ids, self.now() - seconds, taken_at, request_id)

    def _stamp(self) -> Stamp:
        caller = self._view.caller
        return self.now(), self._view.ledger.request_id, caller and caller()


def _check_ttl(ttl: float) -> None:
    if not ttl > 0:
        raise ConfigError(f"GUARD-3: ttl must be a positive number of seconds, got {ttl}")


if TYPE_CHECKING:
    _: type[Lease] = GuardedLease
