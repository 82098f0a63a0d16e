"""Wrong events of offloading managers."""

from __future__ import annotations

from typing import Any

from kvview import OffloadingEvent, PrepareStoreOutput, ReqContext
from kvview.testing import Mutant
from kvview_reference.offloading import CPUOffloadingManager

from .offloading import Keys, WrongTier
from .planting import planter

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)


@planted("EVENT-1")
class RemovesKeysThatWereNotStored(WrongTier):
    """A failed store is reported as a removal."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            super().complete_store(keys, ctx, success)
            self._emit([] if success else keys, removed=True)


@planted("EVENT-2", "vllm#57159")
class AdvertisesBeforeTheStoreEnds(WrongTier):
    """Keys are advertised when their store starts, so a router sends requests too early."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            output = super().prepare_store(keys, ctx)
            self._emit(output.keys_to_store if output else [], removed=False)
            return output


@planted("EVENT-3", "vllm#57453")
class ReportsStoresBeforeRemovals(WrongTier):
    """Events are sorted by kind, so a key that was removed and stored again is lost."""

    class Manager(CPUOffloadingManager):
        def take_events(self) -> list[OffloadingEvent]:
            return sorted(super().take_events(), key=lambda event: event.removed)


@planted("EVENT-4")
class AdvertisesFailures(WrongTier):
    """A store is advertised whether it succeeded or failed."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            super().complete_store(keys, ctx, success)
            if not success:
                self._emit(keys, removed=False)


@planted("EVENT-5", "vllm#49413")
class ResetsWithoutEvents(WrongTier):
    """A reset emits no events, so routers keep the keys."""

    class Manager(CPUOffloadingManager):
        def reset(self) -> None:
            events: Any = self._events
            self._events = None
            super().reset()
            self._events = events
