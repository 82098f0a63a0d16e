"""Wrong events of offloading managers."""

from __future__ import annotations

from .edits import inject
from .offloading import BASE, make_suite

MUTANTS = inject(globals(), BASE, make_suite)
