"""Wrong pools: several blocks under one key, pools of thousands, ids from numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from kvview import FreeBlockWalk, GPUBlockPoolView, OffloadKey
from kvview.testing import Mutant
from kvview_reference.harness import ReferencePool
from kvview_reference.pool_view import BlockPoolView

from .list_pool import ListPool
from .planting import planter

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)


@planted("POOL-6", "check_pool_6_each_block_of_one_key_is_yielded")
class YieldsEachKeyOnce(ListPool):
    """Of equal prompts only one is seen in the walk: the others are evicted unstored."""

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        seen: set[bytes] = set()
        for block, key in super().iter_free_block_ids_with_hash():
            if key not in seen:
                seen.add(key)
                yield block, key


class IndexedPool(ListPool):
    """Finds by an index of keys, as pools do."""

    def __init__(self, num_blocks: int = 24) -> None:
        super().__init__(num_blocks)
        self.index: dict[bytes, int] = {}

    def cache(
        self, block_ids: Sequence[int], block_hashes: Sequence[bytes], group_idx: int
    ) -> None:
        super().cache(block_ids, block_hashes, group_idx)
        for block, block_hash in zip(block_ids, block_hashes, strict=True):
            self.add(self.pack(block_hash, group_idx), block)

    def add(self, key: bytes, block: int) -> None:
        self.index.setdefault(key, block)

    def find_cached_block(self, key: OffloadKey, /) -> int | None:
        super().find_cached_block(key)
        return self.index.get(key)

    def forget(self, block_ids: Sequence[int], keys: dict[int, list[bytes]]) -> None:
        for block in block_ids:
            for key in keys.get(block, []):
                if self.index.get(key) == block:
                    del self.index[key]

    def allocate(self, num_blocks: int, /) -> list[int]:
        keys = dict(self.hashes)
        blocks = super().allocate(num_blocks)
        self.forget(blocks, keys)
        return blocks

    def evict(self, block_ids: Sequence[int]) -> None:
        self.forget(block_ids, self.hashes)
        super().evict(block_ids)

    def reset(self) -> bool:
        done = super().reset()
        if done:
            self.index.clear()
        return done


@planted("POOL-8", "check_pool_8_key_is_found_while_any_block_holds_it")
class KnowsTheFirstBlockOfAKey(IndexedPool):
    """When the block that came first is handed out again, the key is gone for all."""


@planted("POOL-8", "check_pool_8_evicting_one_block_leaves_the_others")
class KnowsTheLastBlockOfAKey(IndexedPool):
    """Each block that caches a key takes the place of the one before."""

    def add(self, key: bytes, block: int) -> None:
        self.index[key] = block


@planted("POOL-8", "check_pool_8_evicting_one_block_leaves_the_others")
class EvictsByKey(ListPool):
    """Every block with a key of the one that is dropped loses its keys."""

    def evict(self, block_ids: Sequence[int]) -> None:
        gone = {key for block in block_ids for key in self.hashes.get(block, ())}
        super().evict([block for block, keys in self.hashes.items() if gone.intersection(keys)])


@planted("POOL-8", "check_pool_8_reset_forgets_each_block_of_a_key")
class ForgetsOneBlockAKeyAtAReset(IndexedPool):
    """The index outlives a reset for keys that several blocks had."""

    def reset(self) -> bool:
        again = [key for keys in self.hashes.values() for key in keys]
        index = dict(self.index)
        done = super().reset()
        self.index.update({k: b for k, b in index.items() if done and again.count(k) > 1})
        return done


class WrongViewPool(ReferencePool):
    """The pool with a view of the class ``View``."""

    View: type[BlockPoolView] = BlockPoolView

    def make_view(self) -> GPUBlockPoolView:
        return self.View(self.pool, "conformance")


@planted("POOL-6", "check_pool_6_long_walk_after_most_was_touched")
class WalksAHundredBlocks(WrongViewPool):
    """A walk looks at so many entries and takes that for the end."""

    class View(BlockPoolView):
        def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
            return islice(super().iter_free_block_ids_with_hash(), 100)


@planted("POOL-7", "check_pool_7_long_walk_tells_the_truth")
class ReadsChunksAhead(WrongViewPool):
    """From the 65th block on what is yielded was true when its chunk was read."""

    class View(BlockPoolView):
        def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
            walk = super().iter_free_block_ids_with_hash()
            yield from islice(walk, 64)
            while chunk := list(islice(walk, 64)):
                yield from chunk


@planted("POOL-13", "check_pool_13_long_walk_misses_nothing")
class TakesSixtyFourAtMost(WrongViewPool):
    """A call that wants more gets 64, as if the queue ended there."""

    class View(BlockPoolView):
        def walk_free_blocks(self) -> FreeBlockWalk:
            walk: Any = super().walk_free_blocks()
            take: Callable[[int], list[tuple[int, OffloadKey]]] = walk.take
            walk.take = lambda max_blocks: take(min(max_blocks, 64))
            return walk  # type: ignore[no-any-return]


@planted("POOL-4", "check_pool_4_numpy_ids_work_or_are_refused")
class TakesAnArrayForNothing(WrongViewPool):
    """An array of ids is accepted, and no block of it is held."""

    class View(BlockPoolView):
        def touch_blocks(self, block_ids: Sequence[int]) -> None:
            super().touch_blocks([] if hasattr(block_ids, "dtype") else block_ids)
