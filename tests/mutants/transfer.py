"""Wrong transfer workers: one for each law, and those of public incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview_reference.harness import ReferenceTransfer
from kvview_reference.transfer import worker

from .edits import Base, Variant, inject

BASE = Base("CPUGPUTransferWorker", (Path(worker.__file__),))


def make_suite(wrong: Any, variant: Variant) -> Any:
    """Make the suite of the wrong worker."""

    def make(self: Any, kv_caches: Any, num_cpu_blocks: int, blocks_per_chunk: int) -> Any:
        return wrong(kv_caches, num_cpu_blocks, blocks_per_chunk=blocks_per_chunk)

    return type(variant.name, (ReferenceTransfer,), {"make": make, "__module__": __name__})


MUTANTS = inject(globals(), BASE, make_suite)
