"""Wrong events of offloading managers."""

from __future__ import annotations

from pathlib import Path

from .edits import inject
from .mutant import Mutant
from .offloading import BASE, make_harness

MUTANTS: list[Mutant] = inject(Path(__file__).with_suffix(".txt"), BASE, make_harness)
for _mutant in MUTANTS:
    _mutant.factory.__module__ = __name__
    globals()[_mutant.name] = _mutant.factory
