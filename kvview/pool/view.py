"""The pool contract: a connector's view of the engine's block pool.

Three methods are the core. All other methods are optional, and belong to small ``Supports...``
protocols (:mod:`kvview.pool.queries`), which an implementer adds one by one. A connector tests for
a protocol with ``isinstance``. Allocation, eviction, cache reset, block objects and reference
counts are never reachable through a view.

Laws: POOL-1 to POOL-12 in ``kvview/laws.toml``.

Source: vLLM PR #39654 (gives connectors the raw pool), the review thread of PR #41120 (requests
a narrow view), and ``vllm/v1/core/block_pool.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from kvview.keys import OffloadKey


@runtime_checkable
class GPUBlockPoolView(Protocol):
    """The core of a view: hold blocks, free them, and walk the next victims.

    Examples:
        Keep a block that the engine is about to evict, until its KV is copied:

        >>> block_id, key = next(view.iter_free_block_ids_with_hash())  # the next victim
        >>> view.touch_blocks([block_id])  # no request can take the block now
        >>> [victim for victim, _ in view.iter_free_block_ids_with_hash()]
        [2, 1]
        >>> view.free_blocks([block_id])  # when the copy has ended
    """

    def touch_blocks(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each block, once per occurrence.

        1. A free block must leave the free queue before this returns (POOL-1).
        2. Every occurrence counts (POOL-2); the null block is skipped (POOL-5).
        3. A call that raises has taken no reference (POOL-3).

        Args:
            block_ids: Block ids of this pool, in any order, repeats allowed.

        Raises:
            UnknownBlockError: An id is not a block of this pool.
            ViewClosedError: The view was closed.

        Source: ``BlockPool.touch``, vllm/v1/core/block_pool.py.
        """
        ...

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Release one reference on each block, once per occurrence.

        1. Only references taken through this view can be released (POOL-4).
        2. A block without references becomes free, once (POOL-2). Blocks with a hash
           are evicted in the given order (POOL-11).
        3. A call that raises has released no reference (POOL-3).

        Args:
            block_ids: Blocks in eviction order: the first is evicted first.

        Raises:
            UnknownBlockError: An id is not a block of this pool.
            BlockNotHeldError: The call would release more references than this view holds.
            ViewClosedError: The view was closed.

        Source: ``BlockPool.free_blocks``, vllm/v1/core/block_pool.py.
        """
        ...

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        """Walk the free blocks that still hold reusable KV, next victim first.

        Laws POOL-5 to POOL-8. The walk covers the blocks that were in the free queue at the
        first ``next()`` and have not been taken since.

        Returns:
            A lazy iterator of ``(block_id, key)``, with one item per key, primary key first. The
            iterator stays valid while blocks leave and join the free queue.

        Raises:
            ViewClosedError: The view was closed; the next ``next()`` raises this error.

        Source: PR #41120; ``FreeKVCacheBlockQueue``, vllm/v1/core/kv_cache_utils.py.
        """
        ...
