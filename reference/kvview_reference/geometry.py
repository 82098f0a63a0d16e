"""The block tables of requests, in one or several KV-cache groups.

The ``KVCacheManager`` of an engine has one :class:`GroupTables` for each group. Full attention,
sliding window, chunked local attention and Mamba differ only in the blocks that a prefix needs,
which the geometry defines (:mod:`kvview.geometry`), so one class serves all four.

- TABLE-1 Room **must** be requested for a positive number of tokens, including the computed tokens.
  A call for less room than before frees no block, so the slots of rejected draft tokens stay
  allocated.
- TABLE-2 A request has block tables from its first allocation of room until ``free``. Hits **must**
  be passed with the first allocation, and only blocks in tables can be cached. ``free`` does
  nothing for a request without tables, so it may be called twice.

Source: vLLM PR #44165; ``vllm/v1/core/kv_cache_coordinator.py`` and
``single_type_kv_cache_manager.py`` (0.33.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvview import BlockHash, CacheGeometry
from kvview_reference.free_queue import NULL_BLOCK_ID
from kvview_reference.pool import BlockPool


class GroupTables:
    """The block tables of all requests in one KV-cache group.

    Args:
        geometry: Geometry of the engine.
        group_idx: Index of the group.
        pool: The pool that all groups share.
    """

    def __init__(self, geometry: CacheGeometry, group_idx: int, pool: BlockPool) -> None:
        self.geometry = geometry
        self.group_idx = group_idx
        self.pool = pool
        self.group = geometry.groups[group_idx]
        self.block_size = self.group.block_size
        self._tables: dict[str, list[int]] = {}
        self._num_cached: dict[str, int] = {}  # leading blocks that are cached or null
        self._num_dropped: dict[str, int] = {}  # leading blocks that were freed

    def hit_blocks(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> list[int]:
        """Return the block table of a hit of ``num_tokens``."""
        required = self.group.required_blocks(num_tokens)
        keys = self.geometry.block_keys(block_hashes, self.group_idx, required)
        found = self.pool.find_leading_blocks(keys)
        assert len(found) == len(required), "a hit names only cached blocks"
        return [NULL_BLOCK_ID] * required.start + found

    def blocks(self, request_id: str) -> list[int]:
        """Return the request's block table; empty if it has none."""
        return self._tables.get(request_id, [])

    def num_new_blocks(self, request_id: str, num_tokens: int, num_skipped_blocks: int) -> int:
        """Return the number of blocks to allocate so that ``num_tokens`` tokens have slots."""
        have = max(len(self.blocks(request_id)), num_skipped_blocks)
        return max(0, -(-num_tokens // self.block_size) - have)

    def start(self, request_id: str, hit_blocks: Sequence[int], num_computed_tokens: int) -> None:
        """Make a table, and take one reference on each block of the hit that later tokens read.

        Args:
            request_id: A request without a table.
            hit_blocks: Blocks of the GPU prefix cache, from block 0.
            num_computed_tokens: Number of tokens that are computed when the request starts,
                including loaded tokens; blocks that the next token does not read are skipped.
        """
        first = self.group.num_skipped_tokens(num_computed_tokens) // self.block_size
        table = [NULL_BLOCK_ID] * first + list(hit_blocks[first:])
        self.pool.touch_blocks(table)
        self._tables[request_id] = table
        self._num_cached[request_id] = len(table)  # hits are cached, and nulls never are
        self._num_dropped[request_id] = first

    def extend(self, request_id: str, num_tokens: int) -> None:
        """Allocate blocks until ``num_tokens`` tokens have slots; enough blocks must be free."""
        table = self._tables[request_id]
        table += self.pool.allocate_blocks(self.num_new_blocks(request_id, num_tokens, 0))

    def cache_blocks(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Register the request's full blocks."""
        first = self._num_cached[request_id]
        last = num_computed_tokens // self.block_size
        if first >= last or not self.pool.enable_caching:
            return
        hash_index = partial(self.geometry.block_hash_index, self.group_idx)
        parent = block_hashes[hash_index(first - 1)] if first else None
        self.pool.cache_blocks(
            self._tables[request_id][first:last],
            [block_hashes[hash_index(block)] for block in range(first, last)],
            group_idx=self.group_idx,
            block_size=self.block_size,
            parent_hash=parent,
        )
        self._num_cached[request_id] = last

    def drop_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Free the blocks that no later token reads."""
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
        """Free all blocks, the last block first, because more requests share the first blocks."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            del self._num_cached[request_id], self._num_dropped[request_id]
            self.pool.free_blocks(table[::-1])


class KVCacheManager:
    """The block tables of all requests of an engine, which finds, allocates and frees blocks.

    Args:
        geometry: Block sizes and KV-cache groups; a group's index is its position.
        pool: The pool that all groups share.
    """

    def __init__(self, geometry: CacheGeometry, pool: BlockPool) -> None:
        self.geometry = geometry
        self.pool = pool
        self._groups = [GroupTables(geometry, index, pool) for index in range(len(geometry.groups))]

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[tuple[list[int], ...], int]:
        """Return the longest prefix that is a hit for every group (GEO-4), without a hold.

        Args:
            block_hashes: One hash of the request for each ``hash_block_size`` tokens.
            max_tokens: Upper limit in tokens.

        Returns:
            Block ids per group, from block 0 (null if not needed), and the number of tokens.
        """
        if not self.pool.enable_caching:
            return tuple([] for _ in self._groups), 0

        def is_cached(group: int, block: int) -> bool:
            key = self.geometry.block_key(block_hashes, group, block)
            return key is not None and self.pool.find_cached_block(key) is not None

        num_tokens = self.geometry.longest_prefix(max_tokens, is_cached)
        tables = tuple(manager.hit_blocks(block_hashes, num_tokens) for manager in self._groups)
        return tables, num_tokens

    def allocate_slots(
        self,
        request_id: str,
        num_tokens: int,
        *,
        hit_blocks: tuple[Sequence[int], ...] | None = None,
        num_computed_tokens: int = 0,
    ) -> bool:
        """Make room for ``num_tokens`` tokens of a request in every group, or change nothing.

        Args:
            request_id: Id of the request; tables are made for a request that has no tables.
            num_tokens: Number of all tokens that need slots after the step.
            hit_blocks: For a new request, its hit in each group.
            num_computed_tokens: For a new request, the number of tokens that are hit or will be
                loaded.

        Returns:
            False if too few blocks are free.

        Raises:
            ValueError: The counts or the hits are invalid (TABLE-1, TABLE-2).
        """
        hits = hit_blocks or ((),) * len(self._groups)
        is_new = not any(manager.blocks(request_id) for manager in self._groups)
        if not 0 <= num_computed_tokens <= num_tokens or num_tokens < 1:
            raise ValueError(
                f"TABLE-1: request {request_id!r} has {num_computed_tokens} computed tokens and "
                f"requests room for {num_tokens} tokens; expected room for at least 1 token, and "
                "for all computed tokens"
            )
        if not is_new and (any(hits) or num_computed_tokens):
            raise ValueError(
                f"TABLE-2: request {request_id!r} already has block tables; pass hits and "
                f"computed tokens in its first call only"
            )
        if not is_new:
            # This runs in every step of every request, and usually its last block has room.
            needed = sum(m.num_new_blocks(request_id, num_tokens, 0) for m in self._groups)
            if needed > self.pool.num_free_blocks():
                return False
            for manager in self._groups if needed else ():
                manager.extend(request_id, num_tokens)
            return True
        needed = 0
        pinned: set[int] = set()
        for manager, hit in zip(self._groups, hits, strict=True):
            first = manager.group.num_skipped_tokens(num_computed_tokens) // manager.block_size
            pinned.update(b for b in hit[first:] if b and self.pool.ref_cnt(b) == 0)
            needed += manager.num_new_blocks(request_id, num_tokens, max(first, len(hit)))
        if needed + len(pinned) > self.pool.num_free_blocks():
            return False
        # Every hit is held before the first allocation can evict one of them.
        for manager, hit in zip(self._groups, hits, strict=True):
            manager.start(request_id, hit, num_computed_tokens)
        for manager in self._groups:
            manager.extend(request_id, num_tokens)
        return True

    def block_tables(self, request_id: str) -> tuple[list[int], ...]:
        """Return the request's own block tables, one per group; callers must not change them."""
        return tuple(manager.blocks(request_id) for manager in self._groups)

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return a copy of the request's block tables, one per group."""
        return tuple(list(m.blocks(request_id)) for m in self._groups)

    def cache_blocks(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Register the computed blocks, then free the blocks that no later token reads.

        Args:
            request_id: The request.
            block_hashes: Block hashes of the request, at least the hashes of computed blocks.
            num_computed_tokens: Number of tokens whose KV is in the request's blocks.

        Raises:
            ValueError: Room or hashes are missing (TABLE-2).
        """
        self._check_computed(request_id, block_hashes, num_computed_tokens)
        for manager in self._groups:
            manager.cache_blocks(request_id, block_hashes, num_computed_tokens)
            manager.drop_skipped_blocks(request_id, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Free all blocks of a request, if it has any."""
        for manager in self._groups:
            manager.free(request_id)

    def _check_computed(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Check that computed tokens are within the tables, and that every full block has a hash.

        Raises:
            ValueError: Room or hashes are missing (TABLE-2); no group was changed.
        """
        for manager in self._groups:
            num_blocks = num_computed_tokens // manager.block_size
            num_hashes = self.geometry.block_hash_index(manager.group_idx, num_blocks - 1) + 1
            table = manager.blocks(request_id)
            if not table or num_blocks > len(table):
                raise ValueError(
                    f"TABLE-2: request {request_id!r} has {len(table)} blocks in group "
                    f"{manager.group_idx}, but {num_computed_tokens} tokens fill {num_blocks}; "
                    f"allocate room first"
                )
            if num_hashes > len(block_hashes) and self.pool.enable_caching:
                raise ValueError(
                    f"TABLE-2: request {request_id!r} has {len(block_hashes)} block hashes, but "
                    f"{num_computed_tokens} computed tokens need {num_hashes}"
                )
