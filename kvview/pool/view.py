"""The pool contract: what a connector may see and do of the engine's block pool.

Three methods are the core. Everything else is optional: small ``Supports...``
protocols (:mod:`kvview.pool.queries`, :mod:`kvview.pool.leases`) that an implementer
adds one by one and a connector asks for with ``isinstance``. Allocation, eviction, cache
reset, block objects and reference counts are never reachable through a view.

The laws, numbered as in the errors and in the conformance kit:

- POOL-1 A touched block **must** leave the free queue at once; no allocation
  returns it until every touch was freed. A hold that ended leaves nothing behind.
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
  key) once, next victim first, and lazily: taking k items costs O(k)
  amortised, not O(pool). A block with several hashes yields each.
- POOL-7 Touching and freeing while walking **must** be allowed, the walk goes
  on, and at the moment of yielding what is yielded is true. A block that joins
  the queue after the walk began is not part of that walk; of a block that the engine
  or another view took and gave back meanwhile this is not promised.
- POOL-8 A free block is yielded with an :data:`~kvview.OffloadKey`, and whatever is asked
  for by key **must** raise :class:`~kvview.NotAnOffloadKeyError` for bytes that cannot be
  one (KEY-3): a block hash handed over by mistake is never a miss in silence.
- POOL-9 The engine's cache reset **must** be refused, or wait, while a view
  holds blocks; ``held_blocks`` says what is held.
- POOL-10 After ``close()`` every call **must** raise
  :class:`~kvview.ViewClosedError`; ``close`` reports what was still held.
- POOL-11 Hashed blocks that one call sets free **must** be evicted in the order
  given, after the hashed blocks freed before them; of several mentions of a block
  the last one counts. Where an unhashed block goes is the engine's affair.

- POOL-12 ``give_back_blocks``, where a view has it, **must** make what becomes free the
  next victims, in the order given, hashed or not: a block that was held only to be read
  is no more recent for it. Such a block never outlives one that was free all the time.
- POOL-13 A resumed walk **must** yield what is behind the items taken before, then what
  joined behind since: nothing that stayed is missed or comes twice. A block that left and
  came back is behind all that stayed, and comes again; of what the engine or another view
  took and gave back between two calls this is not promised. What joins at the head, in front of the
  items taken before, comes after ``restart``. One that is dropped costs nothing any more.
- POOL-14 ``free_blocks_with_notice`` **must** tell of each block once: when it is handed
  out again, or at a reset of the prefix cache, whichever comes first. A touch in between
  does not end the wait.

Source: vLLM PR #39654 (the raw pool handed to connectors), the review thread
of PR #41120 (the narrow view asked for), and ``vllm/v1/core/block_pool.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from kvview.keys import OffloadKey


@runtime_checkable
class GPUBlockPoolView(Protocol):
    """All that a connector needs of a GPU block pool: hold, release, look ahead."""

    def touch_blocks(self, block_ids: Sequence[int]) -> None:
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

    def free_blocks(self, block_ids: Sequence[int]) -> None:
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

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        """Walk the free blocks that still hold reusable KV, next victim first.

        Laws POOL-5 to POOL-8. The walk covers the free queue as it stood at the
        first ``next()``, less what has been taken since.

        Returns:
            A lazy iterator of ``(block_id, key)``, valid until exhausted; one
            item per key, primary first.

        Raises:
            ViewClosedError: At the first ``next()`` after the view was closed.

        Source: PR #41120; ``FreeKVCacheBlockQueue``, vllm/v1/core/kv_cache_utils.py.
        """
        ...
