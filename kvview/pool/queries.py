"""The optional methods of a view, each in a protocol that a connector tests with ``isinstance``.

The laws of :mod:`kvview.pool.view` apply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from kvview.keys import OffloadKey


@runtime_checkable
class SupportsPoolSize(Protocol):
    """The view reports the size of the pool and the id of the null block.

    Examples:
        Keep one flag for each block, and leave out the null block of a block table:

        >>> is_stored = bytearray(view.num_blocks)
        >>> for block_id in [view.null_block_id, 2, 3]:  # a window has freed the first block
        ...     is_stored[block_id] = block_id != view.null_block_id
        >>> sum(is_stored)
        2
    """

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
    """The view counts the free blocks.

    Examples:
        Leave enough free blocks for the next step of the engine:

        >>> reserve = 6
        >>> num_blocks = max(0, view.num_free_blocks() - reserve)
        >>> view.touch_blocks([3, 2, 1][:num_blocks])
        >>> view.num_free_blocks()
        6
    """

    def num_free_blocks(self) -> int:
        """Return the number of blocks that could be allocated now, with or without a hash."""
        ...


@runtime_checkable
class SupportsIsFree(Protocol):
    """The view reports whether a block is in the free queue.

    Examples:
        Store free blocks first, because a block in use cannot be evicted soon:

        >>> in_use = pool.allocate_blocks(2)
        >>> candidates = [*in_use, 3, 2]
        >>> sorted(candidates, key=view.is_free, reverse=True)[:2]
        [3, 2]
    """

    def is_free(self, block_id: int) -> bool:
        """Return whether the block is free now; False for the null block.

        Raises:
            UnknownBlockError: The id is not a block of this pool.
        """
        ...


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


@runtime_checkable
class SupportsBlockKeys(Protocol):
    """The view returns the keys of blocks.

    Examples:
        Drop the blocks that were reused since an earlier step:

        >>> expected = {3: keys[2], 2: keys[1]}
        >>> pool.evict_blocks([3])  # by the engine, between two steps
        >>> found = view.primary_keys([*expected])
        >>> [block_id for block_id, key in zip(expected, found) if key == expected[block_id]]
        [2]
    """

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """Return the keys of each block, in one call.

        Args:
            block_ids: Blocks of this pool, free or in use, in any order, repeats allowed.

        Returns:
            The keys of each block, primary first, in the given order; empty for a block
            without a key and for the null block.

        Raises:
            UnknownBlockError: An id does not name a block of this pool.
        """
        ...

    def primary_keys(self, block_ids: Sequence[int]) -> list[OffloadKey | None]:
        """Return the first key of each block, for connectors that read thousands of keys per step.

        :meth:`block_keys` makes a tuple for each block. :meth:`primary_keys` costs about as much as
        reading the engine's own objects.

        Args:
            block_ids: As for :meth:`block_keys`.

        Returns:
            The primary key of each block, in the given order; None for a block without a key.

        Raises:
            UnknownBlockError: An id does not name a block of this pool.
        """
        ...


@runtime_checkable
class SupportsFindCachedBlock(Protocol):
    """The view finds a block by its key.

    Examples:
        Hold the blocks of a prefix that another engine requests, as far as the GPU has them:

        >>> wanted = [*keys, make_offload_key(b"hash 3", 0)]
        >>> found = [view.find_cached_block(key) for key in wanted]
        >>> found
        [1, 2, 3, None]
        >>> view.touch_blocks([block_id for block_id in found if block_id is not None])
    """

    def find_cached_block(self, key: OffloadKey) -> int | None:
        """Return the id of a block that holds this key (POOL-8), free or in use, or None.

        Raises:
            NotAnOffloadKeyError: The bytes cannot be a key.
        """
        ...


@runtime_checkable
class SupportsPinBudget(Protocol):
    """The view limits the number of blocks that may be held.

    Examples:
        Store only as many blocks as may be held, and count the others as skipped:

        >>> full = [1, 2, 3, 4, 5]
        >>> stored = full[: view.num_pinnable_blocks()]
        >>> view.touch_blocks(stored)
        >>> len(full) - len(stored), view.num_pinnable_blocks()
        (1, 0)
    """

    def num_pinnable_blocks(self) -> int:
        """Return the number of additional blocks that may be held; touching more blocks raises."""
        ...


@runtime_checkable
class SupportsGiveBack(Protocol):
    """The view can free blocks without making them recently used.

    Examples:
        Let the engine evict a block next, because the tier has a copy now:

        >>> view.touch_blocks([1])
        >>> view.give_back_blocks([1])  # free_blocks would make it the last victim
        >>> [block_id for block_id, _ in view.iter_free_block_ids_with_hash()]
        [1, 3, 2]
    """

    def give_back_blocks(self, block_ids: Sequence[int]) -> None:
        """Release like ``free_blocks``, but to the head of the free queue (POOL-12).

        Args:
            block_ids: Blocks in eviction order: the first is evicted first.

        Raises:
            UnknownBlockError: An id does not name a block of this pool.
            BlockNotHeldError: The call would release more references than this view holds.

        Source: ``free_blocks(prepend=True)``, vllm/v1/core/block_pool.py, 0.23.0.
        """
        ...


@runtime_checkable
class SupportsHolds(Protocol):
    """The view lists the blocks that it holds (POOL-9).

    Examples:
        Find the references that a store has not released:

        >>> view.touch_blocks([3, 2, 2])
        >>> view.free_blocks([3, 2])  # a mistake: block 2 was touched twice
        >>> dict(view.held_blocks())
        {2: 1}
    """

    def held_blocks(self) -> Mapping[int, int]:
        """Return a snapshot of the references of this view, ``{block_id: count}``."""
        ...


@runtime_checkable
class SupportsClose(Protocol):
    """The view can be closed by the engine that made it (POOL-10).

    Examples:
        Release the blocks of a connector when the engine ends:

        >>> view.touch_blocks([3, 2, 2])
        >>> still_held = view.close()
        >>> dict(still_held)
        {2: 2, 3: 1}
        >>> pool.free_blocks([one for one, count in still_held.items() for _ in range(count)])
    """

    def close(self) -> Mapping[int, int]:
        """Close the view and return the references that it still held, ``{block_id: count}``.

        The engine releases these references, because after a rebind their pool may be gone.
        A second call returns no references.
        """
        ...
