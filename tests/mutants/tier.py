"""Wrong tier stores: one for each law, and those of public incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview.testing import StoreHarness
from kvview_reference.tier import file_store

from .edits import Base, Variant, inject, read_variants
from .mutant import Mutant

BASE = Base("FileStore", (Path(file_store.__file__),))


class WrongStore(StoreHarness):
    """A store that need not end."""

    patience = 2.0


def make_harness(wrong: Any, variant: Variant) -> Any:
    """Make a factory of harnesses of the wrong store."""
    return lambda: WrongStore(wrong, {"root": "{tmp}"})


_FILE = Path(__file__).with_suffix(".txt")
MUTANTS: list[Mutant] = inject(_FILE, BASE, make_harness)
globals().update({variant.name: variant.load() for variant in read_variants(_FILE, BASE)})
