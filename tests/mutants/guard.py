"""Wrong guards: one for each law, and those of public incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview.guard import view
from tests.guard.pools import GuardedPool

from .edits import Base, Variant, inject
from .tested import read_faults

BASE = Base("GuardedView", (Path(view.__file__),))


def make_pool(wrong: Any, variant: Variant) -> Any:
    """Return the pool of the wrong guard, for the examples of the laws."""

    class Wrong(GuardedPool):
        Guard = wrong

    return Wrong


inject(globals(), BASE, make_pool)
TESTED = read_faults(__file__, BASE, "kvview.guard.view", "tests/guard")
