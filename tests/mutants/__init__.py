"""Planted faults: wrong implementations, each a few lines over a right one.

Every module here that has ``MUTANTS`` adds to the list.
"""

from __future__ import annotations

import importlib
import pkgutil

from .mutant import Mutant

MUTANTS: list[Mutant] = []
for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    MUTANTS += getattr(importlib.import_module(f"{__name__}.{_module}"), "MUTANTS", [])
