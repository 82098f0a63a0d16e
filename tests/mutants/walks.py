"""Wrong pools: walks that resume, and notices of reuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvview import (
    FreeBlockWalk,
    GPUBlockPoolView,
    OffloadKey,
)
from kvview.testing import Capability, Mutant
from kvview_reference.harness import ReferencePool
from kvview_reference.pool_view import BlockPoolView

from .list_pool import ListPool, ListWalk
from .planting import planter

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)


# --- POOL-13 ---


@planted("POOL-13", "check_pool_13_walk_goes_on_where_it_stopped")
class BeginsEachCallAnew(ListPool):
    """Each call walks from the head: seven visits for each block that is stored."""

    def walk_free_blocks(self) -> FreeBlockWalk:
        class Walk(ListWalk):
            def take(self, max_blocks: int, /) -> list[tuple[int, OffloadKey]]:
                self.passed.clear()
                return super().take(max_blocks)

        return Walk(self)


@planted("POOL-13", "check_pool_13_walk_goes_on_where_it_stopped")
class EndsForGood(ListPool):
    """At the end of the queue the walk is over: what joins later is never stored."""

    def walk_free_blocks(self) -> FreeBlockWalk:
        class Walk(ListWalk):
            is_over = False

            def take(self, max_blocks: int, /) -> list[tuple[int, OffloadKey]]:
                items = [] if self.is_over else super().take(max_blocks)
                self.is_over = self.is_over or (not items and max_blocks > 0)
                return items

        return Walk(self)


@planted("POOL-13", "check_pool_13_what_came_back_comes_again")
class PassesABlockOnce(ListPool):
    """What it has yielded once it never yields again, whatever it holds by then."""

    def walk_free_blocks(self) -> FreeBlockWalk:
        class Walk(ListWalk):
            def is_ahead(self, block: int, passed: int) -> bool:
                return block not in self.passed and super().is_ahead(block, passed)

        return Walk(self)


@planted("POOL-13", "check_pool_13_what_joins_at_the_head_comes_after_restart")
class YieldsWhatIsGivenBack(ListPool):
    """What the view itself gives back comes again, and again: its walk never ends."""

    def give_back_blocks(self, block_ids: Sequence[int], /) -> None:
        super().give_back_blocks(block_ids)
        self.place = list(self.joined)


@planted("POOL-13", "check_pool_13_walk_goes_on_when_its_place_is_gone")
class FollowsItsBlockToTheTail(ListPool):
    """The place is a block; when it left and came back, all that stayed is skipped."""

    def walk_free_blocks(self) -> FreeBlockWalk:
        class Walk(ListWalk):
            cursor: int | None = None

            def ahead(self) -> list[int]:
                queue = self.pool.queue
                if self.cursor in queue:
                    queue = queue[queue.index(self.cursor) + 1 :]
                return [block for block in queue if block in self.pool.hashes]

            def take(self, max_blocks: int, /) -> list[tuple[int, OffloadKey]]:
                items = super().take(max_blocks)
                self.cursor = items[-1][0] if items else self.cursor
                return items

        return Walk(self)


@planted("POOL-13", "check_pool_13_what_is_taken_is_true")
class TakesFromASnapshot(ListPool):
    """A walk is a list made when it was opened."""

    def walk_free_blocks(self) -> FreeBlockWalk:
        class Walk(ListWalk):
            def __init__(self, pool: ListPool) -> None:
                super().__init__(pool)
                self.items = list(pool.iter_free_block_ids_with_hash())

            def take(self, max_blocks: int, /) -> list[tuple[int, OffloadKey]]:
                self.check_open()
                taken, self.items = self.items[:max_blocks], self.items[max_blocks:]
                return taken

        return Walk(self)


@planted("POOL-13", "check_pool_13_engine_may_take_what_the_walk_passed")
class LosesItsPlaceToTheEngine(ListPool):
    """When the engine took the block it stood at, it begins again at the tail."""

    def walk_free_blocks(self) -> FreeBlockWalk:
        class Walk(ListWalk):
            def ahead(self) -> list[int]:
                last = next(reversed(self.passed), None)
                lost = last is not None and self.pool.refs[last] > 0
                return [] if lost else super().ahead()

        return Walk(self)


@planted("POOL-13", "check_pool_13_block_with_several_hashes_is_one_block")
class CutsABlockInTwo(ListPool):
    """The limit counts keys: those of one block are torn apart, or lost."""

    def walk_free_blocks(self) -> FreeBlockWalk:
        class Walk(ListWalk):
            def take(self, max_blocks: int, /) -> list[tuple[int, OffloadKey]]:
                return super().take(max_blocks)[:max_blocks]

        return Walk(self)


@planted("POOL-13", "check_pool_13_walk_begins_again")
class CanNotBeginAgain(ListPool):
    """``restart`` does nothing."""

    def walk_free_blocks(self) -> FreeBlockWalk:
        class Walk(ListWalk):
            def restart(self) -> None:
                self.check_open()

        return Walk(self)


@planted("POOL-13", "check_pool_13_closed_walk_is_refused")
class TakesNothingInSilence(ListPool):
    """A closed walk is empty: nothing is stored any more, and nobody hears of it."""

    def walk_free_blocks(self) -> FreeBlockWalk:
        class Walk(ListWalk):
            def take(self, max_blocks: int, /) -> list[tuple[int, OffloadKey]]:
                return [] if self.is_closed else super().take(max_blocks)

        return Walk(self)


@planted("POOL-13", "check_pool_13_taking_a_few_costs_the_same_in_a_large_pool")
class WalksFromTheHeadEachTime(ReferencePool):
    """The place is found by walking to it: each step pays for the whole queue."""

    def make_view(self) -> GPUBlockPoolView:
        class View(BlockPoolView):
            def walk_free_blocks(self) -> FreeBlockWalk:
                walk = super().walk_free_blocks()
                take = walk.take

                def slowly(max_blocks: int) -> list[tuple[int, OffloadKey]]:
                    list(self.iter_free_block_ids())
                    return take(max_blocks)

                walk.take = slowly  # type: ignore[method-assign]
                return walk

        return View(self.pool, "mutant")


@planted("POOL-13", "check_pool_13_open_walk_does_not_grow")
class RemembersAllThatItPassed(ListPool):
    """The walk keeps every item that it ever yielded."""

    capabilities = ListPool.capabilities | {Capability.SIZED}

    def walk_free_blocks(self) -> FreeBlockWalk:
        class Walk(ListWalk):
            def __init__(self, pool: ListPool) -> None:
                super().__init__(pool)
                self.items: list[tuple[int, OffloadKey]] = []

            def take(self, max_blocks: int, /) -> list[tuple[int, OffloadKey]]:
                self.items += super().take(max_blocks)
                return self.items[-max_blocks:]

        return Walk(self)


# --- POOL-14 ---


@planted("POOL-14", "check_pool_14_notice_comes_once_when_a_block_is_handed_out")
class TellsEachTime(ListPool):
    """A watcher stays: it hears of blocks that are somebody else's by now."""

    def tell(self, block_ids: Sequence[int]) -> None:
        watched = dict(self.watched)
        super().tell(block_ids)
        self.watched = watched


