"""The guard of the connector of an engine; :mod:`kvview.guard` implements it."""

from __future__ import annotations

from kvview import GuardedView
from kvview_reference.pool import BlockPool


def guard_pool(pool: BlockPool, owner: str, pin_budget: float | None = None) -> GuardedView:
    """Make a guarded view of a pool for one connector."""
    return GuardedView(pool.view(owner), owner=owner, pin_budget=pin_budget)
