"""Wrong offloading managers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvview import (
    CPULoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    TransferNotInFlightError,
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


# --- OFF-1 ---


@planted("OFF-1")
class DoesNotProtectLoads(WrongTier):
    """A key that is being read is evicted, and its page written."""

    class Manager(CPUOffloadingManager):
        def prepare_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> CPULoadStoreSpec:
            spec = super().prepare_load(keys, ctx)
            super().complete_load(keys, ctx)
            return spec

        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            pass


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


@planted("OFF-1")
class RemembersOneLoadOfAKey(WrongTier):
    """The first of two requests to be done ends the protection of both."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            for key in keys:
                if key in self._loading:
                    self._loading[key] = 1
                    super().complete_load([key], ctx)


@planted("OFF-1", "ascend#10843")
class ProtectsForEver(WrongTier):
    """A load that ended still counts: usage climbs until nothing can be stored."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            pass


# --- OFF-2 ---


@planted("OFF-2")
class LoadsWhatIsBeingStored(WrongTier):
    """A pending key has a page, and the load reads whatever is in it."""

    class Manager(CPUOffloadingManager):
        def prepare_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> CPULoadStoreSpec:
            storing, self._storing = self._storing, set()
            try:
                return super().prepare_load(keys, ctx)
            finally:
                self._storing = storing


@planted("OFF-2")
class ProtectsBeforeItRefuses(WrongTier):
    """Keys before the wrong one stay protected for ever."""

    class Manager(CPUOffloadingManager):
        def prepare_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> CPULoadStoreSpec:
            specs = [super(type(self), self).prepare_load([key], ctx) for key in keys]
            return CPULoadStoreSpec([page for spec in specs for page in spec.block_ids])


@planted("OFF-2")
class NamesPagesInAnotherOrder(WrongTier):
    """A load gets the right pages, sorted: every block has another's bytes."""

    class Manager(CPUOffloadingManager):
        def prepare_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> CPULoadStoreSpec:
            return CPULoadStoreSpec(sorted(super().prepare_load(keys, ctx).block_ids))


# --- OFF-3 ---


@planted("OFF-3")
class EvictsItsOwnInput(WrongTier):
    """Keys of the same call that are held already are evicted for the new ones."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            return super().prepare_store([key for key in keys if key not in self._pages], ctx)


@planted("OFF-3")
class EvictsBeforeItRefuses(WrongTier):
    """Room is made key by key; when it does not suffice, what went is gone."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            output = super().prepare_store(keys, ctx)
            if output is None:
                room = len(self._pages) - len(self._storing) - len(self._loading)
                stored = super().prepare_store(list(keys)[:room], ctx)
                if stored is not None:
                    super().complete_store(stored.keys_to_store, ctx, success=False)
            return output


@planted("OFF-3")
class EvictsOneKeyACall(WrongTier):
    """A batch that needs more room than one key gives is refused."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            new = [key for key in keys if key not in self._pages]
            if len(new) > self.num_free_blocks() + 1:
                return None
            return super().prepare_store(keys, ctx)


@planted("OFF-3")
class ReordersTheBatch(WrongTier):
    """Keys are stored in another order than offered: pages are paired wrongly."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            return super().prepare_store(list(keys)[::-1], ctx)


@planted("OFF-3", "vllm#52360")
class GivesAPageTwice(WrongTier):
    """After a failed store its page is in the free list twice."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            super().complete_store(keys, ctx, success)
            if not success:
                self._free_pages.append(self._free_pages[-1])


# --- OFF-4 ---


@planted("OFF-4")
class TakesAFailureForASuccess(WrongTier):
    """A store that failed can be loaded."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            super().complete_store(keys, ctx, True)


@planted("OFF-4", "ascend#16662")
class LeaksThePagesOfFailures(WrongTier):
    """The page of a store that failed or was aborted never comes back."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            before = list(self._free_pages)
            super().complete_store(keys, ctx, success)
            self._free_pages[:] = before


@planted("OFF-4")
class FailsTheWholeBatch(WrongTier):
    """One failed key takes every pending key with it."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            super().complete_store(keys if success else list(self._storing), ctx, success)


@planted("OFF-4")
class GivesRoomBackWithTheWholeBatch(WrongTier):
    """Pages of failed keys are free when the last key of their batch is completed."""

    class Manager(CPUOffloadingManager):
        waiting: tuple[int, ...] = ()

        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            num_free = len(self._free_pages)
            super().complete_store(keys, ctx, success)
            self.waiting += tuple(self._free_pages[num_free:])
            del self._free_pages[num_free:]
            if not self._storing:
                self._free_pages.extend(self.waiting)
                self.waiting = ()


@planted("OFF-4")
class BelievesTheLastCompletion(WrongTier):
    """What the last call says of a batch goes for all its keys: successes are forgotten."""

    class Manager(CPUOffloadingManager):
        ended: tuple[OffloadKey, ...] = ()

        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            super().complete_store(keys, ctx, success)
            if success:
                self.ended += tuple(keys)
                return
            for key in self.ended:
                self._policy.remove({key: None})
                self._free_pages.append(self._pages.pop(key))
            self.ended = ()


