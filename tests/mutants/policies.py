"""Wrong orders of eviction, thresholds and books of offloading managers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvview import CPULoadStoreSpec, OffloadingManager, OffloadKey, PrepareStoreOutput, ReqContext
from kvview.testing import Mutant
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.offloading.policies import ARCPolicy, InFlight, LRUPolicy
from kvview_reference.offloading.policies import Keys as Batch

from .offloading import Keys, WrongTier
from .planting import planter

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)


class WrongOrder(WrongTier):
    """A tier that says it is LRU, with the policy ``Policy``."""

    Policy: Any = LRUPolicy

    def with_policy(self, name: str) -> OffloadingManager:
        manager: Any = super().with_policy(name)
        manager._make_policy = self.Policy
        manager._policy = self.Policy(self.capacity)
        return manager  # type: ignore[no-any-return]


class WrongARC(WrongOrder):
    """A tier that says it is ARC."""

    Policy: Any = ARCPolicy

    def __init__(self, cache_policy: str = "arc", capacity: int = 12, threshold: int = 1) -> None:
        super().__init__(cache_policy, capacity, threshold)


# --- OFF-10 ---


@planted("OFF-10")
class FirstInFirstOut(WrongOrder):
    """A touch changes nothing: a system prompt goes as soon as any other key."""

    class Policy(LRUPolicy):
        def touch(self, keys: Batch, in_flight: InFlight, /) -> None:
            pass


@planted("OFF-10")
class TouchesHeadsFirst(WrongOrder):
    """The last key of a touch becomes the most recent: chains lose their heads."""

    class Policy(LRUPolicy):
        def touch(self, keys: Batch, in_flight: InFlight, /) -> None:
            super().touch(keys[::-1], in_flight)


@planted("OFF-10")
class CountsTheLastMention(WrongOrder):
    """Repeats of one touch are dropped from the wrong end."""

    class Policy(LRUPolicy):
        def touch(self, keys: Batch, in_flight: InFlight, /) -> None:
            super().touch(list(dict.fromkeys(reversed(keys)))[::-1], in_flight)


@planted("OFF-10")
class EvictsTheMostRecent(WrongOrder):
    """The queue is taken from its other end."""

    class Policy(LRUPolicy):
        def pop_oldest(self, limit: int, in_flight: InFlight) -> list[OffloadKey]:
            for key in reversed(list(self.order)):
                self.order.move_to_end(key)
            return super().pop_oldest(limit, in_flight)


@planted("OFF-10", "vllm 0.24 to 0.30")
class TakesTheEndOfATransferForAUse(WrongOrder):
    """What was in flight is the most recent when it is done."""

    class Policy(LRUPolicy):
        def release(self, keys: Iterable[OffloadKey], /) -> None:
            self.touch(list(keys), InFlight(set(), set()))


@planted("OFF-10")
class IsAsOldAsItsCompletion(WrongTier):
    """A key counts from the end of its store."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            super().complete_store(keys, ctx, success)
            self.touch(keys)


@planted("OFF-10")
class TakesAnOfferForAUse(WrongTier):
    """Keys that are offered again, and held, become recent."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            output = super().prepare_store(keys, ctx)
            self.touch(keys if output else [])
            return output


@planted("OFF-10")
class TakesARefusalForAUse(WrongTier):
    """An offer that finds no room leaves the order of what it named changed."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            output = super().prepare_store(keys, ctx)
            self.touch([] if output else keys)
            return output


@planted("OFF-10")
class TouchesWhatIsSetAsideInVain(WrongOrder):
    """A key that was passed over in flight keeps its old place, though it is touched."""

    class Policy(LRUPolicy):
        def recall(self, keys: Iterable[OffloadKey]) -> None:
            pass


# --- OFF-11 ---


@planted("OFF-11")
class IsLRUByAnotherName(WrongARC):
    """One scan takes all that was used again and again."""

    Policy = LRUPolicy


@planted("OFF-11")
class OrdersByTheSecondUse(WrongARC):
    """A third use is no use: what is wanted most goes in the order of its second one."""

    class Policy(ARCPolicy):
        def touch(self, keys: Batch, in_flight: InFlight, /) -> None:
            super().touch([key for key in keys if key not in self._t2.order], in_flight)


@planted("OFF-11")
class CountsTheStoringUseTwice(WrongARC):
    """Each request that stores and touches makes its keys frequent."""

    class Policy(ARCPolicy):
        def touch(self, keys: Batch, in_flight: InFlight, /) -> None:
            super().touch(keys, InFlight(in_flight.loading, set()))


