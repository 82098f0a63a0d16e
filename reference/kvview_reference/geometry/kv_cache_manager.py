"""The one object that the engine's scheduler asks for KV-cache blocks.

Source: ``vllm/v1/core/kv_cache_manager.py`` (0.33.0).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvview import CacheGroup
from kvview_reference.geometry.coordinator import KVCacheCoordinator
from kvview_reference.pool import BlockPool


class KVCacheManager:
    """What the engine's scheduler calls: hits, room, caching, release.

    Args:
        kv_cache_groups: The KV-cache groups; a group's index is its position.
        num_blocks: Blocks of the pool, the null block included.
        scheduler_block_size: Tokens; every hit is a multiple of it. Given here once, and
            threaded down (GEO-1).
        hash_block_size: Tokens of one entry of a request's block hashes.
        enable_caching: Whether there is a prefix cache.
        enable_kv_cache_events: Whether the pool records GPU events.

    Raises:
        GeometryError: A size does not divide (GEO-2).
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
        self, block_hashes: Sequence[bytes], num_tokens: int
    ) -> tuple[tuple[list[int], ...], int]:
        """The prefix-cache hit of a request; at least its last token is left to compute.

        Returns:
            Block ids a group, and tokens. Nothing is held yet.
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
            num_tokens: All tokens that need a place after the step.
            hit_blocks: Of a request that starts, from ``find_computed_blocks``.
            num_computed_tokens: Of a request that starts: hit plus to be loaded.

        Returns:
            False when the pool has not enough free blocks.

        Raises:
            ValueError: The counts or the hits cannot be meant so (TABLE-1, TABLE-2).
        """
        hits = hit_blocks or ((),) * len(self.geometry.groups)
        return self.coordinator.allocate(request_id, num_tokens, hits, num_computed_tokens)

    def block_tables(self, request_id: str) -> tuple[list[int], ...]:
        """The request's block tables themselves, one a group: to read, until the next step."""
        return tuple(manager.blocks(request_id) for manager in self.coordinator.managers)

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """A copy of the request's block tables, one a group."""
        return tuple(list(m.blocks(request_id)) for m in self.coordinator.managers)

    def cache_blocks(
        self, request_id: str, block_hashes: Sequence[bytes], num_computed_tokens: int
    ) -> None:
        """Register what is computed, then give back what no later token reads.

        Args:
            request_id: The request.
            block_hashes: Of the request, as far as it is computed.
            num_computed_tokens: Tokens whose KV is in its blocks.

        Raises:
            ValueError: It has no room for that, or no hashes (TABLE-2).
        """
        self.coordinator.check_computed(request_id, block_hashes, num_computed_tokens)
        for manager in self.coordinator.managers:
            manager.cache_blocks(request_id, block_hashes, num_computed_tokens)
            manager.drop_skipped_blocks(request_id, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Give all blocks of a request back; nothing when it has none."""
        for manager in self.coordinator.managers:
            manager.free(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; refused with False while one is in use."""
        return self.pool.reset_prefix_cache()
