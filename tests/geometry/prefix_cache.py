"""The KV-cache manager of the reference, and the blocks that are cached in its pool."""

from __future__ import annotations

from collections.abc import Sequence

from kvview import CacheGeometry, CacheGroup
from kvview_reference.free_queue import NULL_BLOCK_ID
from kvview_reference.geometry import KVCacheManager
from kvview_reference.pool import BlockPool


class PrefixCache:
    """The prefix cache of one geometry, in which single blocks can be cached.

    Args:
        scheduler_block_size: The length of every hit is a multiple of this number of tokens.
        hash_block_size: Tokens of one block hash.
        groups: The KV-cache groups.
        is_on: Whether the prefix cache is on.
    """

    null_block_id = NULL_BLOCK_ID

    def __init__(
        self,
        scheduler_block_size: int,
        hash_block_size: int,
        groups: Sequence[CacheGroup],
        *,
        is_on: bool = True,
    ) -> None:
        self.geometry = CacheGeometry(scheduler_block_size, hash_block_size, tuple(groups))
        self.pool = BlockPool(80, enable_caching=is_on)
        self.manager = self.make_manager()

    def make_manager(self) -> KVCacheManager:
        """Make the manager under test."""
        return KVCacheManager(self.geometry, self.pool)

    def cache(self, block_hashes: Sequence[bytes], group_idx: int, block: int) -> int:
        """Cache only block number ``block`` of a request in a group, and return its id."""
        blocks = self.pool.allocate_blocks(1)
        block_hash = block_hashes[self.geometry.block_hash_index(group_idx, block)]
        block_size = self.geometry.groups[group_idx].block_size
        self.pool.cache_blocks(blocks, [block_hash], block_size=block_size, group_idx=group_idx)
        self.pool.free_blocks(blocks)
        return blocks[0]
