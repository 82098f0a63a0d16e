"""Planted faults: wrong implementations, each a few lines over a right one.

Every module here that has ``MUTANTS`` or ``TESTED`` adds to a list.
"""

from __future__ import annotations

import importlib
import pkgutil

from .mutant import Mutant
from .tested import FaultOfTests

MUTANTS: list[Mutant] = []
"""Faults that checks of the kit must detect."""
TESTED: list[FaultOfTests] = []
"""Faults that tests must detect, because kvview alone implements the contract."""
for _name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    _module = importlib.import_module(f"{__name__}.{_name}")
    MUTANTS += getattr(_module, "MUTANTS", [])
    TESTED += getattr(_module, "TESTED", [])
