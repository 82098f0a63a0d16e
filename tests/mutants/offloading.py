"""Wrong offloading managers: one for each law, and those of public incidents."""

from __future__ import annotations

from collections.abc import Collection

from kvview import (
    CPULoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from kvview.testing import Mutant
from kvview_reference.harness import ReferenceManager
from kvview_reference.offloading import CPUOffloadingManager

from .planting import planter

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)

Keys = Collection[OffloadKey]


class WrongTier(ReferenceManager):
    """A tier with a manager of the class ``Manager``."""


@planted("OFF-1", "vllm#54914")
class EvictsWhatIsBeingStored(WrongTier):
    """Once the tier is full, keys that are still being written make room."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            output = super().prepare_store(keys, ctx)
            if output is None and self._storing:
                super().complete_store(list(self._storing))
                output = super().prepare_store(keys, ctx)
            return output


@planted("OFF-1", "ascend#10843")
class ProtectsForever(WrongTier):
    """A load that ended still counts, so usage grows until no key can be stored."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            pass


@planted("OFF-2")
class NamesPagesInAnotherOrder(WrongTier):
    """A load names the right pages in sorted order, so blocks get the bytes of other keys."""

    class Manager(CPUOffloadingManager):
        def prepare_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> CPULoadStoreSpec:
            return CPULoadStoreSpec(sorted(super().prepare_load(keys, ctx).block_ids))


@planted("OFF-3")
class EvictsItsOwnInput(WrongTier):
    """Keys of the same call that are held already are evicted for the new ones."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            return super().prepare_store([key for key in keys if key not in self._pages], ctx)


@planted("OFF-4", "ascend#16662")
class LeaksThePagesOfFailures(WrongTier):
    """The page of a store that failed or was aborted is never reused."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            before = list(self._free_pages)
            super().complete_store(keys, ctx, success)
            self._free_pages[:] = before


@planted("OFF-5")
class HoldsMoreThanFits(WrongTier):
    """An off-by-one in the count of pages."""

    def with_policy(self, name: str) -> OffloadingManager:
        return CPUOffloadingManager(self.capacity + 1, name, enable_events=True)


@planted("OFF-6", "vllm#53498")
class NeverHits(WrongTier):
    """A stored key is never a hit, so the tier fills and never serves."""

    class Manager(CPUOffloadingManager):
        def lookup(self, key: OffloadKey, ctx: ReqContext | None = None, /) -> LookupResult:
            answer = super().lookup(key, ctx)
            return LookupResult.MISS if answer is LookupResult.HIT else answer


@planted("OFF-6", "vllm#51614")
class IgnoresTheGroup(WrongTier):
    """A key of one KV-cache group is a hit for all groups."""

    class Manager(CPUOffloadingManager):
        def lookup(self, key: OffloadKey, ctx: ReqContext | None = None, /) -> LookupResult:
            same = [held for held in self._pages if held[:-4] == key[:-4]]
            return super().lookup(same[0] if same else key, ctx)


@planted("OFF-7")
class TakesAnyPolicyForLRU(WrongTier):
    """An unknown policy is silently replaced by LRU."""

    def with_policy(self, name: str) -> OffloadingManager:
        return super().with_policy(name if name in self.policies else "lru")


@planted("OFF-8", "vllm#51637")
class TakesALateStoreForANewOne(WrongTier):
    """The completion of a store older than a reset ends the store that followed the reset."""

    class Manager(CPUOffloadingManager):
        def reset(self) -> None:
            super().reset()
            self._late_pages.clear()

        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            super().complete_store([key for key in keys if key in self._storing], ctx, success)


@planted("OFF-8", "vllm#52170")
class AssertsThatEveryLoadIsKnown(WrongTier):
    """A completion after a reset finds no job, and the engine dies."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            assert all(key in self._loading for key in keys), "unknown job"
            super().complete_load(keys, ctx)


@planted("OFF-9")
class IgnoresCompletionsOfStrangers(WrongTier):
    """Completions of stores that are not under way are silently ignored."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            super().complete_store([key for key in keys if key in self._storing], ctx, success)


@planted("OFF-10", "vllm 0.24 to 0.30")
class TakesTheEndOfATransferForAUse(WrongTier):
    """A key is used when its transfer ends."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            super().complete_load(keys, ctx)
            self.touch(keys)


@planted("OFF-11")
class IsLRUByAnotherName(WrongTier):
    """A manager declared as ARC evicts as LRU does."""

    def __init__(self, cache_policy: str = "arc", capacity: int = 12, threshold: int = 1) -> None:
        super().__init__(cache_policy, capacity, threshold)

    def with_policy(self, name: str) -> OffloadingManager:
        return super().with_policy("lru" if name == "arc" else name)


@planted("OFF-12")
class StoresOneOfferEarly(WrongTier):
    """An off-by-one in the threshold."""

    def with_threshold(self, num_offers: int) -> StoresOneOfferEarly:
        return type(self)(self.cache_policy, self.capacity, max(1, num_offers - 1))