# --- OFF-5 to OFF-8 ---


@planted("OFF-5")
class HoldsMoreThanFits(WrongTier):
    """An off-by-one in the count of pages."""

    def with_policy(self, name: str) -> OffloadingManager:
        return CPUOffloadingManager(self.capacity + 1, name, enable_events=True)


@planted("OFF-5")
class WastesAPage(WrongTier):
    """One page is never given to anybody."""

    def with_policy(self, name: str) -> OffloadingManager:
        return CPUOffloadingManager(self.capacity - 1, name, enable_events=True)


@planted("OFF-6", "vllm#53498")
class NeverHits(WrongTier):
    """What is stored is stamped, not registered: the tier fills and never serves."""

    class Manager(CPUOffloadingManager):
        def lookup(self, key: OffloadKey, ctx: ReqContext | None = None, /) -> LookupResult:
            answer = super().lookup(key, ctx)
            return LookupResult.MISS if answer is LookupResult.HIT else answer


@planted("OFF-6")
class HitsWhatIsBeingStored(WrongTier):
    """A pending key looks loadable."""

    class Manager(CPUOffloadingManager):
        def lookup(self, key: OffloadKey, ctx: ReqContext | None = None, /) -> LookupResult:
            answer = super().lookup(key, ctx)
            return LookupResult.HIT if answer is LookupResult.HIT_PENDING else answer


@planted("OFF-6")
class CountsWhatIsBeingStored(WrongTier):
    """A prefix that is looked up in one call goes on past a pending key."""

    class Manager(CPUOffloadingManager):
        def num_leading_hits(self, keys: Sequence[OffloadKey]) -> int:
            missing = (n for n, key in enumerate(keys) if self.lookup(key) is LookupResult.MISS)
            return next(missing, len(keys))


@planted("OFF-6")
class ReportsAnEvictionTooFew(WrongTier):
    """The last evicted key is not in the answer: its owner still believes in it."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            output = super().prepare_store(keys, ctx)
            if output is None:
                return None
            evicted = list(output.evicted_keys)[:-1]
            return PrepareStoreOutput(output.keys_to_store, output.store_spec, evicted)


@planted("OFF-6")
class LookingIsUsing(WrongTier):
    """A lookup counts as a use: polling keeps keys alive."""

    class Manager(CPUOffloadingManager):
        def lookup(self, key: OffloadKey, ctx: ReqContext | None = None, /) -> LookupResult:
            self.touch([key], ctx)
            return super().lookup(key, ctx)


@planted("OFF-6", "vllm#51614")
class IgnoresTheGroup(WrongTier):
    """A key of one KV-cache group answers for all groups."""

    class Manager(CPUOffloadingManager):
        def lookup(self, key: OffloadKey, ctx: ReqContext | None = None, /) -> LookupResult:
            same = [held for held in self._pages if held[:-4] == key[:-4]]
            return super().lookup(same[0] if same else key, ctx)


@planted("OFF-6")
class TouchesOnlyWhatItHolds(WrongTier):
    """Touching a key that was evicted in the meantime raises."""

    class Manager(CPUOffloadingManager):
        def touch(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            super().touch([key for key in keys if self._pages[key] >= 0], ctx)


@planted("OFF-7")
class TakesAnyPolicyForLRU(WrongTier):
    """A typo in the policy is LRU without a word."""

    def with_policy(self, name: str) -> OffloadingManager:
        return super().with_policy(name if name in self.policies else "lru")


@planted("OFF-8")
class ResetsItsPolicyOnly(WrongTier):
    """Keys survive a reset."""

    class Manager(CPUOffloadingManager):
        def reset(self) -> None:
            self._offers.clear()


@planted("OFF-8")
class ReusesPagesInFlight(WrongTier):
    """A reset frees pages that a transfer is still writing to."""

    class Manager(CPUOffloadingManager):
        def reset(self) -> None:
            super().reset()
            self._free_pages.extend(self._late_pages.values())

        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            free = list(self._free_pages)
            is_late = any(key in self._late_pages for key in keys)
            super().complete_store(keys, ctx, success)
            if is_late:
                self._free_pages[:] = free


@planted("OFF-8", "vllm#51637")
class TakesALateStoreForANewOne(WrongTier):
    """The completion of a store from before a reset ends the store that came after it."""

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
    """A completion that comes after a reset finds no job, and the engine dies."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            assert all(key in self._loading for key in keys), "unknown job"
            super().complete_load(keys, ctx)


@planted("OFF-3")
class RefusesWhenSomethingIsLoaded(WrongTier):
    """Two keys or more under load, and no store is accepted, though there is room."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            if len(self._loading) >= 2 and self._storing:
                return None
            return super().prepare_store(keys, ctx)


# --- OFF-9 ---


@planted("OFF-9")
class IgnoresCompletionsOfStrangers(WrongTier):
    """Stores that are not under way are left out without a word."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            super().complete_store([key for key in keys if key in self._storing], ctx, success)


