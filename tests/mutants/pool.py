"""Wrong pools and views: one per law, and those of public incidents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from kvview import GPUBlockPoolView, OffloadKey
from kvview.testing import Mutant
from kvview_reference.harness import ReferencePool
from kvview_reference.pool import BlockPool, BlockPoolView

from .planting import planter

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)


class WrongPool(ReferencePool):
    """The reference pool with places for a wrong view and a wrong pool."""

    View: ClassVar[type[BlockPoolView]] = BlockPoolView
    Pool: ClassVar[type[BlockPool]] = BlockPool

    def __init__(self, num_blocks: int = 24, enable_events: bool = False) -> None:
        super().__init__(num_blocks)
        self.pool = self.Pool(num_blocks, enable_events=enable_events)
        self.view = self.make_view()

    def make_view(self) -> GPUBlockPoolView:
        return self.View(self.pool, "conformance")

    def another_view(self) -> GPUBlockPoolView:
        return self.View(self.pool, "another")

    def telling(self) -> WrongPool:
        return type(self)(self.num_blocks, enable_events=True)


@planted("POOL-1", "vllm#52360")
class TakesNoReferenceOnBlocksInUse(WrongPool):
    """A block in use when it is touched is freed when its request is preempted."""

    class View(BlockPoolView):
        def touch_blocks(self, block_ids: Sequence[int]) -> None:
            used = [block for block in block_ids if self._pool.ref_cnt(block)]
            super().touch_blocks(block_ids)
            self._pool.free_blocks(used)


@planted("POOL-8", "vllm#42289")
class EvictsTheHashOfATouchedBlock(WrongPool):
    """A touch keeps the block but drops its key, so the hit is lost before it is used."""

    class View(BlockPoolView):
        def touch_blocks(self, block_ids: Sequence[int]) -> None:
            super().touch_blocks(block_ids)
            self._pool.evict_blocks(block_ids)


@planted("POOL-2", "vllm#42571")
class FreesDuplicatesOnce(WrongPool):
    """Of two mentions in one call only one is released."""

    class Pool(BlockPool):
        def free_blocks(self, block_ids: Iterable[int]) -> None:
            super().free_blocks(dict.fromkeys(block_ids))


@planted("POOL-3")
class TouchesUntilAnIdIsWrong(WrongPool):
    """The blocks in front of a wrong id stay touched."""

    class View(BlockPoolView):
        def touch_blocks(self, block_ids: Sequence[int]) -> None:
            for block in block_ids:
                super().touch_blocks([block])


@planted("POOL-4", "ascend#15990")
class ForgivesAFreeTooMany(WrongPool):
    """A free of a block that is not held does nothing, silently."""

    class View(BlockPoolView):
        def free_blocks(self, block_ids: Sequence[int]) -> None:
            with suppress(LookupError, ValueError):
                super().free_blocks(block_ids)


@planted("POOL-5", "UCM#1053")
class CountsTheNullBlock(WrongPool):
    """A call that names the null block fails."""

    class View(BlockPoolView):
        def free_blocks(self, block_ids: Sequence[int]) -> None:
            assert self.null_block_id not in block_ids, "the null block cannot be freed"
            super().free_blocks(block_ids)


@planted("POOL-6")
class YieldsEachKeyOnce(WrongPool):
    """Of two blocks with one key, the walk yields only the first."""

    class View(BlockPoolView):
        def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
            seen: set[bytes] = set()
            for block, key in super().iter_free_block_ids_with_hash():
                if key not in seen:
                    seen.add(key)
                    yield block, key


@planted("POOL-7", "vllm#41120")
class StopsWhenItsBlockIsTouched(WrongPool):
    """A walk ends at a block that was touched after it was yielded."""

    class View(BlockPoolView):
        def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
            for block, key in super().iter_free_block_ids_with_hash():
                yield block, key
                if not self.is_free(block):
                    return


@planted("POOL-9")
class ReportsHoldsWithoutCounts(WrongPool):
    """The view reports each held block once, however often it is held."""

    class View(BlockPoolView):
        def held_blocks(self) -> Mapping[int, int]:
            return dict.fromkeys(super().held_blocks(), 1)


@planted("POOL-10")
class ClosesWithoutAReport(WrongPool):
    """``close`` reports no holds."""

    def close(self) -> Mapping[int, int]:
        super().close()
        return {}


@planted("POOL-11")
class EvictsInReverse(WrongPool):
    """The last block of a free is evicted first."""

    class View(BlockPoolView):
        def free_blocks(self, block_ids: Sequence[int]) -> None:
            super().free_blocks(block_ids[::-1])


@planted("POOL-12")
class GivesBackAsItFrees(WrongPool):
    """Blocks given back join the tail."""

    class View(BlockPoolView):
        def give_back_blocks(self, block_ids: Sequence[int]) -> None:
            self.free_blocks(block_ids)


@planted("POOL-13")
class RestartsEachCall(WrongPool):
    """Each call of a resumed walk starts at the head of the queue."""

    class View(BlockPoolView):
        def walk_free_blocks(self) -> Any:
            walk: Any = super().walk_free_blocks()
            take = walk.take

            def take_again(max_blocks: int) -> list[tuple[int, OffloadKey]]:
                walk.restart()
                items: list[tuple[int, OffloadKey]] = take(max_blocks)
                return items

            walk.take = take_again
            return walk


@planted("POOL-14")
class NotifiesOncePerCall(WrongPool):
    """One notice stands for all blocks of a call."""

    class View(BlockPoolView):
        def free_blocks_with_notice(
            self, block_ids: Sequence[int], on_reuse: Callable[[int], None]
        ) -> None:
            notified: list[int] = []

            def first(block: int) -> None:
                if not notified:
                    notified.append(block)
                    on_reuse(block)

            super().free_blocks_with_notice(block_ids, first)
