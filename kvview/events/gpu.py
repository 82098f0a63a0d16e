"""The events of the GPU prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvview.events.tier import MEDIUM_GPU


@dataclass(frozen=True, slots=True)
class BlockStored:
    """GPU blocks of one group became reusable through the prefix cache.

    Args:
        block_hashes: Hashes without the group, in prefix order.
        parent_block_hash: Hash of the block before the first of these blocks; None at the start of
            a prompt.
        block_size: Tokens in each of the blocks.
        group_idx: KV-cache group of the blocks.
        medium: The medium of the blocks.
    """

    block_hashes: Sequence[bytes]
    parent_block_hash: bytes | None
    block_size: int
    group_idx: int
    medium: str = MEDIUM_GPU


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """GPU blocks of one group were evicted from the prefix cache."""

    block_hashes: Sequence[bytes]
    group_idx: int
    medium: str = MEDIUM_GPU


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The GPU prefix cache was reset."""

    medium: str = MEDIUM_GPU


GPUEvent = BlockStored | BlockRemoved | AllBlocksCleared
