"""The search for the longest cached prefix, in one KV-cache group and in several.

Each kind of group (:mod:`kvview.geometry`) uses ``search_from_left`` or ``search_from_right``. A
search looks up each block at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

IsCached = Callable[[int], bool]
"""Returns whether a block of a request is cached, by its number in its group, from 0 on."""


class CachedBlocks:
    """The blocks of one group that searches have found to be cached.

    A caller that can look up many blocks at once overrides the three methods. Within one search,
    the limits of their calls only decrease.

    Args:
        is_cached: Returns whether the block of the group with this number is cached.
    """

    def __init__(self, is_cached: IsCached) -> None:
        self._is_cached = is_cached
        self._num_leading: int | None = None
        self._run: int | None = None  # all blocks from this one to the last limit are cached

    def first_missing(self, stop: int) -> int:
        """Return the first block that is not cached, at most ``stop``."""
        if self._num_leading is None:
            block = 0
            while block < stop and self._is_cached(block):
                block += 1
            self._num_leading = block
        return min(stop, self._num_leading)

    def last_missing(self, start: int, stop: int) -> int | None:
        """Return the last block from ``start`` to ``stop`` that is not cached, or None."""
        block = (stop if self._run is None else min(stop, self._run)) - 1
        while block >= start and self._is_cached(block):
            block -= 1
        self._run = block + 1
        return block if block >= start else None

    def last_cached(self, num_blocks: int, step: int) -> int:
        """Return the first of ``num_blocks``, ``num_blocks - step``, ... whose end is cached."""
        while num_blocks > 0 and not self._is_cached(num_blocks - 1):
            num_blocks -= step
        self._run = num_blocks - 1
        return num_blocks


class SearchedGroup(Protocol):
    """The part of a KV-cache group that a search needs.

    Examples:
        Find the longest prefix of which a tier has all blocks that the model reads:

        >>> window = SlidingWindow(block_size=16, sliding_window=20)
        >>> window.required_blocks(48)  # block 0 is outside the window
        range(1, 3)
        >>> window.search_prefix(64, CachedBlocks(lambda block: block in (1, 2)), alignment=16)
        48
    """

    @property
    def block_size(self) -> int:
        """Tokens in one block."""
        ...

    def required_blocks(self, num_tokens: int) -> range:
        """Blocks that must hold KV for a prefix of ``num_tokens`` (GEO-3)."""
        ...

    def search_prefix(self, max_tokens: int, cached: CachedBlocks, alignment: int) -> int:
        """Return the longest cached prefix of this group, in tokens."""
        ...


def search_from_left(
    group: SearchedGroup, max_tokens: int, cached: CachedBlocks, alignment: int
) -> int:
    """Search a group in which a prefix needs all of its blocks, up to the first miss."""
    num_tokens = cached.first_missing(max(0, max_tokens) // group.block_size) * group.block_size
    return num_tokens - num_tokens % alignment


def search_from_right(
    group: SearchedGroup,
    max_tokens: int,
    cached: CachedBlocks,
    alignment: int,
    *,
    needs_last_block: bool,
) -> int:
    """Search a group in which a prefix needs only its last blocks.

    Args:
        group: The group.
        max_tokens: Upper limit in tokens.
        cached: The cached blocks of the group.
        alignment: The result is a multiple of this number of tokens, which is a multiple of the
            block size.
        needs_last_block: Whether every prefix needs its last block, so that the search may skip
            each prefix whose last block is not cached.
    """
    step = alignment // group.block_size
    num_blocks = max_tokens // alignment * step
    while num_blocks > 0:
        required = group.required_blocks(num_blocks * group.block_size)
        missing = cached.last_missing(required.start, required.stop)
        if missing is None:
            return num_blocks * group.block_size
        # Skip every prefix that needs the missing block.
        num_blocks = missing // step * step
        if needs_last_block:
            num_blocks = cached.last_cached(num_blocks, step)
    return 0


def search_common_prefix(
    groups: Sequence[SearchedGroup],
    max_tokens: int,
    cached: Sequence[CachedBlocks],
    alignment: int,
) -> int:
    """Return the longest prefix that is a hit for every group (GEO-4), in tokens.

    Args:
        groups: The groups in the order of the search; a group with few hits should come first.
        max_tokens: Upper limit in tokens.
        cached: The cached blocks of each group.
        alignment: The result is a multiple of this number of tokens.
    """
    num_tokens = max_tokens
    while True:
        before = num_tokens
        for group, blocks in zip(groups, cached, strict=True):
            # The search never skips the longest common hit, because each group only moves to its
            # own longest hit at or below the candidate.
            num_tokens = group.search_prefix(num_tokens, blocks, alignment)
        if num_tokens == before or num_tokens == 0:
            return num_tokens
