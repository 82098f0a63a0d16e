"""Wrong guards before a tier store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview.tier.guard import guarded

from .edits import Base, Variant, inject
from .tested import read_faults

BASE = Base("GuardedTier", (Path(guarded.__file__),))


def make_harness(wrong: Any, variant: Variant) -> Any:
    """Return a factory of the wrong guard, for the examples of the laws."""
    return lambda *args, **options: wrong(*args, **options)


inject(globals(), BASE, make_harness)
TESTED = read_faults(__file__, BASE, "kvview.tier.guard.guarded", "tests/tier/test_tier_guard.py")
