"""Wrong offloading managers: one for each law, and those of public incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview_reference.harness import ReferenceARCManager, ReferenceManager
from kvview_reference.offloading import manager

from .edits import Base, Variant, inject

BASE = Base("CPUOffloadingManager", (Path(manager.__file__),))


def make_suite(wrong: Any, variant: Variant) -> Any:
    """Make the suite of the wrong manager."""
    right = ReferenceARCManager if variant.notes.get("policy") == "arc" else ReferenceManager
    return type(variant.name, (right,), {"Manager": wrong})


MUTANTS = inject(globals(), BASE, make_suite)
