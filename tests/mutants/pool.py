"""Wrong pools and views: one for each law, and those of public incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview_reference import pool
from kvview_reference.harness import ReferenceEnginePool, ReferencePool

from .edits import Base, Variant, inject

BASE = Base("BlockPool", (Path(pool.__file__),))


def make_suite(wrong: Any, variant: Variant) -> Any:
    """Make a suite of the wrong pool."""
    engine = type("WrongEnginePool", (ReferenceEnginePool,), {"pool_class": wrong})
    return type(variant.name, (ReferencePool,), {"engine_class": engine})


MUTANTS = inject(globals(), BASE, make_suite)
