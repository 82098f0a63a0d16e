"""The optional queries of a view: a connector asks for each with ``isinstance``.

The laws are those of :mod:`kvview.pool.view`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from kvview.keys import OffloadKey


@runtime_checkable
class SupportsPoolSize(Protocol):
    """The view knows the size of the pool and which block is the null block."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included; ids are 0..num_blocks-1."""
        ...

    @property
    def null_block_id(self) -> int:
        """Id of the placeholder block that is never allocated."""
        ...


@runtime_checkable
class SupportsFreeCount(Protocol):
    """The view can tell how much room the engine has."""

    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now, hashed or not."""
        ...


@runtime_checkable
class SupportsIsFree(Protocol):
    """The view can tell whether one block is in the free queue."""

    def is_free(self, block_id: int) -> bool:
        """Whether the block is free now. False for the null block.

        Raises:
            UnknownBlockError: The id is no block of this pool.
        """
        ...


@runtime_checkable
class SupportsBlockKeys(Protocol):
    """The view can tell which KV blocks hold."""

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """The keys registered for each block, in one call.

        Args:
            block_ids: Blocks of this pool, free or in use, any order, repeats allowed.

        Returns:
            Per block, in the order given, its keys, primary first; empty for a block
            without one and for the null block.

        Raises:
            UnknownBlockError: An id is no block of this pool.
        """
        ...

    def primary_keys(self, block_ids: Sequence[int]) -> list[OffloadKey | None]:
        """The first key of each block, for those who look at thousands in every step.

        What :meth:`block_keys` tells costs a tuple a block; a snapshot of keys is compared
        with this at about the price of the engine's own objects.

        Args:
            block_ids: As for :meth:`block_keys`.

        Returns:
            Per block, in the order given, its primary key; None where it has none.

        Raises:
            UnknownBlockError: An id is no block of this pool.
        """
        ...


@runtime_checkable
class SupportsFindCachedBlock(Protocol):
    """The view can find a block by the KV it holds."""

    def find_cached_block(self, key: OffloadKey) -> int | None:
        """Id of a block that holds this key (POOL-8), free or in use, or None.

        Raises:
            NotAnOffloadKeyError: The bytes cannot be a key.
        """
        ...


@runtime_checkable
class SupportsFreeOrder(Protocol):
    """The view can walk the whole free queue, so that eviction rank is known."""

    def iter_free_block_ids(self) -> Iterator[int]:
        """All free blocks, hashed or not, next victim first; lazy as POOL-6."""
        ...


class FreeBlockWalk(Protocol):
    """A walk over the free blocks with keys that goes on in later steps (POOL-13)."""

    def take(self, max_blocks: int) -> list[tuple[int, OffloadKey]]:
        """The next items, of at most ``max_blocks`` blocks; empty at the end of the queue.

        1. An empty answer is no end: blocks that join behind come then.
        2. Items are true when they are returned; touch at once what must stay.
        3. Costs O(``max_blocks``) amortised, however many steps lie between two calls.

        Args:
            max_blocks: Blocks wanted, 0 or more. A block with several keys counts once.

        Returns:
            ``(block_id, key)`` in the order of POOL-13, all keys of a block together,
            primary first.

        Raises:
            ViewClosedError: The walk, or the view that it is of, was closed.
        """
        ...

    def restart(self) -> None:
        """Begin again with the next victim.

        Raises:
            ViewClosedError: As for :meth:`take`.
        """
        ...

    def close(self) -> None:
        """End the walk; callable twice, and after the view was closed."""
        ...


@runtime_checkable
class SupportsResumableWalk(Protocol):
    """The view can go on in a later step where a walk stopped."""

    def walk_free_blocks(self) -> FreeBlockWalk:
        """Open a walk at the next victim.

        Returns:
            A walk of its own, open until it is closed or dropped. While it is open it costs
            memory: at most some bytes for each block of the pool.

        Source: ``FreeKVCacheBlockQueue.iter_blocks_after``, vllm/v1/core/kv_cache_utils.py,
        0.26.0 and later, and ``SimpleCPUOffloadScheduler``, which keeps its cursor.
        """
        ...


@runtime_checkable
class SupportsGiveBack(Protocol):
    """The view can give blocks back without making them more recent."""

    def give_back_blocks(self, block_ids: Sequence[int]) -> None:
        """Give back as ``free_blocks`` does, to the head of the queue (POOL-12).

        Args:
            block_ids: Blocks in eviction order: the first is evicted first.

        Raises:
            UnknownBlockError: An id is no block of this pool.
            BlockNotHeldError: More than this view holds.

        Source: ``free_blocks(prepend=True)``, vllm/v1/core/block_pool.py, 0.23.0.
        """
        ...


@runtime_checkable
class SupportsReuseNotice(Protocol):
    """The view can say when a block that it gave back is handed out again."""

    def free_blocks_with_notice(
        self, block_ids: Sequence[int], on_reuse: Callable[[int], None]
    ) -> None:
        """Give back as ``free_blocks`` does, and hear of each block once (POOL-14).

        1. What is in use elsewhere too is watched until all have given it back.
        2. A view watches a block once: a later call puts its ``on_reuse`` in the place
           of the earlier one. Views of several owners are all told.
        3. A closed view is told nothing any more.

        Args:
            block_ids: Blocks in eviction order: the first is evicted first.
            on_reuse: Called with a block id, on the scheduler's thread, from inside the
                engine's allocation: it must not call the view. What it raises is logged
                and the engine goes on.

        Raises:
            UnknownBlockError: An id is no block of this pool.
            BlockNotHeldError: More than this view holds.
            ViewClosedError: The view was closed.

        Source: ``BlockPool.unpin_blocks``, vllm/v1/core/block_pool.py, 0.30.0 and later.
        """
        ...


@runtime_checkable
class SupportsHolds(Protocol):
    """The view keeps a ledger of what it holds (POOL-9)."""

    def held_blocks(self) -> Mapping[int, int]:
        """References held through this view, ``{block_id: count}``; a snapshot."""
        ...


@runtime_checkable
class SupportsClose(Protocol):
    """The view can be closed by whoever made it (POOL-10)."""

    def close(self) -> Mapping[int, int]:
        """Close the view and report what it still held, ``{block_id: count}``.

        The references themselves are the engine's to clean up: after a rebind
        the pool that they belong to may be gone. Closing twice reports nothing.
        """
        ...
