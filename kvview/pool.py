"""The pool contract: what a connector may see and do of the engine's block pool.

Three methods are the core. Everything else is optional: small ``Supports...``
protocols that an implementer adds one by one and a connector asks for with
``isinstance``. Allocation, eviction, cache reset, block objects and reference
counts are never reachable through a view.

The laws, numbered as in the errors and in the conformance kit:

- POOL-1 A touched block **must** leave the free queue at once; no allocation
  returns it until every touch was freed.
- POOL-2 N touches **must** need N frees. Occurrences inside one call count one
  by one, and a block is never twice in the free queue, whatever is passed.
- POOL-3 All or nothing: a call that raises **must** have changed nothing.
- POOL-4 An id that is no block of this pool **must** raise
  :class:`~kvview.UnknownBlockError`; freeing more than this view holds **must**
  raise :class:`~kvview.BlockNotHeldError`, so a connector can never drop a
  reference of the engine. Only an ``int`` names a block: ``bool``, ``float``,
  ``str``, numpy scalars and negative numbers raise ``UnknownBlockError``.
- POOL-5 The null block **must** be skipped by touch and free, and never
  yielded: block tables of sliding-window groups are full of it.
- POOL-6 ``iter_free_block_ids_with_hash`` **must** yield each (free block,
  hash) once, next victim first, and lazily: taking k items costs O(k)
  amortised, not O(pool). A block with several hashes yields each.
- POOL-7 Touching and freeing while walking **must** be allowed, the walk goes
  on, and at the moment of yielding what is yielded is true. A block that joins
  the queue after the walk began is not part of that walk.
- POOL-8 A hash **must** be ``block hash + 4-byte big-endian group index``: the
  packing of an :data:`~kvview.OffloadKey`.
- POOL-9 The engine's cache reset **must** be refused, or wait, while a view
  holds blocks; ``held_blocks`` says what is held.
- POOL-10 After ``close()`` every call **must** raise
  :class:`~kvview.ViewClosedError`; ``close`` reports what was still held.
- POOL-11 Hashed blocks that one call sets free **must** be evicted in the order
  given, after the hashed blocks freed before them; of several mentions of a block
  the last one counts. Where an unhashed block goes is the engine's affair.

Source: vLLM PR #39654 (the raw pool handed to connectors), the review thread
of PR #41120 (the narrow view asked for), and ``vllm/v1/core/block_pool.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class GPUBlockPoolView(Protocol):
    """All that a connector needs of a GPU block pool: hold, release, look ahead."""

    def touch_blocks(self, block_ids: Sequence[int], /) -> None:
        """Take one reference on each block named, once per occurrence.

        1. A free block must leave the free queue before this returns (POOL-1).
        2. Every occurrence counts (POOL-2); the null block is skipped (POOL-5).
        3. A call that raises has taken no reference (POOL-3).

        Args:
            block_ids: Block ids of this pool, any order, repeats allowed.

        Raises:
            UnknownBlockError: An id is no block of this pool.
            ViewClosedError: The view was closed.

        Source: ``BlockPool.touch``, vllm/v1/core/block_pool.py.
        """
        ...

    def free_blocks(self, block_ids: Sequence[int], /) -> None:
        """Give back one reference on each block named, once per occurrence.

        1. Only references taken through this view can be given back (POOL-4).
        2. A block whose last reference goes becomes free, once (POOL-2); hashed
           ones are evicted in the order given (POOL-11).
        3. A call that raises has given nothing back (POOL-3).

        Args:
            block_ids: Blocks in eviction order: the first is evicted first.

        Raises:
            UnknownBlockError: An id is no block of this pool.
            BlockNotHeldError: More frees than this view holds.
            ViewClosedError: The view was closed.

        Source: ``BlockPool.free_blocks``, vllm/v1/core/block_pool.py.
        """
        ...

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, bytes]]:
        """Walk the free blocks that still hold reusable KV, next victim first.

        Laws POOL-5 to POOL-8. The walk covers the free queue as it stood at the
        first ``next()``, less what has been taken since.

        Returns:
            A lazy iterator of ``(block_id, hash)``, valid until exhausted; one
            item per hash, primary first.

        Raises:
            ViewClosedError: At the first ``next()`` after the view was closed.

        Source: PR #41120; ``FreeKVCacheBlockQueue``, vllm/v1/core/kv_cache_utils.py.
        """
        ...


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

    def is_free(self, block_id: int, /) -> bool:
        """Whether the block is free now. False for the null block.

        Raises:
            UnknownBlockError: The id is no block of this pool.
        """
        ...


@runtime_checkable
class SupportsBlockHashes(Protocol):
    """The view can tell which KV a block holds."""

    def block_hashes(self, block_id: int, /) -> tuple[bytes, ...]:
        """Hashes registered for the block, primary first; empty when unhashed.

        Raises:
            UnknownBlockError: The id is no block of this pool.
        """
        ...


@runtime_checkable
class SupportsFindCachedBlock(Protocol):
    """The view can find a block by the KV it holds."""

    def find_cached_block(self, block_hash: bytes, /) -> int | None:
        """Id of a block that holds this hash (POOL-8), free or in use, or None."""
        ...


@runtime_checkable
class SupportsFreeOrder(Protocol):
    """The view can walk the whole free queue, so that eviction rank is known."""

    def iter_free_block_ids(self) -> Iterator[int]:
        """All free blocks, hashed or not, next victim first; lazy as POOL-6."""
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
