"""The guards of the reference, for the connector of an engine or for each child of several.

:mod:`kvview.guard` implements the guard.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvview import GPUBlockPoolView, GuardedView
from kvview_reference.pool import BlockPool


def guard_pool(pool: BlockPool, owner: str, pin_budget: float | None = None) -> GuardedView:
    """Make a guarded view of a pool for one connector."""
    return GuardedView(pool.view(owner), owner=owner, pin_budget=pin_budget)


def guard_children(view: GPUBlockPoolView, owners: Sequence[str]) -> list[GuardedView]:
    """Make a guard for each child, so that no child can free blocks of another child.

    Args:
        view: The view that the engine bound; if it is a guard, the guards of the children use its
            clock.
        owners: Names of the children, in the order of the children.
    """
    clock = (lambda: view.now()) if isinstance(view, GuardedView) else time.monotonic
    return [GuardedView(view, owner=owner, clock=clock) for owner in owners]