@planted("POOL-14", "check_pool_14_hashed_block_is_told_of_too")
class TellsOfUnhashedBlocksOnly(ListPool):
    """A block that keeps its hash is never told of."""

    def free_blocks_with_notice(
        self, block_ids: Sequence[int], on_reuse: Callable[[int], None], /
    ) -> None:
        super().free_blocks_with_notice(block_ids, on_reuse)
        for block in block_ids:
            if block in self.hashes:
                del self.watched[block]


@planted("POOL-14", "check_pool_14_touch_does_not_end_the_wait")
class ForgetsWhatIsTouched(ListPool):
    """A prefix hit ends the wait: the block is reused later, and is still being read."""

    def take(self, block_ids: Sequence[int]) -> None:
        super().take(block_ids)
        for block in block_ids:
            self.watched.pop(block, None)


@planted("POOL-14", "check_pool_14_block_in_use_is_watched_until_all_gave_it_back")
class WatchesWhatBecameFreeOnly(ListPool):
    """A block that a request still uses is given back without notice."""

    def free_blocks_with_notice(
        self, block_ids: Sequence[int], on_reuse: Callable[[int], None], /
    ) -> None:
        super().free_blocks_with_notice(block_ids, on_reuse)
        for block in block_ids:
            if self.refs[block]:
                self.watched.pop(block, None)


@planted("POOL-14", "check_pool_14_notice_comes_at_a_reset")
class TellsNothingAtAReset(ListPool):
    """After new weights were loaded the old KV is still read."""

    def reset(self) -> bool:
        watched, self.watched = self.watched, {}
        done = super().reset()
        self.watched = watched
        return done


@planted("POOL-14", "check_pool_14_gives_back_as_free_does")
class WatchesBeforeItChecks(ListPool):
    """A call that is refused is told of all the same."""

    def free_blocks_with_notice(
        self, block_ids: Sequence[int], on_reuse: Callable[[int], None], /
    ) -> None:
        self.watched.update((block, on_reuse) for block in self.real(block_ids))
        super().free_blocks_with_notice(block_ids, on_reuse)


@planted("POOL-14", "check_pool_14_later_call_takes_the_place_of_the_earlier_one")
class TellsAViewTwice(ListPool):
    """Two calls for one block are two notices."""

    def free_blocks_with_notice(
        self, block_ids: Sequence[int], on_reuse: Callable[[int], None], /
    ) -> None:
        before = dict(self.watched)

        def both(block_id: int) -> None:
            on_reuse(block_id)
            if block_id in before:
                before[block_id](block_id)

        super().free_blocks_with_notice(block_ids, both)


@planted("POOL-14", "check_pool_14_notice_that_raises_does_not_end_the_engine")
class LetsANoticeEndTheEngine(ListPool):
    """What a callback raises comes out of the engine's allocation."""

    def tell(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if block in self.watched:
                self.watched.pop(block)(block)


@planted("POOL-14", "check_pool_14_closed_view_is_told_nothing")
class TellsAClosedView(ListPool):
    """A connector that is gone is called from inside an allocation."""

    def close(self) -> Mapping[int, int]:
        watched = dict(self.watched)
        held = super().close()
        self.watched = watched
        return held


@planted("POOL-1", "check_pool_any_sequence_of_calls")
class LosesABlockOnceInAWhile(ListPool):
    """A block that is evicted while it is held never comes back: no scenario here has that."""

    lost: frozenset[int] = frozenset()

    def evict(self, block_ids: Sequence[int]) -> None:
        super().evict(block_ids)
        self.lost |= {block for block in block_ids if block in self.held}

    def enqueue(self, block_ids: Sequence[int]) -> None:
        super().enqueue([block for block in block_ids if block not in self.lost])
