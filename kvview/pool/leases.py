"""The interface of leases and budgets for connectors, which :mod:`kvview.guard` implements.

Source: vLLM issues #41383 and #46289 (leases), #27046 (pin caps).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from kvview.keys import OffloadKey


@runtime_checkable
class SupportsPinBudget(Protocol):
    """The view limits the number of blocks that may be held.

    Examples:
        Store only as many blocks as may be held, and count the others as skipped:

        >>> full = [1, 2, 3, 4, 5]
        >>> stored = full[: view.num_pinnable_blocks()]
        >>> view.touch_blocks(stored)
        >>> len(full) - len(stored), view.num_pinnable_blocks()
        (1, 0)
    """

    def num_pinnable_blocks(self) -> int:
        """Return the number of additional blocks that may be held; touching more blocks raises."""
        ...


@runtime_checkable
class Lease(Protocol):
    """References that are released exactly once (GUARD-2); also a context manager.

    Examples:
        Hold blocks during a copy, and release them even if the copy raises:

        >>> with view.lease([3, 2], ttl=10.0) as lease:
        ...     lease.renew(ttl=60.0)  # the copy takes longer than expected
        >>> lease.is_active
        False
        >>> lease.release()  # has no effect, so a block is never freed twice
        False
    """

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks, one entry per reference, without the null block."""
        ...

    @property
    def is_active(self) -> bool:
        """Whether the lease still holds its blocks: not released, not expired, view not closed."""
        ...

    def renew(self, ttl: float) -> None:
        """Move the deadline to ``ttl`` seconds from now.

        Raises:
            BlockNotHeldError: The lease has ended, so other owners may hold its blocks.
        """
        ...

    def release(self) -> bool:
        """Release the references; returns False if the lease has already ended."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@runtime_checkable
class SupportsLeases(Protocol):
    """The view has leases, like the view that a connector receives by default.

    Examples:
        Hold a block only if it was not reused since its key was read:

        >>> pool.evict_blocks([3])  # by the engine, between two steps
        >>> try:
        ...     lease = view.lease([3], job="store 8", ttl=60.0, expected_keys=[keys[2]])
        ... except StaleBlockError:
        ...     print("store other blocks")
        store other blocks
    """

    def lease(
        self,
        block_ids: Sequence[int],
        *,
        job: object = None,
        ttl: float | None = None,
        expected_keys: Sequence[OffloadKey] | None = None,
    ) -> Lease:
        """Hold blocks until the lease is released, for at most ``ttl`` seconds.

        Args:
            block_ids: The blocks to hold; the null block is skipped.
            job: Name of a job, for reports; one job may have several leases.
            ttl: Seconds until the lease expires, or None.
            expected_keys: One key per block. The blocks are held only if each still has its key.

        Returns:
            An active lease.

        Raises:
            StaleBlockError: A block no longer holds the expected key.
            NotAnOffloadKeyError: An expected key cannot be a key.
            PinBudgetExceeded: More blocks would be held than the budget allows.
        """
        ...
