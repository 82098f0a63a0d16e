"""Wrong tier stores: one for each law, and those of public incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview.testing.tier.suite import TierConformance
from kvview_reference.tier.folder import file_store

from .edits import Base, Variant, inject

BASE = Base("FileStore", (Path(file_store.__file__),))


def make_suite(wrong: Any, variant: Variant) -> type[TierConformance]:
    """Make the suite of the wrong store, which need not end."""

    class Wrong(TierConformance):
        store = wrong
        options = {"root": "{tmp}"}
        patience = 2.0

    return Wrong


MUTANTS = inject(globals(), BASE, make_suite)
