"""Wrong guards before a tier store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvview.testing import GuardedStoreHarness
from kvview.tier import Namespace, TierStore, guarded
from kvview_reference.tier import FileStore

from .edits import Base, Variant, inject

BASE = Base("GuardedTier", (Path(guarded.__file__),))


def make_harness(wrong: Any, variant: Variant) -> Any:
    """Make a factory of harnesses of the wrong guard."""

    class Wrong(GuardedStoreHarness):
        patience = 2.0

        def guard(self, store: TierStore, namespace: Namespace, **options: Any) -> TierStore:
            guard: TierStore = wrong(store, namespace, **options)
            return guard

    return lambda: Wrong(FileStore, {"root": "{tmp}", "checksum": "none"})


MUTANTS = inject(globals(), BASE, make_harness)
