"""Leases and budgets, as a connector sees them; :mod:`kvview.guard` keeps their laws.

Source: vLLM issues #41383 and #46289 (leases), #27046 (pin caps).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from kvview.keys import OffloadKey


@runtime_checkable
class SupportsPinBudget(Protocol):
    """The view limits how many blocks may be held through it."""

    def num_pinnable_blocks(self) -> int:
        """How many more blocks may be held now; a touch of more raises."""
        ...


@runtime_checkable
class Lease(Protocol):
    """References that are given back exactly once (GUARD-2); also a context manager."""

    @property
    def block_ids(self) -> tuple[int, ...]:
        """What is held, one entry a reference, without the null block."""
        ...

    @property
    def is_active(self) -> bool:
        """False once it was released, expired, or the view was closed."""
        ...

    def renew(self, ttl: float) -> None:
        """Move the deadline to ``ttl`` seconds from now.

        Raises:
            BlockNotHeldError: The lease has ended: its blocks may be anyone's.
        """
        ...

    def release(self) -> bool:
        """Give the references back; False when the lease had ended already."""
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
    """The view hands out leases; what connectors get by default does."""

    def lease(
        self,
        block_ids: Sequence[int],
        *,
        job: object = None,
        ttl: float | None = None,
        expected_keys: Sequence[OffloadKey] | None = None,
    ) -> Lease:
        """Hold blocks until released, at most ``ttl`` seconds.

        Args:
            block_ids: What to hold; the null block is skipped.
            job: Named in reports; one job may have several leases.
            ttl: Seconds until the lease ends by itself, or None.
            expected_keys: One key a block: hold only if each block still has it.

        Returns:
            A lease, active from now.

        Raises:
            StaleBlockError: A block does not hold the key expected any more.
            NotAnOffloadKeyError: An expected key cannot be one.
            PinBudgetExceeded: More blocks than the budget allows.
        """
        ...
