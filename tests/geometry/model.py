"""The geometry contract as an executable model: attention masks, cached prefixes, and the laws.

The model tries all prefixes: a hit is the longest prefix whose needed blocks are cached in every
group. A prefix needs the blocks that the attention mask lets the next token read. The model uses no
code of the implementation, so it shares no mistake with the code under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from kvview.geometry import CacheGroup, ChunkedLocalAttention, Mamba, SlidingWindow

Key = tuple[int, tuple[bytes, ...]]
"""The name of a block: its group, and the hashes of the prefix up to the end of the block."""


def is_read(group: CacheGroup, token: int, position: int) -> bool:
    """Whether ``token`` reads the KV at an earlier position, according to the mask (GEO-3)."""
    if isinstance(group, SlidingWindow):
        return token - position < group.sliding_window
    if isinstance(group, ChunkedLocalAttention):
        return position // group.attention_chunk_size == token // group.attention_chunk_size
    if isinstance(group, Mamba):
        return position == token - 1
    return True


@cache
def blocks_read(group: CacheGroup, token: int) -> frozenset[int]:
    """Return the numbers of the blocks before ``token`` that the token reads."""
    return frozenset(p // group.block_size for p in range(token) if is_read(group, token, p))


def misfits(scheduler: int, hashed: int, block_sizes: Sequence[int]) -> list[set[int]]:
    """Return sets of mismatched sizes (GEO-2); an error must name all sizes of one set."""
    sizes = (scheduler, hashed, *block_sizes)
    if any(size <= 0 for size in sizes):
        return [{size} for size in sizes if size <= 0]
    if not block_sizes:
        return [set()]
    found = [{size, hashed} for size in block_sizes if size % hashed]
    return found + [{scheduler, size} for size in block_sizes if scheduler % size]


class GeometryModel:
    """The prefix cache of one geometry.

    Args:
        scheduler_block_size: The length of every hit is a multiple of this number of tokens
            (GEO-1).
        hash_block_size: Tokens of one block hash.
        groups: The KV-cache groups.
        null: The null block.
        is_on: Whether the prefix cache is on.
    """

    def __init__(
        self,
        scheduler_block_size: int,
        hash_block_size: int,
        groups: Sequence[CacheGroup],
        null: int,
        *,
        is_on: bool = True,
    ) -> None:
        self.step, self.hash_block_size, self.groups = scheduler_block_size, hash_block_size, groups
        self.null, self.is_on = null, is_on
        self.cached: dict[Key, int] = {}
        """The pool block of each cached block."""

    def key(self, hashes: Sequence[bytes], group: int, block: int) -> Key:
        """Return the name of a block, which is derived from its group and its prefix."""
        end = (block + 1) * self.groups[group].block_size
        return group, tuple(hashes[: end // self.hash_block_size])

    def needed(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return the blocks of each group that the token after a prefix reads (GEO-3)."""
        return [
            (number, block)
            for number, group in enumerate(self.groups)
            for block in sorted(blocks_read(group, num_tokens))
        ]

    def is_hit(self, hashes: Sequence[bytes], num_tokens: int) -> bool:
        """Whether all blocks that the next token reads are cached, in every group (GEO-4)."""
        return all(self.key(hashes, *one) in self.cached for one in self.needed(num_tokens))

    def longest_hit(self, hashes: Sequence[bytes], max_tokens: int) -> int:
        """Return the longest hit, a multiple of the scheduler's block size (GEO-1, GEO-4)."""
        prefixes = range(0, max_tokens + 1, self.step)
        return max(n for n in prefixes if n == 0 or (self.is_on and self.is_hit(hashes, n)))

    def tables(self, hashes: Sequence[bytes], num_tokens: int) -> list[list[int]]:
        """Return the block tables of a hit: null blocks, then the blocks that are read (GEO-3)."""
        tables = []
        for number, group in enumerate(self.groups):
            read = blocks_read(group, num_tokens)
            blocks = range(num_tokens // group.block_size)
            keys = [self.key(hashes, number, block) for block in blocks]
            tables.append([self.cached[keys[b]] if b in read else self.null for b in blocks])
        return tables
