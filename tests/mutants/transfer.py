"""Wrong transfer workers: one for each law, and those of public incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview_reference.harness import ReferenceTransfer
from kvview_reference.transfer import worker

from .edits import Base, Variant, inject
from .mutant import Mutant

BASE = Base("CPUGPUTransferWorker", (Path(worker.__file__),))


def make_harness(wrong: Any, variant: Variant) -> Any:
    """Make a harness of the wrong worker."""

    class Wrong(ReferenceTransfer):
        def make_worker(self) -> Any:
            return wrong(
                self.kv_caches, self.num_cpu_blocks, blocks_per_chunk=self.blocks_per_chunk
            )

    Wrong.__module__ = __name__
    return Wrong


MUTANTS: list[Mutant] = inject(Path(__file__).with_suffix(".txt"), BASE, make_harness)
globals().update({mutant.name: mutant.factory for mutant in MUTANTS})  # scripts import them
