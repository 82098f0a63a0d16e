"""Wrong pools and views: one for each law, and those of public incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview import GPUBlockPoolView
from kvview_reference import pool
from kvview_reference.harness import ReferencePool

from .edits import Base, Variant, inject

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

    return Wrong


MUTANTS = inject(globals(), BASE, make_harness)
