"""Wrong coordinators, and geometries that are not checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kvview import (
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    GeometryError,
    Mamba,
    SlidingWindow,
)
from kvview.testing import Mutant
from kvview_reference.geometry.coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinator,
    SingleTypeKVCacheManager,
    make_coordinator,
)
from kvview_reference.harness import ReferenceGeometry

from .planting import planter

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)

Groups = tuple[CacheGroup, ...]
Hit = tuple[tuple[list[int], ...], int]


class Unchecked(CacheGeometry):
    """Takes any sizes."""

    def __post_init__(self) -> None:
        pass


class WrongGeometry(ReferenceGeometry):
    """Coordinators over another geometry than the one given."""

    def with_geometry(
        self, scheduler_block_size: int, hash_block_size: int, groups: Sequence[CacheGroup]
    ) -> ReferenceGeometry:
        sizes = scheduler_block_size, hash_block_size
        return type(self)(self.make_geometry(*sizes, tuple(groups)))

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        return CacheGeometry(scheduler, hashed, tuple(self.wrong(group) for group in groups))

    def make_coordinator(self) -> KVCacheCoordinator:
        geometry = self.geometry
        if not isinstance(geometry, Unchecked):
            return super().make_coordinator()
        ones = [FullAttention(1)] * len(geometry.groups)
        coordinator = make_coordinator(
            ones, self.pool, True, scheduler_block_size=1, hash_block_size=1
        )
        coordinator.geometry = geometry
        for manager, group in zip(coordinator.managers, geometry.groups, strict=True):
            manager.group, manager.block_size = group, group.block_size
            manager.geometry = replace(geometry, groups=(group,))
        return coordinator

    def wrong(self, group: CacheGroup) -> CacheGroup:
        return group


class WrongHit(ReferenceGeometry):
    """Coordinators of the class ``Coordinator``."""

    Coordinator: type[KVCacheCoordinator] = HybridKVCacheCoordinator

    def make_coordinator(self) -> KVCacheCoordinator:
        return self.Coordinator(
            self.geometry.groups,
            self.pool,
            scheduler_block_size=self.geometry.scheduler_block_size,
            hash_block_size=self.geometry.hash_block_size,
        )


def find(
    manager: SingleTypeKVCacheManager, block_hashes: Sequence[bytes], block: int
) -> int | None:
    """The pool block that holds a block of the prefix, or None."""
    keys = manager.keys(block_hashes, block, block + 1)
    return manager.pool.find_cached_block(keys[0]) if keys else None


def longest_hit(
    manager: SingleTypeKVCacheManager, block_hashes: Sequence[bytes], max_tokens: int
) -> int:
    """The longest hit of one group alone, in tokens."""
    return manager.group.longest_prefix(
        max_tokens,
        lambda block: find(manager, block_hashes, block) is not None,
        manager.geometry.scheduler_block_size,
    )


class EachAlone(HybridKVCacheCoordinator):
    """Every group's own longest hit, with its table."""

    def each_alone(self, block_hashes: Sequence[bytes], max_tokens: int) -> list[int]:
        return [longest_hit(m, block_hashes, max_tokens) for m in self.managers]

    def tables(self, block_hashes: Sequence[bytes], num_tokens: int) -> Hit:
        """The tables of a prefix, with null for what is not there."""
        tables = []
        for manager in self.managers:
            required = manager.group.required_blocks(num_tokens)
            found = [find(manager, block_hashes, block) or 0 for block in required]
            tables.append([0] * required.start + found)
        return tuple(tables), num_tokens


# --- GEO-1 ---


@planted("GEO-1")
class ComputesTheSizeAgain(WrongGeometry):
    """Takes the least common multiple of the groups' block sizes, once more."""

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        return CacheGeometry(math.lcm(*(group.block_size for group in groups)), hashed, groups)


@planted("GEO-1")
class AlignsOneGroupToItsOwnBlocks(WrongGeometry):
    """With one group there seems to be nothing to align to."""

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        return CacheGeometry(
            groups[0].block_size if len(groups) == 1 else scheduler, hashed, groups
        )


@planted("GEO-1")
class AlignsBlocksOfOneSizeToThem(WrongGeometry):
    """Groups whose blocks are of one size end a hit with any block."""

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        sizes = {group.block_size for group in groups}
        if len(groups) > 1 and len(sizes) == 1:
            scheduler = sizes.pop()
        return CacheGeometry(scheduler, hashed, groups)


