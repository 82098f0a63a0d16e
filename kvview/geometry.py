"""The geometry contract: block sizes, KV-cache groups, and the blocks that a prefix needs.

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
from kvview.prefix_search import (
    CachedBlocks,
    IsCached,
    search_common_prefix,
    search_from_left,
    search_from_right,
)


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
    _needs_last_block: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in fields(self):
            _require_positive(field.name, getattr(self, field.name))

    def num_skipped_tokens(self, num_tokens: int) -> int:
        """Return the number of leading tokens that the token at ``num_tokens`` never reads."""
        return 0

    def required_blocks(self, num_tokens: int) -> range:
        """Return the blocks that must hold KV for a prefix of ``num_tokens`` (GEO-3).

        Args:
            num_tokens: Prefix length in tokens, a multiple of ``block_size``.

        Returns:
            Block numbers of the request in this group, ascending. Earlier blocks
            are the null block in the request's block table.
        """
        first = self.num_skipped_tokens(num_tokens) // self.block_size
        return range(first, num_tokens // self.block_size)

    def longest_prefix(self, max_tokens: int, is_cached: IsCached, alignment: int) -> int:
        """Return the longest cached prefix of this group alone, in tokens.

        Args:
            max_tokens: Upper limit in tokens.
            is_cached: Returns whether a block of this group is cached; called at most once for each
                block number.
            alignment: The result is a multiple of this number of tokens, which is a multiple of the
                block size.
        """
        return self.search_prefix(max_tokens, CachedBlocks(is_cached), alignment)

    def search_prefix(self, max_tokens: int, cached: CachedBlocks, alignment: int) -> int:
        """Search like :meth:`longest_prefix`; ``cached`` keeps looked-up blocks for later calls."""
        return search_from_right(
            self, max_tokens, cached, alignment, needs_last_block=self._needs_last_block
        )


@dataclass(frozen=True)
class FullAttention(CacheGroup):
    """Tokens attend to all tokens before them."""

    def search_prefix(self, max_tokens: int, cached: CachedBlocks, alignment: int) -> int:
        """Search from the left, because every prefix needs all its blocks."""
        return search_from_left(self, max_tokens, cached, alignment)


@dataclass(frozen=True)
class SlidingWindow(CacheGroup):
    """Tokens attend to themselves and to the ``sliding_window - 1`` tokens before them.

    Args:
        sliding_window: Window in tokens.
    """

    sliding_window: int
    _needs_last_block = True  # with a window of 1 no block is read, so the first candidate is a hit

    def num_skipped_tokens(self, num_tokens: int) -> int:
        """Return the number of tokens before the window."""
        return max(0, num_tokens - self.sliding_window + 1)


@dataclass(frozen=True)
class ChunkedLocalAttention(CacheGroup):
    """Tokens attend inside their own chunk only.

    Args:
        attention_chunk_size: Chunk in tokens.
    """

    attention_chunk_size: int

    def num_skipped_tokens(self, num_tokens: int) -> int:
        """Return the number of tokens before the chunk."""
        return num_tokens - num_tokens % self.attention_chunk_size


@dataclass(frozen=True)
class Mamba(CacheGroup):
    """A state-space group: a token reads only the state after the last block."""

    _needs_last_block = True

    def num_skipped_tokens(self, num_tokens: int) -> int:
        """Return the number of tokens before the last token, whose state includes these tokens."""
        return max(0, num_tokens - 1)


@dataclass(frozen=True)
class CacheGeometry:
    """The block sizes and KV-cache groups of one engine, which are checked when the object is made.

    Args:
        scheduler_block_size: The length of every prefix hit is a multiple of this number of tokens.
        hash_block_size: Tokens covered by one entry of a request's block hashes.
        groups: The KV-cache groups; a group's index is its position.

    Raises:
        GeometryError: A size is not positive, or is not a multiple of another one as GEO-2
            requires.
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
        """Make a geometry with one full-attention group and one block size, in tokens."""
        return cls(block_size, block_size, (FullAttention(block_size),))

    def longest_prefix(self, max_tokens: int, is_cached: Callable[[int, int], bool]) -> int:
        """Return the longest prefix that is a hit for every group (GEO-4), in tokens.

        Args:
            max_tokens: Upper limit in tokens.
            is_cached: ``is_cached(group_idx, block_number)``; called at most once for each block.

        Returns:
            Tokens, a multiple of ``scheduler_block_size``.
        """
        return self.search_prefix(
            max_tokens,
            [CachedBlocks(partial(is_cached, index)) for index in range(len(self.groups))],
        )

    def search_prefix(self, max_tokens: int, cached: Sequence[CachedBlocks]) -> int:
        """Search like :meth:`longest_prefix`; ``cached`` has one object for each group."""
        # Full attention is searched first, so that the other groups look up fewer blocks.
        searches = sorted(
            zip(self.groups, cached, strict=True),
            key=lambda search: not isinstance(search[0], FullAttention),
        )
        groups, blocks = zip(*searches, strict=True)
        return search_common_prefix(groups, max_tokens, blocks, self.scheduler_block_size)

    def block_key(
        self, block_hashes: Sequence[BlockHash], group_idx: int, block: int
    ) -> OffloadKey | None:
        """Return the key of a request's block, or None while the block is not full and hashed.

        Args:
            block_hashes: The block hashes of the request.
            group_idx: KV-cache group.
            block: Number of the block in the request, counted in blocks of the group.
        """
        index = self.block_hash_index(group_idx, block)
        if index >= len(block_hashes):
            return None
        return make_offload_key(block_hashes[index], group_idx)

    def block_keys(
        self, block_hashes: Sequence[BlockHash], group_idx: int, blocks: range
    ) -> list[OffloadKey]:
        """Return the keys of consecutive blocks, up to the first block that is not full and hashed.

        Args:
            block_hashes: The block hashes of the request.
            group_idx: KV-cache group.
            blocks: Numbers of blocks in the request, consecutive and ascending.
        """
        ratio = self.groups[group_idx].block_size // self.hash_block_size
        hashes = block_hashes[(blocks.start + 1) * ratio - 1 : blocks.stop * ratio : ratio]
        return make_offload_keys(hashes, group_idx)

    def block_hash_index(self, group_idx: int, block: int) -> int:
        """Return the index of a block's hash in the block hashes of its request.

        A hash covers the whole prefix, so the hash of a block is the hash up to the last token of
        the block. The index is ``(block + 1) * block_size / hash_block_size - 1``.
        """
        return (block + 1) * self.groups[group_idx].block_size // self.hash_block_size - 1


def _require_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise GeometryError(
            f"GEO-2: {name} ({value}) must be a multiple of {divisor_name} ({divisor}); "
            f"{value} % {divisor} == {value % divisor}"
        )
