"""Wrong guards: one for each law, and those of public incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview.guard import view
from kvview_reference.harness import GuardedReferencePool

from .edits import Base, Variant, inject

BASE = Base("GuardedView", (Path(view.__file__),))


def make_harness(wrong: Any, variant: Variant) -> Any:
    """Make a harness of the wrong guard."""

    class Wrong(GuardedReferencePool):
        Guard = wrong

    return Wrong


MUTANTS = inject(globals(), BASE, make_harness)
