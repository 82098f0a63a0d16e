"""What the search for a cached prefix asks about the blocks of one group.

The search itself is that of each kind of group (:mod:`kvview.geometry`).
"""

from __future__ import annotations

from collections.abc import Callable

IsCached = Callable[[int], bool]
"""Whether block number i of a request (0-based, in its group's blocks) is cached."""


class CachedBlocks:
    """What a search knows of the blocks of one group; it asks about none twice.

    Who can look up many blocks at once overrides the three questions, whose limits only
    fall in the course of one search.

    Args:
        is_cached: Asked about block numbers of the group.
    """

    def __init__(self, is_cached: IsCached) -> None:
        self._is_cached = is_cached
        self._num_leading: int | None = None
        self._run: int | None = None  # from here to the last limit all blocks are cached

    def first_missing(self, stop: int) -> int:
        """The first block that is not cached, at most ``stop``."""
        if self._num_leading is None:
            block = 0
            while block < stop and self._is_cached(block):
                block += 1
            self._num_leading = block
        return min(stop, self._num_leading)

    def last_missing(self, start: int, stop: int) -> int | None:
        """The last block from ``start`` to ``stop`` that is not cached, if there is one."""
        block = (stop if self._run is None else min(stop, self._run)) - 1
        while block >= start and self._is_cached(block):
            block -= 1
        self._run = block + 1
        return block if block >= start else None

    def last_cached(self, num_blocks: int, step: int) -> int:
        """The largest of ``num_blocks``, less ``step`` each, that ends with a cached block."""
        while num_blocks > 0 and not self._is_cached(num_blocks - 1):
            num_blocks -= step
        self._run = num_blocks - 1
        return num_blocks
