"""Wrong tier stores: one for each law, and those of public incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview.testing import StoreHarness
from kvview_reference.tier.folder import file_store

from .edits import Base, Variant, inject

BASE = Base("FileStore", (Path(file_store.__file__),))


class WrongStore(StoreHarness):
    """A store that need not end."""

    patience = 2.0


def make_harness(wrong: Any, variant: Variant) -> Any:
    """Make a factory of harnesses of the wrong store."""
    return lambda: WrongStore(wrong, {"root": "{tmp}"})


MUTANTS = inject(globals(), BASE, make_harness)
