"""Wrong pools and views: one for each law, and those of public incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview import GPUBlockPoolView
from kvview_reference import pool
from kvview_reference.harness import ReferencePool

from .edits import Base, Variant, inject
from .mutant import Mutant

BASE = Base("BlockPool", (Path(pool.__file__),))


def make_harness(wrong: Any, variant: Variant) -> Any:
    """Make a harness of the wrong pool."""

    class Wrong(ReferencePool):
        def __init__(self, num_blocks: int = 24, enable_events: bool = False) -> None:
            super().__init__(num_blocks)
            self.pool = wrong(num_blocks, enable_events=enable_events)
            self.view: GPUBlockPoolView = self.make_view()

        def telling(self) -> ReferencePool:
            return type(self)(self.num_blocks, enable_events=True)

    Wrong.__module__ = __name__
    return Wrong


MUTANTS: list[Mutant] = inject(Path(__file__).with_suffix(".txt"), BASE, make_harness)
globals().update({mutant.name: mutant.factory for mutant in MUTANTS})  # scripts import them
