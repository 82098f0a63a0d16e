"""Wrong geometries, one for each law."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvview import (
    CacheGeometry,
    CacheGroup,
    GeometryError,
    SlidingWindow,
)
from kvview.prefix_search import CachedBlocks
from kvview_reference.geometry.coordinator import KVCacheCoordinator
from kvview_reference.harness import ReferenceGeometry

from .mutant import Mutant
from .planting import planter

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)

Groups = tuple[CacheGroup, ...]


class WrongGeometry(ReferenceGeometry):
    """Coordinators over another geometry than the given one."""

    def with_geometry(
        self, scheduler_block_size: int, hash_block_size: int, groups: Sequence[CacheGroup]
    ) -> ReferenceGeometry:
        sizes = scheduler_block_size, hash_block_size
        return type(self)(self.make_geometry(*sizes, tuple(groups)))

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        return CacheGeometry(scheduler, hashed, tuple(self.wrong(group) for group in groups))

    def wrong(self, group: CacheGroup) -> CacheGroup:
        return group


@planted("GEO-1")
class ComputesTheSizeAgain(WrongGeometry):
    """The coordinator computes the least common multiple of the block sizes again."""

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        return CacheGeometry(math.lcm(*(group.block_size for group in groups)), hashed, groups)


@planted("GEO-2")
class RefusesSizesWithoutNumbers(WrongGeometry):
    """The error names no number."""

    def make_geometry(self, scheduler: int, hashed: int, groups: Groups) -> CacheGeometry:
        try:
            return CacheGeometry(scheduler, hashed, groups)
        except GeometryError:
            raise GeometryError("block sizes do not fit") from None


@planted("GEO-3")
class WindowReadsOneTokenLess(WrongGeometry):
    """The window is one token too short, so stale KV is read at its edge."""

    def wrong(self, group: CacheGroup) -> CacheGroup:
        if isinstance(group, SlidingWindow) and group.sliding_window > 1:
            return SlidingWindow(group.block_size, group.sliding_window - 1)
        return group


@planted("GEO-4")
class SearchesEachGroupOnce(ReferenceGeometry):
    """The search makes one round over the groups instead of repeating it."""

    def make_coordinator(self) -> KVCacheCoordinator:
        coordinator, given = super().make_coordinator(), self.geometry
        coordinator.geometry = OneRound(
            given.scheduler_block_size, given.hash_block_size, given.groups
        )
        return coordinator


class OneRound(CacheGeometry):
    def search_prefix(self, max_tokens: int, cached: Sequence[CachedBlocks]) -> int:
        for group, found in zip(self.groups, cached, strict=True):
            max_tokens = group.search_prefix(max_tokens, found, self.scheduler_block_size)
        return max_tokens
