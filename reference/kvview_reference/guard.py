"""Who gets a guard of their own: the connector of an engine, each child of several.

What a guard does is :mod:`kvview.guard`'s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvview import GPUBlockPoolView, GuardedView
from kvview_reference.pool import BlockPool


def guard_pool(pool: BlockPool, owner: str, pin_budget: float | None = None) -> GuardedView:
    """A guarded view of a pool for one connector, named in errors and reports."""
    return GuardedView(pool.view(owner), owner=owner, pin_budget=pin_budget)


def guard_children(view: GPUBlockPoolView, owners: Sequence[str]) -> list[GuardedView]:
    """A guard for each child: none can give back what another one holds.

    Args:
        view: What the engine bound; where it is a guard, its clock is the children's.
        owners: Names of the children, in their order.
    """
    clock = (lambda: view.now()) if isinstance(view, GuardedView) else time.monotonic
    return [GuardedView(view, owner=owner, clock=clock) for owner in owners]