# --- GEO-2 ---


@planted("GEO-2")
class TakesAnySizes(WrongGeometry):
    """Nothing is checked: hits are wrong much later."""

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        return Unchecked(scheduler, hashed, groups)


@planted("GEO-2")
class AssertsThatSizesDivide(WrongGeometry):
    """An assertion, which ``python -O`` leaves out, instead of an error."""

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        for group in groups:
            assert scheduler % group.block_size == 0 == group.block_size % hashed
        return Unchecked(scheduler, hashed, groups)


@planted("GEO-2")
class SaysOnlyThatSizesAreWrong(WrongGeometry):
    """The message names no number."""

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        try:
            return CacheGeometry(scheduler, hashed, groups)
        except GeometryError:
            raise GeometryError("block sizes do not fit") from None


@planted("GEO-2")
class ForgetsTheHashSize(WrongGeometry):
    """Blocks must fit the scheduler's; that hashes must fit blocks is not checked."""

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        CacheGeometry(scheduler, 1, groups)
        return Unchecked(scheduler, hashed, groups)


@planted("GEO-2")
class ChecksTheFirstGroupOnly(WrongGeometry):
    """Sizes of the other groups are taken as they are."""

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        CacheGeometry(scheduler, hashed, groups[:1])
        return Unchecked(scheduler, hashed, groups)


@planted("GEO-2")
class DividesByAnySize(WrongGeometry):
    """Zero is divided by, and a negative size divides: only the rest is looked at."""

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        for group in groups:
            if scheduler % group.block_size or group.block_size % hashed:
                raise GeometryError(f"{scheduler}, {group.block_size} and {hashed} do not fit")
        return Unchecked(scheduler, hashed, groups)


@planted("GEO-2")
class WantsOneHashABlock(WrongGeometry):
    """Hashes of less than a block are refused."""

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        if groups[0].block_size != hashed:
            raise GeometryError(f"block size {groups[0].block_size} is not {hashed}")
        return CacheGeometry(scheduler, hashed, groups)


@planted("GEO-2")
class NamesABlockByItsFirstHash(WrongHit):
    """A block of several hashes is looked up by the hash of its beginning."""

    class Coordinator(HybridKVCacheCoordinator):
        def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> Hit:
            size, hashed = self.geometry.groups[0].block_size, self.geometry.hash_block_size
            num_hashes = size // hashed
            begins = [block_hashes[i - i % num_hashes] for i in range(len(block_hashes))]
            return super().find_longest_cache_hit(begins, max_tokens)


@planted("GEO-2")
class WantsBlocksThatDivideEachOther(WrongGeometry):
    """Block sizes of 8 and 12 are refused, although 24 is a multiple of both."""

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        sizes = sorted(group.block_size for group in groups)
        if any(sizes[-1] % size for size in sizes):
            raise GeometryError(f"block sizes {sizes} do not divide each other")
        return CacheGeometry(scheduler, hashed, groups)


# --- GEO-3: full attention ---


@planted("GEO-3")
class SkipsHoles(WrongGeometry):
    """Full attention looks from the right, and stops at the first block it finds."""

    def wrong(self, group: CacheGroup) -> CacheGroup:
        return Mamba(group.block_size) if isinstance(group, FullAttention) else group


