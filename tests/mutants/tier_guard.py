"""Wrong guards before a tier store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvview.testing import GuardedStoreHarness
from kvview.tier import GuardedTier, Namespace, TierStore
from kvview_reference.tier import FileStore

from .mutant import Mutant
from .planting import planter

MUTANTS: list[Mutant] = []


def wrong_guard(law: str, incident: str | None = None) -> Any:
    """Plant a wrong class of guards."""

    def add(guard: type[GuardedTier]) -> type[GuardedTier]:
        class Harness(GuardedStoreHarness):
            patience = 2.0

            def guard(self, store: TierStore, namespace: Namespace, **options: Any) -> TierStore:
                return guard(store, namespace, **options)

        def factory() -> Any:
            return Harness(FileStore, {"root": "{tmp}", "checksum": "none"})

        factory.__name__ = factory.__qualname__ = guard.__name__
        factory.__doc__ = guard.__doc__
        planter(MUTANTS)(law, incident)(factory)
        return guard

    return add


@wrong_guard("TIER-12", "vllm#45704")
class LooksUpOnTheEnginesThread(GuardedTier):
    """A lookup calls the store on the caller's thread."""

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        found = self._call_store(self.store.lookup, list(keys))
        if not isinstance(found, list):
            return [False] * len(keys)
        known, _ = self._answers.flags(keys)
        return [flag and was is not False for flag, was in zip(found, known, strict=True)]
