"""Wrong geometries, one for each law."""

from __future__ import annotations

from pathlib import Path

from tests.geometry import prefix_cache

from .edits import Base, inject
from .tested import read_faults

BASE = Base("PrefixCache", (Path(prefix_cache.__file__),))
inject(globals(), BASE, lambda wrong, _: wrong)
TESTED = read_faults(__file__, BASE, "tests.geometry.prefix_cache", "tests/geometry")
