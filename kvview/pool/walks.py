"""The optional walks over the free queue of a pool.

The laws of :mod:`kvview.pool.view` apply.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from kvview.keys import OffloadKey


@runtime_checkable
class SupportsFreeOrder(Protocol):
    """The view walks the whole free queue, so that the eviction rank of every block is known.

    Examples:
        Count the blocks that the engine will allocate before it evicts a certain block:

        >>> queue = list(view.iter_free_block_ids())  # blocks without a hash are allocated first
        >>> rank = queue.index(1)
        >>> rank, len(queue)
        (7, 8)
    """

    def iter_free_block_ids(self) -> Iterator[int]:
        """Walk all free blocks lazily, with or without a hash, next victim first (POOL-6)."""
        ...


class FreeBlockWalk(Protocol):
    """A walk over the free blocks with keys, which continues in later steps (POOL-13).

    Examples:
        Read two victims in each step, so that no step takes long:

        >>> walk = view.walk_free_blocks()
        >>> [block_id for block_id, key in walk.take(max_blocks=2)]
        [3, 2]
        >>> [block_id for block_id, key in walk.take(max_blocks=2)]  # in the next step
        [1]
        >>> walk.close()
    """

    def take(self, max_blocks: int) -> list[tuple[int, OffloadKey]]:
        """Return the next items of at most ``max_blocks`` blocks; empty at the end of the queue.

        1. An empty list does not end the walk, because blocks may join the queue later.
        2. An item is valid only at the time of the call, so touch a block at once to keep it.
        3. A call costs O(``max_blocks``) amortised, even if many steps are between two calls.

        Args:
            max_blocks: Number of blocks, 0 or more. A block with several keys counts once.

        Returns:
            ``(block_id, key)`` in the order of POOL-13, all keys of a block together,
            primary first.

        Raises:
            ViewClosedError: The walk or its view was closed.
        """
        ...

    def restart(self) -> None:
        """Start again with the next victim.

        Raises:
            ViewClosedError: As for :meth:`take`.
        """
        ...

    def close(self) -> None:
        """End the walk; may be called twice, and after the view was closed."""
        ...


@runtime_checkable
class SupportsResumableWalk(Protocol):
    """The view has walks that continue in later steps.

    Examples:
        Keep one walk, which also finds the blocks that requests free later:

        >>> walk = view.walk_free_blocks()
        >>> len(walk.take(max_blocks=100))
        3
        >>> view.touch_blocks([3])
        >>> view.free_blocks([3])  # now the last victim
        >>> walk.take(max_blocks=100) == [(3, keys[2])]
        True
    """

    def walk_free_blocks(self) -> FreeBlockWalk:
        """Open a walk at the next victim.

        Returns:
            A new walk, which is open until it is closed or garbage-collected. An open walk
            takes at most a few bytes of memory for each block of the pool.

        Source: ``FreeKVCacheBlockQueue.iter_blocks_after``, vllm/v1/core/kv_cache_utils.py,
        0.26.0 and later, and ``SimpleCPUOffloadScheduler``, which keeps its cursor.
        """
        ...
