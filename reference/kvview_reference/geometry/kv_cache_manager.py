"""The manager that allocates KV-cache blocks for the engine's scheduler.

Source: ``vllm/v1/core/kv_cache_manager.py`` (0.33.0).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvview import CacheGroup
from kvview.keys import BlockHash
from kvview_reference.geometry.coordinator import KVCacheCoordinator
from kvview_reference.pool import BlockPool


class KVCacheManager:
    """The KV-cache manager of the engine's scheduler, which finds, allocates and frees blocks.

    Args:
        kv_cache_groups: The KV-cache groups; a group's index is its position.
        num_blocks: Number of blocks of the pool, including the null block.
        scheduler_block_size: Number of tokens; the length of every hit is a multiple of it. Set
            once here and passed down (GEO-1).
        hash_block_size: Number of tokens that one block hash of a request covers.
        enable_caching: Whether the manager has a prefix cache.
        enable_kv_cache_events: Whether the pool records GPU events.

    Raises:
        GeometryError: A size does not divide another size (GEO-2).
    """

    def __init__(
        self,
        kv_cache_groups: Sequence[CacheGroup],
        num_blocks: int,
        *,
        scheduler_block_size: int,
        hash_block_size: int,
        enable_caching: bool = True,
        enable_kv_cache_events: bool = False,
    ) -> None:
        self.pool = BlockPool(
            num_blocks, enable_caching=enable_caching, enable_events=enable_kv_cache_events
        )
        self.coordinator = KVCacheCoordinator(
            kv_cache_groups,
            self.pool,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
        )
        self.geometry = self.coordinator.geometry

    def find_computed_blocks(
        self, block_hashes: Sequence[BlockHash], num_tokens: int
    ) -> tuple[tuple[list[int], ...], int]:
        """Return the prefix-cache hit of a request, which never includes its last token.

        Returns:
            Block ids per group, and the number of tokens. No block is held yet.
        """
        return self.coordinator.find_longest_cache_hit(block_hashes, num_tokens - 1)

    def allocate_slots(
        self,
        request_id: str,
        num_tokens: int,
        *,
        hit_blocks: tuple[Sequence[int], ...] | None = None,
        num_computed_tokens: int = 0,
    ) -> bool:
        """Make room for ``num_tokens`` tokens of a request, or change nothing.

        Args:
            request_id: The request.
            num_tokens: Number of all tokens that need slots after the step.
            hit_blocks: For a new request, the hit from ``find_computed_blocks``.
            num_computed_tokens: For a new request, the number of tokens that are hit or will be
                loaded.

        Returns:
            False if too few blocks are free.

        Raises:
            ValueError: The counts or the hits are invalid (TABLE-1, TABLE-2).
        """
        hits = hit_blocks or ((),) * len(self.geometry.groups)
        return self.coordinator.allocate(request_id, num_tokens, hits, num_computed_tokens)

    def block_tables(self, request_id: str) -> tuple[list[int], ...]:
        """Return the request's own block tables, one per group; callers must not change them."""
        return tuple(manager.blocks(request_id) for manager in self.coordinator.managers)

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return a copy of the request's block tables, one per group."""
        return tuple(list(m.blocks(request_id)) for m in self.coordinator.managers)

    def cache_blocks(
        self, request_id: str, block_hashes: Sequence[bytes], num_computed_tokens: int
    ) -> None:
        """Register the computed blocks, then free the blocks that no later token reads.

        Args:
            request_id: The request.
            block_hashes: Block hashes of the request, at least the hashes of computed blocks.
            num_computed_tokens: Number of tokens whose KV is in the request's blocks.

        Raises:
            ValueError: Room or hashes are missing (TABLE-2).
        """
        self.coordinator.check_computed(request_id, block_hashes, num_computed_tokens)
        for manager in self.coordinator.managers:
            manager.cache_blocks(request_id, block_hashes, num_computed_tokens)
            manager.drop_skipped_blocks(request_id, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Free all blocks of a request, if it has any."""
        for manager in self.coordinator.managers:
            manager.free(request_id)

    def reset_prefix_cache(self) -> bool:
        """Drop every cached block; while a block is in use, drop no block and return False."""
        return self.pool.reset_prefix_cache()
