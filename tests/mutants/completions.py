"""Wrong offloading managers: completions that nothing waits for."""

from __future__ import annotations

from collections.abc import Collection

from kvview import OffloadKey, ReqContext
from kvview.testing import Mutant
from kvview_reference.offloading import CPUOffloadingManager

from .managers import WrongTier
from .planting import planter

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)

Keys = Collection[OffloadKey]


@planted("OFF-9", "check_off_9_completion_that_nothing_waits_for_is_refused")
class IgnoresCompletionsOfStrangers(WrongTier):
    """Stores that are not under way are left out without a word."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            super().complete_store([key for key in keys if key in self._storing], ctx, success)


@planted("OFF-9", "check_off_9_completion_that_nothing_waits_for_is_refused")
class TakesAnyDirection(WrongTier):
    """Whatever is in flight is ended by whatever completes: no direction is kept."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            super().complete_load([key for key in keys if key not in self._storing], ctx)


@planted("OFF-9", "check_off_9_store_is_completed_once")
class TakesASecondFailure(WrongTier):
    """A failure that is told again finds its key gone, and says nothing."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            if success or any(key in self._pages for key in keys):
                super().complete_store(keys, ctx, success)


@planted("OFF-9", "check_off_9_page_of_a_failed_store_is_given_back_once")
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


@planted("OFF-9", "check_off_9_as_many_loads_are_completed_as_were_prepared")
class EndsLoadsAsOftenAsItIsTold(WrongTier):
    """Counts stop at zero: a load too many is taken."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            for key in keys:
                if key in self._loading:
                    super().complete_load([key], ctx)


@planted("OFF-9", "check_off_9_as_many_loads_are_completed_as_were_prepared")
class ComparesKeysNotCounts(WrongTier):
    """A key named twice in one completion ends once."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            super().complete_load(list(dict.fromkeys(keys)), ctx)


@planted("OFF-9", "check_off_9_refused_completion_of_stores_changes_nothing")
class StoresUntilAKeyIsWrong(WrongTier):
    """Stores are completed one by one: those before the wrong key are done."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            for key in keys:
                super().complete_store([key], ctx, success)


@planted("OFF-9", "check_off_9_refused_completion_of_loads_changes_nothing")
class LoadsUntilAKeyIsWrong(WrongTier):
    """Loads are ended one by one: those before the wrong key are evictable."""

    class Manager(CPUOffloadingManager):
        def complete_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> None:
            for key in keys:
                super().complete_load([key], ctx)


@planted("OFF-9", "check_off_9_late_transfer_is_completed_once_too")
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


@planted("OFF-9", "check_off_any_sequence_of_calls")
class TakesAStoreTooManyWhileItLoads(WrongTier):
    """While keys are loaded, a completed store may be completed again."""

    class Manager(CPUOffloadingManager):
        def complete_store(
            self, keys: Keys, ctx: ReqContext | None = None, /, success: bool = True
        ) -> None:
            if self._loading and success:
                keys = [key for key in keys if key in self._storing]
            super().complete_store(keys, ctx, success)
