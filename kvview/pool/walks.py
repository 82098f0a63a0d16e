"""The optional walks over the free queue of a pool.

The laws of :mod:`kvview.pool.view` apply.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from kvview.keys import OffloadKey


@runtime_checkable
class SupportsFreeOrder(Protocol):
    """The view walks the whole free queue, so that the eviction rank of every block is known."""

    def iter_free_block_ids(self) -> Iterator[int]:
        """Walk all free blocks lazily, with or without a hash, next victim first (POOL-6)."""
        ...


class FreeBlockWalk(Protocol):
    """A walk over the free blocks with keys, which continues in later steps (POOL-13)."""

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
    """The view has walks that continue in later steps."""

    def walk_free_blocks(self) -> FreeBlockWalk:
        """Open a walk at the next victim.

        Returns:
            A new walk, which is open until it is closed or garbage-collected. An open walk
            takes at most a few bytes of memory for each block of the pool.

        Source: ``FreeKVCacheBlockQueue.iter_blocks_after``, vllm/v1/core/kv_cache_utils.py,
        0.26.0 and later, and ``SimpleCPUOffloadScheduler``, which keeps its cursor.
        """
        ...
