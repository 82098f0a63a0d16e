"""The block tables of requests, over one or several KV-cache groups.

``KVCacheManager`` (one per engine) asks a coordinator, which asks one
single-type manager a group. What differs between full attention, sliding
window, chunked local attention and Mamba is which blocks a prefix needs, and
that is the geometry's knowledge (:mod:`kvview.geometry`): one manager class
serves all four. ``scheduler_block_size`` is an argument of each, from the top (GEO-1).

- TABLE-1 Room **must** be asked for a positive number of tokens, those computed
  already included. Who asks for less than it has keeps what it has: tokens that were
  speculated and not taken cost nothing.
- TABLE-2 A request has block tables from its first room to ``free``. Hits **must** come
  with the first room, and only what has tables can be cached; ``free`` of a request
  without tables does nothing, so it may come twice.

Source: vLLM PR #44165; ``vllm/v1/core/kv_cache_coordinator.py`` and
``single_type_kv_cache_manager.py`` (0.33.0).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from typing_extensions import override

from kvview import CacheGeometry, CacheGroup, GeometryError, make_offload_key
from kvview_reference.pool import NULL_BLOCK_ID, BlockPool


class SingleTypeKVCacheManager:
    """The block tables of all requests in one KV-cache group.

    Args:
        group: What the group's layers read of a prefix.
        block_pool: The pool that all groups share.
        kv_cache_group_id: Index of the group.
        scheduler_block_size: Tokens; every hit is a multiple of it.
        hash_block_size: Tokens of one entry of a request's block hashes.

    Raises:
        GeometryError: A size does not divide (GEO-2).
    """

    def __init__(
        self,
        group: CacheGroup,
        block_pool: BlockPool,
        *,
        kv_cache_group_id: int,
        scheduler_block_size: int,
        hash_block_size: int,
    ) -> None:
        self.geometry = CacheGeometry(scheduler_block_size, hash_block_size, (group,))
        self.pool = block_pool
        self.group_idx = kv_cache_group_id
        self.group = group
        self.block_size = group.block_size
        self._tables: dict[str, list[int]] = {}
        self._num_cached: dict[str, int] = {}  # leading blocks already looked at for caching
        self._num_dropped: dict[str, int] = {}  # leading blocks already given back

    def find_cached_block(self, block_hashes: Sequence[bytes], block: int) -> int | None:
        """The pool block that holds block number ``block`` of a prefix, or None."""
        index = self.geometry.block_hash_index(0, block)
        if index >= len(block_hashes):
            return None
        return self.pool.find_cached_block(make_offload_key(block_hashes[index], self.group_idx))

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[list[int], int]:
        """The longest hit of this group alone: its blocks, and its length in tokens.

        Blocks that the next token will not read are the null block.
        """
        num_tokens = self.group.longest_prefix(
            max_tokens,
            lambda block: self.find_cached_block(block_hashes, block) is not None,
            self.geometry.scheduler_block_size,
        )
        return self.hit_blocks(block_hashes, num_tokens), num_tokens

    def hit_blocks(self, block_hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """The block table of a hit of ``num_tokens``."""
        required = self.group.required_blocks(num_tokens)
        blocks = [NULL_BLOCK_ID] * required.start
        for number in required:
            block_id = self.find_cached_block(block_hashes, number)
            assert block_id is not None, "a hit names only cached blocks"
            blocks.append(block_id)
        return blocks

    def blocks(self, request_id: str) -> list[int]:
        """The request's block table; empty when it has none."""
        return self._tables.get(request_id, [])

    def num_new_blocks(self, request_id: str, num_tokens: int, num_skipped_blocks: int) -> int:
        """Blocks to take from the pool so that ``num_tokens`` have a place."""
        have = max(len(self.blocks(request_id)), num_skipped_blocks)
        return max(0, -(-num_tokens // self.block_size) - have)

    def start(self, request_id: str, hit_blocks: Sequence[int], num_computed_tokens: int) -> None:
        """Open a table: the hit's blocks that are still read, one reference each.

        Args:
            request_id: A request without a table.
            hit_blocks: Of the GPU prefix cache, from block 0.
            num_computed_tokens: Tokens that will be there when compute starts,
                loaded ones included: decides what is skipped.
        """
        first = self.group.num_skipped_tokens(num_computed_tokens) // self.block_size
        table = [NULL_BLOCK_ID] * first + list(hit_blocks[first:])
        self.pool.touch_blocks(table)
        self._tables[request_id] = table
        self._num_cached[request_id] = len(table)  # hits are cached, nulls never will be
        self._num_dropped[request_id] = first

    def extend(self, request_id: str, num_tokens: int) -> None:
        """Take blocks until ``num_tokens`` have a place; the caller knows they are free."""
        table = self._tables[request_id]
        table += self.pool.allocate_blocks(self.num_new_blocks(request_id, num_tokens, 0))

    def cache_blocks(
        self, request_id: str, block_hashes: Sequence[bytes], num_computed_tokens: int
    ) -> None:
        """Register the request's blocks that are full by now."""
        first = self._num_cached[request_id]
        last = num_computed_tokens // self.block_size
        if first >= last or not self.pool.enable_caching:
            return
        hash_index = self.geometry.block_hash_index
        parent = block_hashes[hash_index(0, first - 1)] if first else None
        self.pool.cache_blocks(
            self._tables[request_id][first:last],
            [block_hashes[hash_index(0, block)] for block in range(first, last)],
            group_idx=self.group_idx,
            block_size=self.block_size,
            parent_hash=parent,
        )
        self._num_cached[request_id] = last

    def drop_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back the blocks that no later token reads."""
        first = self._num_dropped[request_id]
        last = self.group.num_skipped_tokens(num_computed_tokens) // self.block_size
        if first >= last:
            return
        table = self._tables[request_id]
        last = min(last, len(table))
        self.pool.free_blocks(table[first:last][::-1])
        table[first:last] = [NULL_BLOCK_ID] * (last - first)
        self._num_dropped[request_id] = last

    def free(self, request_id: str) -> None:
        """Give all blocks back, the last first: the head of a prefix serves more requests."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            del self._num_cached[request_id], self._num_dropped[request_id]
            self.pool.free_blocks(table[::-1])


class KVCacheCoordinator(ABC):
    """Keeps the groups of one engine in step.

    Args:
        kv_cache_groups: The KV-cache groups; a group's index is its position.
        block_pool: The pool that all groups share.
        scheduler_block_size: Tokens; every hit is a multiple of it.
        hash_block_size: Tokens of one entry of a request's block hashes.

    Raises:
        GeometryError: A size does not divide (GEO-2).
    """

    def __init__(
        self,
        kv_cache_groups: Sequence[CacheGroup],
        block_pool: BlockPool,
        *,
        scheduler_block_size: int,
        hash_block_size: int,
    ) -> None:
        self.geometry = CacheGeometry(scheduler_block_size, hash_block_size, tuple(kv_cache_groups))
        self.pool = block_pool
        self.managers = tuple(
            SingleTypeKVCacheManager(
                group,
                block_pool,
                kv_cache_group_id=index,
                scheduler_block_size=scheduler_block_size,
                hash_block_size=hash_block_size,
            )
            for index, group in enumerate(kv_cache_groups)
        )

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[list[int], ...], int]:
        """The longest prefix that is a hit for every group (GEO-4).

        Args:
            block_hashes: Of the request, one each ``hash_block_size`` tokens.
            max_tokens: Upper limit in tokens.

        Returns:
            Block ids a group, from block 0 (null where not needed), and tokens.
        """

    def allocate(
        self,
        request_id: str,
        num_tokens: int,
        hit_blocks: tuple[Sequence[int], ...],
        num_computed_tokens: int,
    ) -> bool:
        """Give a request room for ``num_tokens`` in every group, or change nothing.

        Args:
            request_id: The request; without a table it gets one.
            num_tokens: Tokens that need a place afterwards.
            hit_blocks: For a new request, its hit a group.
            num_computed_tokens: For a new request, tokens hit and to be loaded.

        Returns:
            False when the pool has not enough free blocks.

        Raises:
            ValueError: The counts or the hits cannot be meant so (TABLE-1, TABLE-2).
        """
        is_new = not any(manager.blocks(request_id) for manager in self.managers)
        if not 0 <= num_computed_tokens <= num_tokens or num_tokens < 1:
            raise ValueError(
                f"TABLE-1: request {request_id!r} asks for room for {num_tokens} tokens, "
                f"{num_computed_tokens} of them computed: expected at least 1, and those computed"
            )
        if not is_new and (any(hit_blocks) or num_computed_tokens):
            raise ValueError(
                f"TABLE-2: request {request_id!r} has block tables already: hits and computed "
                f"tokens come with the first room only"
            )
        needed = 0
        pinned: set[int] = set()
        for manager, hit in zip(self.managers, hit_blocks, strict=True):
            first = 0
            if is_new:
                first = manager.group.num_skipped_tokens(num_computed_tokens) // manager.block_size
                pinned.update(b for b in hit[first:] if b and self.pool.ref_cnt(b) == 0)
            needed += manager.num_new_blocks(request_id, num_tokens, max(first, len(hit)))
        if needed + len(pinned) > self.pool.num_free_blocks():
            return False
        if is_new:
            # Every hit is held before the first allocation can evict one of them.
            for manager, hit in zip(self.managers, hit_blocks, strict=True):
                manager.start(request_id, hit, num_computed_tokens)
        for manager in self.managers:
            manager.extend(request_id, num_tokens)
        return True

    def check_computed(
        self, request_id: str, block_hashes: Sequence[bytes], num_computed_tokens: int
    ) -> None:
        """Whether so much can be computed: there is room, and every full block has a hash.

        Raises:
            ValueError: It cannot (TABLE-2); told before any group is changed.
        """
        for manager in self.managers:
            num_blocks = num_computed_tokens // manager.block_size
            num_hashes = manager.geometry.block_hash_index(0, num_blocks - 1) + 1
            table = manager.blocks(request_id)
            if not table or num_blocks > len(table):
                raise ValueError(
                    f"TABLE-2: request {request_id!r} has {len(table)} blocks in group "
                    f"{manager.group_idx}, {num_computed_tokens} tokens fill {num_blocks}: ask for "
                    f"room first"
                )
            if num_hashes > len(block_hashes) and self.pool.enable_caching:
                raise ValueError(
                    f"TABLE-2: request {request_id!r} has {len(block_hashes)} block hashes, "
                    f"{num_computed_tokens} computed tokens need {num_hashes}"
                )


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Prefix caching is off: nothing is ever a hit."""

    @override
    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[list[int], ...], int]:
        return tuple([] for _ in self.managers), 0


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One KV-cache group: its own longest hit is the hit."""

    def __init__(
        self, kv_cache_groups: Sequence[CacheGroup], block_pool: BlockPool, **sizes: int
    ) -> None:
        if len(kv_cache_groups) != 1:
            raise GeometryError(
                f"GEO-4: a unitary coordinator takes 1 KV-cache group, got {len(kv_cache_groups)}"
            )
        super().__init__(kv_cache_groups, block_pool, **sizes)

    @override
    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[list[int], ...], int]:
        blocks, num_tokens = self.managers[0].find_longest_cache_hit(block_hashes, max_tokens)
        return (blocks,), num_tokens


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups: the longest hit that all of them share."""

    @override
    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[list[int], ...], int]:
        managers = self.managers
        num_tokens = self.geometry.longest_prefix(
            max_tokens,
            lambda group, block: managers[group].find_cached_block(block_hashes, block) is not None,
        )
        return tuple(m.hit_blocks(block_hashes, num_tokens) for m in managers), num_tokens


def make_coordinator(
    kv_cache_groups: Sequence[CacheGroup],
    block_pool: BlockPool,
    enable_caching: bool,
    *,
    scheduler_block_size: int,
    hash_block_size: int,
) -> KVCacheCoordinator:
    """The coordinator that fits: no prefix cache, one group, or several.

    Raises:
        GeometryError: A size does not divide (GEO-2).
    """
    fitting: type[KVCacheCoordinator] = HybridKVCacheCoordinator
    if not enable_caching:
        fitting = KVCacheCoordinatorNoPrefixCache
    elif len(kv_cache_groups) == 1:
        fitting = UnitaryKVCacheCoordinator
    return fitting(
        kv_cache_groups,
        block_pool,
        scheduler_block_size=scheduler_block_size,
        hash_block_size=hash_block_size,
    )