@planted("OFF-11")
class TakesALoadForASecondUse(WrongARC):
    """A request that loads and touches counts twice."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            super().complete_load(keys, ctx)
            self.touch(keys)


@planted("OFF-11")
class HasNoGhosts(WrongARC):
    """What was evicted is forgotten: nothing is ever learnt."""

    class Policy(ARCPolicy):
        def _bound_ghosts(self) -> None:
            self._b1.clear()
            self._b2.clear()


@planted("OFF-11")
class TakesTheCompanyForAGhost(WrongARC):
    """What is stored in one call with a key that comes again counts as used again too."""

    class Policy(ARCPolicy):
        def admit(self, keys: Batch, num_victims: int, in_flight: InFlight, /) -> list[OffloadKey]:
            comes_again = any(key in self._b1 or key in self._b2 for key in keys)
            victims = super().admit(keys, num_victims, in_flight)
            if comes_again:
                for key in keys:
                    self._t1.order.pop(key, None)
                    self._t2.order[key] = None
            return victims


@planted("OFF-11")
class LearnsTheOtherWay(WrongARC):
    """A ghost of what was used once makes less room for such keys."""

    class Policy(ARCPolicy):
        def _learn(self, ghosts: Iterable[OffloadKey]) -> None:
            before = self._target
            super()._learn(ghosts)
            self._target = min(max(2 * before - self._target, 0.0), self._capacity)


# --- OFF-12 ---


@planted("OFF-12")
class StoresOneOfferEarly(WrongTier):
    """An off-by-one in the threshold."""

    def with_threshold(self, num_offers: int) -> StoresOneOfferEarly:
        return type(self)(self.cache_policy, self.capacity, max(1, num_offers - 1))


@planted("OFF-12")
class EvictsForWhatIsLeftOut(WrongTier):
    """Room is made before the threshold is looked at."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            threshold, self._store_threshold = self._store_threshold, 1
            output = super().prepare_store(list(keys)[:1], ctx)
            super().complete_store(output.keys_to_store if output else [], ctx, False)
            self._store_threshold = threshold
            return super().prepare_store(keys, ctx)


@planted("OFF-12")
class CountsRefusedOffers(WrongTier):
    """An offer that finds no room counts."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            output = super().prepare_store(keys, ctx)
            for key in keys if output is None else ():
                self._offers[key] = self._offers.get(key, 0) + 1
            return output


@planted("OFF-12")
class RemembersOffersOverAReset(WrongTier):
    """What was offered before a reset is stored at its first offer after it."""

    class Manager(CPUOffloadingManager):
        def reset(self) -> None:
            offers = self._offers.copy()
            super().reset()
            self._offers.update(offers)


# --- repeats, and what is left after failures ---


@planted("OFF-2")
class NamesAPageOnce(WrongTier):
    """A load that names a key twice gets its page once: what follows is paired wrongly."""

    class Manager(CPUOffloadingManager):
        def prepare_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> CPULoadStoreSpec:
            spec = super().prepare_load(keys, ctx)
            return CPULoadStoreSpec(list(dict.fromkeys(spec.block_ids)))


@planted("OFF-3")
class CountsMentionsNotKeys(WrongTier):
    """A batch is refused for its length, though it names few keys."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            return None if len(keys) > self.num_blocks else super().prepare_store(keys, ctx)


@planted("OFF-5")
class LosesThePageThatWasEvictedFor(WrongTier):
    """A failed store gives its page back only while others are free."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            free = list(self._free_pages)
            super().complete_store(keys, ctx, success)
            if not free:
                self._free_pages[:] = self._free_pages[1:]


@planted("OFF-5")
class EndsLoadsOfWhatIsOffered(WrongTier):
    """What a store protects for its own call it releases altogether, loads of it included."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            output = super().prepare_store(keys, ctx)
            for key in keys:
                if self._loading.pop(key, 0):
                    self._policy.release([key])
            return output


@planted("OFF-8")
class EndsEitherOldOrNewLoads(WrongTier):
    """A call that names a late load ends no newer one."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            late = [key for key in keys if key in self._late_loads]
            super().complete_load(late or keys, ctx)


@planted("OFF-8")
class ForgetsLateTransfersAtTheNextReset(WrongTier):
    """A second reset takes pages of the first one's transfers for free."""

    class Manager(CPUOffloadingManager):
        def reset(self) -> None:
            late, self._late_pages = self._late_pages, {}
            self._free_pages.extend(late.values())
            super().reset()


@planted("OFF-9")
class FreesAPageForEachMention(WrongTier):
    """A failure that names a key twice frees its page twice."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            pages = [] if success else [self._pages[key] for key in keys if key in self._storing]
            super().complete_store(keys, ctx, success)
            self._free_pages.extend(page for page in set(pages) if pages.count(page) > 1)
