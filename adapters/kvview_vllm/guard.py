"""The guard in vLLM: the view that a connector gets, and what is logged of its holds.

Source: :mod:`kvview.guard`, whose laws it keeps.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from kvview import GuardedView, Leak
from kvview_vllm.pool import view

_logger = logging.getLogger(__name__)


def guarded_view(
    block_pool: Any, owner: str, *, pin_budget: float | None, trace_holds: bool
) -> GuardedView:
    """A guarded view of a real ``BlockPool``.

    Args:
        block_pool: The scheduler's pool.
        owner: Whom errors and reports name: the user's connector.
        pin_budget: Largest share of the pool to hold, None for no limit.
        trace_holds: Whether to note the line that took each hold (slow).
    """
    return GuardedView(
        view(block_pool, owner=owner), owner=owner, pin_budget=pin_budget, trace=trace_holds
    )


def expire_leases(guard: GuardedView) -> None:
    """Release the leases whose time is up, and log them; for every step."""
    if guard.deadlines:
        _log("a lease expired", guard.release_expired())


def close_view(guard: GuardedView) -> None:
    """Close the view; what it still held is logged."""
    _log("at close", guard.leaks())
    guard.close()


def _log(when: str, leaks: list[Leak]) -> None:
    for leak in leaks:
        if leak.taken_at is None:  # in the words of vLLM's configuration
            leak = replace(leak, taken_at="an unknown line, which trace_holds tells")
        _logger.warning("%s: %s", when, leak)