@planted("GEO-3")
class TrustsTheLastBlock(WrongHit):
    """Hashes are chained, so what lies between the first and the last block must be there."""

    class Coordinator(EachAlone):
        def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> Hit:
            first, step = self.managers[0], self.geometry.scheduler_block_size
            num_blocks = max_tokens // first.block_size
            cached = [b for b in range(num_blocks) if find(first, block_hashes, b) is not None]
            num_tokens = (cached[-1] + 1) * first.block_size if 0 in cached else 0
            return self.tables(block_hashes, num_tokens // step * step)


@planted("GEO-3")
class RoundsTheLimitUp(WrongHit):
    """The block that the limit lies in is hit too: nothing is left to compute."""

    class Coordinator(HybridKVCacheCoordinator):
        def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> Hit:
            step = self.geometry.scheduler_block_size
            return super().find_longest_cache_hit(block_hashes, -(-max_tokens // step) * step)


@planted("GEO-3")
class HashesABlockAlone(WrongHit):
    """What lies before a block is not part of its name: other prompts are hit."""

    def cache(self, block_hashes: Sequence[bytes], group_idx: int, block: int) -> int:
        return super().cache(number(block_hashes), group_idx, block)

    class Coordinator(HybridKVCacheCoordinator):
        def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> Hit:
            return super().find_longest_cache_hit(number(block_hashes), max_tokens)


def number(block_hashes: Sequence[bytes]) -> list[bytes]:
    """Hashes that only tell where a block stands."""
    return [b"%d" % index for index in range(len(block_hashes))]


@planted("GEO-3")
class CachesForAllGroups(ReferenceGeometry):
    """Every block is cached as one of the first group."""

    def cache(self, block_hashes: Sequence[bytes], group_idx: int, block: int) -> int:
        block_id = super().cache(block_hashes, group_idx, block)
        block_hash = block_hashes[self.geometry.block_hash_index(group_idx, block)]
        for other, group in enumerate(self.geometry.groups):
            if other != group_idx:
                self.pool.touch_blocks([block_id])
                self.pool.cache_blocks(
                    [block_id], [block_hash], block_size=group.block_size, group_idx=other
                )
                self.pool.free_blocks([block_id])
        return block_id


@planted("GEO-3")
class LeavesOutWhatIsNotRead(WrongHit):
    """Tables begin with the first block that is read: block numbers are off."""

    class Coordinator(HybridKVCacheCoordinator):
        def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> Hit:
            tables, num_tokens = super().find_longest_cache_hit(block_hashes, max_tokens)
            return tuple([b for b in table if b] for table in tables), num_tokens


@planted("GEO-3")
class NamesWhatIsNotRead(WrongHit):
    """Blocks before a window are in the table if they are cached, and held for nothing."""

    class Coordinator(HybridKVCacheCoordinator):
        def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> Hit:
            tables, num_tokens = super().find_longest_cache_hit(block_hashes, max_tokens)
            found = [
                [find(m, block_hashes, n) or 0 for n in range(len(table))]
                for m, table in zip(self.managers, tables, strict=True)
            ]
            return tuple(found), num_tokens


# --- GEO-3: sliding window ---


@planted("GEO-3")
class WindowReadsOneTokenMore(WrongGeometry):
    """The window does not count the token itself: a block too many is needed."""

    def wrong(self, group: CacheGroup) -> CacheGroup:
        if isinstance(group, SlidingWindow):
            return SlidingWindow(group.block_size, group.sliding_window + 1)
        return group


@planted("GEO-3")
class WindowReadsOneTokenLess(WrongGeometry):
    """The window counts the token itself twice: stale KV is read at its edge."""

    def wrong(self, group: CacheGroup) -> CacheGroup:
        if isinstance(group, SlidingWindow) and group.sliding_window > 1:
            return SlidingWindow(group.block_size, group.sliding_window - 1)
        return group


@planted("GEO-3")
class WindowNeedsEverything(WrongGeometry):
    """A window is looked up like full attention: what was given back is never hit again."""

    def wrong(self, group: CacheGroup) -> CacheGroup:
        return FullAttention(group.block_size) if isinstance(group, SlidingWindow) else group


@planted("GEO-3")
class WindowOfOneTokenNeedsABlock(WrongGeometry):
    """At least one block is wanted, also by a window that reads none."""

    def wrong(self, group: CacheGroup) -> CacheGroup:
        if isinstance(group, SlidingWindow) and group.sliding_window == 1:
            return SlidingWindow(group.block_size, 2)
        return group


# --- GEO-3: chunked local attention ---


@planted("GEO-3")
class ChunkIsAWindow(WrongGeometry):
    """Chunks are looked up as windows: the chunk before is needed too."""

    def wrong(self, group: CacheGroup) -> CacheGroup:
        if isinstance(group, ChunkedLocalAttention):
            return SlidingWindow(group.block_size, group.attention_chunk_size)
        return group


@planted("GEO-3")
class ChunkOfTheLastToken(WrongGeometry):
    """Reads the chunk of the last token of the prefix, not of the one after it."""

    class Group(ChunkedLocalAttention):
        def num_skipped_tokens(self, num_tokens: int) -> int:
            return super().num_skipped_tokens(max(0, num_tokens - 1))

    def wrong(self, group: CacheGroup) -> CacheGroup:
        if isinstance(group, ChunkedLocalAttention):
            return self.Group(group.block_size, group.attention_chunk_size)
        return group


@planted("GEO-3")
class RoundsTheChunkUpToBlocks(WrongGeometry):
    """The block that a chunk begins in counts as skipped: its tokens are never there."""

    class Group(ChunkedLocalAttention):
        def num_skipped_tokens(self, num_tokens: int) -> int:
            skipped = super().num_skipped_tokens(num_tokens)
            return -(-skipped // self.block_size) * self.block_size

    def wrong(self, group: CacheGroup) -> CacheGroup:
        if isinstance(group, ChunkedLocalAttention):
            return self.Group(group.block_size, group.attention_chunk_size)
        return group


# --- GEO-3: Mamba ---


@planted("GEO-3")
class MambaNeedsEverything(WrongGeometry):
    """States are looked up from the left: the first that was not kept ends the hit."""

    def wrong(self, group: CacheGroup) -> CacheGroup:
        return FullAttention(group.block_size) if isinstance(group, Mamba) else group


@planted("GEO-3")
class MambaNeedsTheStateBefore(WrongGeometry):
    """The last two states are wanted."""

    class Group(Mamba):
        def num_skipped_tokens(self, num_tokens: int) -> int:
            return max(0, num_tokens - self.block_size - 1)

    def wrong(self, group: CacheGroup) -> CacheGroup:
        return self.Group(group.block_size) if isinstance(group, Mamba) else group


# --- GEO-4 ---


@planted("GEO-4")
class TakesTheLongestHit(WrongHit):
    """The best group decides: the others read what is not there."""

    class Coordinator(EachAlone):
        def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> Hit:
            return self.tables(block_hashes, max(self.each_alone(block_hashes, max_tokens)))


@planted("GEO-4")
class TakesTheShortestHit(WrongHit):
    """Each group is asked alone: at the shortest of their hits another has a hole."""

    class Coordinator(EachAlone):
        def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> Hit:
            return self.tables(block_hashes, min(self.each_alone(block_hashes, max_tokens)))


@planted("GEO-4")
class AsksEachGroupOnce(WrongHit):
    """One round, each group below the hit of the one before: enough for two groups only."""

    class Coordinator(EachAlone):
        def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> Hit:
            num_tokens = max_tokens
            for manager in sorted(
                self.managers, key=lambda manager: not isinstance(manager.group, FullAttention)
            ):
                num_tokens = longest_hit(manager, block_hashes, num_tokens)
            return self.tables(block_hashes, num_tokens)


@planted("GEO-4")
class GivesUpWhenGroupsDiffer(WrongHit):
    """Groups that do not agree at once have no hit."""

    class Coordinator(EachAlone):
        def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> Hit:
            alone = set(self.each_alone(block_hashes, max_tokens))
            return self.tables(block_hashes, alone.pop() if len(alone) == 1 else 0)


@planted("GEO-4")
class KeepsTheTableOfTheFirstRound(WrongHit):
    """A full-attention table is not cut when another group shortens the hit."""

    class Coordinator(HybridKVCacheCoordinator):
        def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> Hit:
            tables, num_tokens = super().find_longest_cache_hit(block_hashes, max_tokens)
            kept = [
                m.hit_blocks(block_hashes, longest_hit(m, block_hashes, max_tokens))
                if isinstance(m.group, FullAttention)
                else table
                for m, table in zip(self.managers, tables, strict=True)
            ]
            return tuple(kept), num_tokens


@planted("GEO-4")
class ForgetsTheFourthGroup(WrongHit):
    """Three groups are looked up; a fourth is taken to agree."""

    class Coordinator(EachAlone):
        def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> Hit:
            first = HybridKVCacheCoordinator(
                self.geometry.groups[:3],
                self.pool,
                scheduler_block_size=self.geometry.scheduler_block_size,
                hash_block_size=self.geometry.hash_block_size,
            )
            _, num_tokens = first.find_longest_cache_hit(block_hashes, max_tokens)
            return self.tables(block_hashes, num_tokens)
