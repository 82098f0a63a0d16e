"""Wrong transfer workers: one for each law, and those of public incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview_reference.harness import ReferenceTransfer
from kvview_reference.transfer import worker

from .edits import Base, Variant, inject

BASE = Base("CPUGPUTransferWorker", (Path(worker.__file__),))


def make_harness(wrong: Any, variant: Variant) -> Any:
    """Make a harness of the wrong worker."""

    class Wrong(ReferenceTransfer):
        def make_worker(self) -> Any:
            return wrong(
                self.kv_caches, self.num_cpu_blocks, blocks_per_chunk=self.blocks_per_chunk
            )

    return Wrong


MUTANTS = inject(globals(), BASE, make_harness)
