"""The geometry contract: block sizes, KV-cache groups, and what a prefix needs.

A hybrid model has several KV-cache groups (full attention, sliding window,
chunked local attention, Mamba), each with its own block size over one pool.

Laws: GEO-1 to GEO-4 in ``kvview/laws.toml``.

Source: vLLM PR #44165; ``vllm/v1/core/single_type_kv_cache_manager.py`` (0.33.0),
``get_num_skipped_tokens`` of each manager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar

from kvview.errors import GeometryError
from kvview.keys import BlockHash, OffloadKey, make_offload_key, make_offload_keys
from kvview.prefix_search import CachedBlocks, IsCached


def _require_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise GeometryError(f"GEO-2: {name} must be a positive int (tokens), got {value!r}")


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a block size and read the same part of a prefix.

    Args:
        block_size: Tokens in one block of this group.
    """

    block_size: int
    # Then the search passes over ends that are not cached without asking what they read.
    _always_reads_its_end: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in fields(self):
            _require_positive(field.name, getattr(self, field.name))

    def num_skipped_tokens(self, num_tokens: int) -> int:
        """Leading tokens that the token at position ``num_tokens`` never reads."""
        return 0

    def required_blocks(self, num_tokens: int) -> range:
        """Blocks that must hold KV for a prefix of ``num_tokens`` (GEO-3).

        Args:
            num_tokens: Prefix length in tokens, a multiple of ``block_size``.

        Returns:
            Block numbers of the request in this group, ascending. What lies
            before the range is the null block in the request's block table.
        """
        first = self.num_skipped_tokens(num_tokens) // self.block_size
        return range(first, num_tokens // self.block_size)

    def longest_prefix(self, max_tokens: int, is_cached: IsCached, alignment: int) -> int:
        """The longest cached prefix of this group alone, in tokens.

        Args:
            max_tokens: Upper limit in tokens.
            is_cached: Asked about block numbers of this group, about each at most once.
            alignment: The result is a multiple of this many tokens, and this of the block size.
        """
        return self.search_prefix(max_tokens, CachedBlocks(is_cached), alignment)

    def search_prefix(self, max_tokens: int, cached: CachedBlocks, alignment: int) -> int:
        """The same, for who searches again with a lower limit: ``cached`` remembers."""
        step = alignment // self.block_size
        num_blocks = max_tokens // alignment * step
        while num_blocks > 0:
            required = self.required_blocks(num_blocks * self.block_size)
            missing = cached.last_missing(required.start, required.stop)
            if missing is None:
                return num_blocks * self.block_size
            # Every prefix that still needs the missing block is out.
            num_blocks = missing // step * step
            if self._always_reads_its_end:
                num_blocks = cached.last_cached(num_blocks, step)
        return 0


@dataclass(frozen=True)
class FullAttention(CacheGroup):
    """Tokens attend to everything before them."""

    def search_prefix(self, max_tokens: int, cached: CachedBlocks, alignment: int) -> int:
        # Cached prefixes are downward closed here: from the left, stop at a miss.
        """The longest cached prefix, found from the left."""
        num_tokens = cached.first_missing(max(0, max_tokens) // self.block_size) * self.block_size
        return num_tokens - num_tokens % alignment


@dataclass(frozen=True)
class SlidingWindow(CacheGroup):
    """Tokens attend to themselves and the ``sliding_window - 1`` tokens before.

    Args:
        sliding_window: Window in tokens.
    """

    sliding_window: int
    _always_reads_its_end = True  # a window of 1 reads nothing: its first candidate is a hit

    def num_skipped_tokens(self, num_tokens: int) -> int:
        """Tokens before the window."""
        return max(0, num_tokens - self.sliding_window + 1)


@dataclass(frozen=True)
class ChunkedLocalAttention(CacheGroup):
    """Tokens attend inside their own chunk only.

    Args:
        attention_chunk_size: Chunk in tokens.
    """

    attention_chunk_size: int

    def num_skipped_tokens(self, num_tokens: int) -> int:
        """Tokens before the chunk."""
        return num_tokens - num_tokens % self.attention_chunk_size


@dataclass(frozen=True)
class Mamba(CacheGroup):
    """A state-space group: the state after the last block is all that is read."""

    _always_reads_its_end = True

    def num_skipped_tokens(self, num_tokens: int) -> int:
        """All but the last token: its state holds the rest."""
        return max(0, num_tokens - 1)


@dataclass(frozen=True)
class CacheGeometry:
    """Block sizes of one engine: given once, checked once, read everywhere.

    Args:
        scheduler_block_size: Tokens; every prefix hit is a multiple of it.
        hash_block_size: Tokens covered by one entry of a request's block hashes.
        groups: The KV-cache groups; a group's index is its position.

    Raises:
        GeometryError: A size is not positive or does not divide (GEO-2).
    """

    scheduler_block_size: int
    hash_block_size: int
    groups: tuple[CacheGroup, ...]

    def __post_init__(self) -> None:
        _require_positive("scheduler_block_size", self.scheduler_block_size)
        _require_positive("hash_block_size", self.hash_block_size)
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups:
            raise GeometryError("GEO-2: groups is empty: a cache needs at least one KV-cache group")
        for index, group in enumerate(self.groups):
            _require_divides(
                f"the block size of group {index}",
                group.block_size,
                "hash_block_size",
                self.hash_block_size,
            )
            _require_divides(
                "scheduler_block_size",
                self.scheduler_block_size,
                f"the block size of group {index}",
                group.block_size,
            )

    @classmethod
    def single(cls, block_size: int) -> CacheGeometry:
        """One full-attention group with one block size for everything, in tokens."""
        return cls(block_size, block_size, (FullAttention(block_size),))

    def longest_prefix(self, max_tokens: int, is_cached: Callable[[int, int], bool]) -> int:
        """The longest prefix that is a hit for every group (GEO-4), in tokens.

        Args:
            max_tokens: Upper limit in tokens.
            is_cached: ``is_cached(group_idx, block_number)``; asked lazily, about none twice.

        Returns:
            Tokens, a multiple of ``scheduler_block_size``.
        """
        return self.search_prefix(
            max_tokens,
            [CachedBlocks(partial(is_cached, index)) for index in range(len(self.groups))],
        )

    def search_prefix(self, max_tokens: int, cached: Sequence[CachedBlocks]) -> int:
        """The same, where each group's blocks are looked up in a way of the caller's."""
        searches = list(zip(self.groups, cached, strict=True))
        # Full attention first: what it lacks, the others need not be asked about.
        searches.sort(key=lambda search: not isinstance(search[0], FullAttention))
        num_tokens = max_tokens
        while True:
            before = num_tokens
            for group, blocks in searches:
                # The greatest common hit is never stepped over: each group only
                # moves to its own longest hit at or below the candidate.
                num_tokens = group.search_prefix(num_tokens, blocks, self.scheduler_block_size)
            if num_tokens == before or num_tokens == 0:
                return num_tokens

    def longest_prefixes(
        self, max_tokens: int, is_cached: Callable[[int, int], bool]
    ) -> tuple[int, ...]:
        """The longest cached prefix of each group for itself, in tokens.

        Args:
            max_tokens: Upper limit in tokens.
            is_cached: ``is_cached(group_idx, block_number)``; asked lazily.

        Returns:
            Tokens per group, each a multiple of the group's block size; the prefix that
            all groups hit is :meth:`longest_prefix`, which may be shorter than each.
        """
        return tuple(
            group.longest_prefix(max_tokens, partial(is_cached, index), group.block_size)
            for index, group in enumerate(self.groups)
        )

    def block_key(
        self, block_hashes: Sequence[BlockHash], group_idx: int, block: int
    ) -> OffloadKey | None:
        """The key of a request's block, or None while it is not full and hashed.

        Args:
            block_hashes: Of the request.
            group_idx: KV-cache group.
            block: Number of the block in the request, in blocks of that group.
        """
        index = self.block_hash_index(group_idx, block)
        if index >= len(block_hashes):
            return None
        return make_offload_key(block_hashes[index], group_idx)

    def block_keys(
        self, block_hashes: Sequence[BlockHash], group_idx: int, blocks: range
    ) -> list[OffloadKey]:
        """The keys of blocks in a row, as far as they are full and hashed.

        Args:
            block_hashes: Of the request.
            group_idx: KV-cache group.
            blocks: Numbers of blocks in the request, ascending by 1.
        """
        ratio = self.groups[group_idx].block_size // self.hash_block_size
        hashes = block_hashes[(blocks.start + 1) * ratio - 1 : blocks.stop * ratio : ratio]
        return make_offload_keys(hashes, group_idx)

    def block_hash_index(self, group_idx: int, block: int) -> int:
        """Where a request's block hashes hold the hash of a group's block.

        A hash covers the whole prefix, so a block is named by the hash at its
        end: entry ``(block + 1) * block_size / hash_block_size - 1``.
        """
        return (block + 1) * self.groups[group_idx].block_size // self.hash_block_size - 1


def _require_divides(what: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise GeometryError(
            f"GEO-2: {what} ({value}) must be a multiple of {divisor_name} ({divisor}); "
            f"{value} % {divisor} == {value % divisor}"
        )
