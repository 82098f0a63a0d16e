"""Wrong geometries, one for each law."""

from __future__ import annotations

from pathlib import Path

from kvview_reference import harness

from .edits import Base, inject

BASE = Base("ReferenceGeometry", (Path(harness.__file__),))
MUTANTS = inject(globals(), BASE, lambda wrong, _: wrong)
