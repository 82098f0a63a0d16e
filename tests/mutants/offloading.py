"""Wrong offloading managers: one for each law, and those of public incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview_reference.harness import ReferenceManager
from kvview_reference.offloading import manager

from .edits import Base, Variant, inject

BASE = Base("CPUOffloadingManager", (Path(manager.__file__),))


def make_harness(wrong: Any, variant: Variant) -> Any:
    """Make a harness of the wrong manager."""
    policy = variant.notes.get("policy", "lru")

    class Wrong(ReferenceManager):
        Manager = wrong

        def __init__(
            self, cache_policy: str = policy, capacity: int = 12, store_threshold: int = 1
        ) -> None:
            super().__init__(cache_policy, capacity, store_threshold)

    return Wrong


MUTANTS = inject(globals(), BASE, make_harness)