@planted("OFF-9")
class TakesAnyDirection(WrongTier):
    """Whatever is in flight is ended by whatever completes: no direction is kept."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            super().complete_load([key for key in keys if key not in self._storing], ctx)


@planted("OFF-9")
class TakesASecondFailure(WrongTier):
    """A failure that is told again finds its key gone, and says nothing."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            if success or any(key in self._pages for key in keys):
                super().complete_store(keys, ctx, success)


@planted("OFF-9")
class CompletesABatchOnce(WrongTier):
    """The second completion of one prepare_store is taken for an error."""

    class Manager(CPUOffloadingManager):
        batch: frozenset[OffloadKey] = frozenset()

        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            output = super().prepare_store(keys, ctx)
            self.batch = frozenset(output.keys_to_store if output else ())
            return output

        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            if not self.batch.issuperset(keys):
                raise TransferNotInFlightError("OFF-9: this store was completed")
            super().complete_store(keys, ctx, success)
            self.batch = frozenset()


@planted("OFF-9")
class GivesAPageBackTwice(WrongTier):
    """The second failure is refused when the page is free already: two keys share it."""

    class Manager(CPUOffloadingManager):
        last_freed: tuple[int, ...] = ()

        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            if success or self._storing.issuperset(keys):
                self.last_freed = tuple(self._pages[key] for key in keys if key in self._pages)
            else:
                self._free_pages.extend(self.last_freed)
            super().complete_store(keys, ctx, success)


@planted("OFF-9")
class EndsLoadsAsOftenAsItIsTold(WrongTier):
    """Counts stop at zero: a load too many is taken."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            for key in keys:
                if key in self._loading:
                    super().complete_load([key], ctx)


@planted("OFF-9")
class ComparesKeysNotCounts(WrongTier):
    """A key named twice in one completion ends once."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            super().complete_load(list(dict.fromkeys(keys)), ctx)


@planted("OFF-9")
class StoresUntilAKeyIsWrong(WrongTier):
    """Stores are completed one by one: those before the wrong key are done."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            for key in keys:
                super().complete_store([key], ctx, success)


@planted("OFF-9")
class LoadsUntilAKeyIsWrong(WrongTier):
    """Loads are ended one by one: those before the wrong key are evictable."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            for key in keys:
                super().complete_load([key], ctx)


@planted("OFF-9")
class TakesAnythingAfterAReset(WrongTier):
    """After a reset, completions of unknown keys are taken for late ones."""

    class Manager(CPUOffloadingManager):
        was_reset = False

        def reset(self) -> None:
            super().reset()
            self.was_reset = True

        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            known = [key for key in keys if key in self._loading or key in self._late_loads]
            super().complete_load(known if self.was_reset else keys, ctx)


@planted("OFF-9")
class TakesAStoreTooManyWhileItLoads(WrongTier):
    """While keys are loaded, a completed store may be completed again."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            if self._loading and success:
                keys = [key for key in keys if key in self._storing]
            super().complete_store(keys, ctx, success)


# --- keys that come and go ---


@planted("OFF-3")
class LooksAtTheOldestHalfOnly(WrongTier):
    """Where the older half of the keys is in flight, no room is made."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            oldest = list(self._pages)[: self.num_blocks // 2]
            if not self.num_free_blocks() and self._loading.keys() >= set(oldest):
                return None
            return super().prepare_store(keys, ctx)


@planted("OFF-6")
class LooksFromTheEnd(WrongTier):
    """A prefix is taken for held up to its last key that is."""

    class Manager(CPUOffloadingManager):
        def num_leading_hits(self, keys: Sequence[OffloadKey]) -> int:
            hits = [self.lookup(key) is LookupResult.HIT for key in keys]
            return len(hits) - hits[::-1].index(True) if any(hits) else 0


@planted("OFF-2")
class AnswersWithOneObject(WrongTier):
    """All loads are answered with one spec, whose pages are those of the last."""

    class Manager(CPUOffloadingManager):
        def prepare_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> CPULoadStoreSpec:
            spec = super().prepare_load(keys, ctx)
            self._answer: list[int] = vars(self).setdefault("_answer", [])
            self._answer[:] = spec.block_ids
            return CPULoadStoreSpec(self._answer)


@planted("OFF-12")
class ForgetsOffersOfWhatIsStored(WrongTier):
    """A key that was stored needs all its offers again, once it is evicted."""

    class Manager(CPUOffloadingManager):
        def prepare_store(
            self, keys: Keys, ctx: ReqContext | None = None, /
        ) -> PrepareStoreOutput | None:
            output = super().prepare_store(keys, ctx)
            for key in output.keys_to_store if output else ():
                self._offers.pop(key, None)
            return output
