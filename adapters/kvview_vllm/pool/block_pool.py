"""The view over a real vLLM ``BlockPool``, the same for every release.

The pool itself has no checks, so the view satisfies the laws of :mod:`kvview.pool` as follows.

1. The pool's ledger (:mod:`kvview.guard.ledger`) checks ids, counts the view's own references and
   finds blocks in the list that was taken at bind. A ``KVCacheBlock`` is passed only to the pool
   and is never written (POOL-3, POOL-4).
2. The null block is never passed to the pool, because older releases count references to it.
3. A block that leaves the free queue loses its links, so a walk reads some blocks ahead and checks
   each block again when it is yielded (:mod:`kvview_vllm.pool.walks`).

Source: ``vllm/v1/core/block_pool.py`` and ``FreeKVCacheBlockQueue`` in
``vllm/v1/core/kv_cache_utils.py``; :mod:`kvview_vllm.releases` lists the differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from kvview import (
    GPUBlockPoolView,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    require_offload_key,
)
from kvview.guard.ledger import Ledger, LedgerView, check_block_ids, ledger_of
from kvview_vllm.pool.walks import Walk, is_queued
from kvview_vllm.releases import PoolSeam, expect, probe_pool, reading
from kvview_vllm.releases.compat.calls import hash_getter, make_block_pool

NULL_BLOCK_ID = 0


def view(block_pool: Any, *, owner: str = "connector") -> VLLMBlockPoolView:
    """A view over a real ``vllm.v1.core.block_pool.BlockPool``.

    Args:
        block_pool: The scheduler's pool, of any tested release.
        owner: Name of the owner in errors and reports.

    Raises:
        UnsupportedEngineError: No tested release has a pool of this shape.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    probe_pool(block_pool)
    _try_pool()
    return _view(block_pool, owner)


def _view(block_pool: Any, owner: str) -> VLLMBlockPoolView:
    release = probe_pool(block_pool)
    kind = PrependingBlockPoolView if release.free_prepend else VLLMBlockPoolView
    return kind(block_pool, release, owner)


class VLLMBlockPoolView(LedgerView):
    """The view of one owner over a real pool, with a ledger of its holds.

    1. The class satisfies every law of :mod:`kvview.pool` and has the optional queries that all
       releases support.
    2. Views of several owners may be open at once; each view counts its own references.
    3. Call a view only on the scheduler's thread.

    Args:
        block_pool: The pool, recognised by :func:`probe_pool`.
        release: The result of :func:`probe_pool` for the pool.
        owner: Name of the owner in errors and reports.
    """

    def __init__(self, block_pool: Any, release: PoolSeam, owner: str) -> None:
        touch = block_pool.touch
        if release.touch_nested:
            # Up to 0.13 touch expects one list per KV-cache group.
            touch = lambda blocks: block_pool.touch((blocks,))  # noqa: E731
        ledger = ledger_of(block_pool, lambda: Ledger(block_pool.blocks, NULL_BLOCK_ID))
        super().__init__(ledger, owner, touch, block_pool.free_blocks)
        self.release = release
        self.num_blocks = len(block_pool.blocks)  # facts that a closed view still has
        self.null_block_id = NULL_BLOCK_ID
        self._pool: Any = block_pool
        self._blocks: list[Any] = block_pool.blocks
        self._hash_of = hash_getter(block_pool)

    def _open_pool(self) -> Any:
        self.check_open()
        return self._pool

    # --- walks over the free queue ---

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        """Walk the free blocks that still hold reusable KV, next victim first.

        Unhashed blocks in front of a hashed one are skipped, so the cost of the first item depends
        on their number. A block that the engine takes and frees between two items cannot be
        distinguished from a block that stayed in the queue, so it may be yielded if its item is
        still true.
        """
        with self._walking(hashed_only=True) as walk:
            for block in walk.blocks():
                block_id: int = block.block_id
                if (primary := block.block_hash) is not None:
                    yield block_id, primary
                    self._open_pool()
                    for block_hash in self._more_keys(block_id):
                        if walk.has(block) and block_hash in self._more_keys(block_id):
                            yield block_id, block_hash
                            self._open_pool()

    def iter_free_block_ids(self) -> Iterator[int]:
        """Walk all free blocks, next victim first."""
        with self._walking(hashed_only=False) as walk:
            for block in walk.blocks():
                yield block.block_id
                if not self.is_open:
                    self._open_pool()

    @contextmanager
    def _walking(self, *, hashed_only: bool) -> Iterator[Walk]:
        walk = Walk(self._open_pool().free_block_queue, self.release, hashed_only)
        self.before_touch.append(walk.before_touch)
        self.ledger.before_free.append(walk.before_free)
        try:
            yield walk
        finally:
            self.before_touch.remove(walk.before_touch)
            self.ledger.before_free.remove(walk.before_free)

    # --- queries ---

    def num_free_blocks(self) -> int:
        """Return the number of blocks that could be allocated now."""
        return int(self._open_pool().get_num_free_blocks())

    def is_free(self, block_id: int) -> bool:
        """Whether the block is free now."""
        self._open_pool()
        check_block_ids((block_id,), self.num_blocks)
        return is_queued(self._blocks[block_id])

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """Return the keys registered for each block, primary key first."""
        keys = self.primary_keys(block_ids)
        if not self._has_more_keys():
            return [() if key is None else (key,) for key in keys]
        return [
            () if key is None else (key, *self._more_keys(block_id))
            for block_id, key in zip(block_ids, keys, strict=True)
        ]

    def primary_keys(self, block_ids: Sequence[int]) -> list[OffloadKey | None]:
        """Return the primary key of each block, or None."""
        self._open_pool()
        # Done in C as far as possible, because connectors query in every step each block for which
        # they wait.
        if set(map(type, block_ids)) - {int} or min(block_ids, default=0) < 0:
            check_block_ids(block_ids, self.num_blocks)
        try:
            return list(map(self._hash_of, map(self._blocks.__getitem__, block_ids)))
        except IndexError:
            check_block_ids(block_ids, self.num_blocks)
            raise

    def _has_more_keys(self) -> bool:
        return self.release.several_hashes and bool(self._pool.cached_block_hashes_by_block)

    def _more_keys(self, block_id: int) -> list[OffloadKey]:
        """Return the hashes besides the primary hash, in the same order in every process."""
        if not self.release.several_hashes:  # before 0.24, PR #45939
            return []
        return sorted(self._pool.cached_block_hashes_by_block.get(block_id, ()))

    def find_cached_block(self, key: OffloadKey) -> int | None:
        """Return the id of a block with this key, or None."""
        # The map behind get_cached_block is replaced at every cache reset.
        found = self._open_pool().get_cached_block(
            get_offload_block_hash(key), [get_offload_group_idx(key)]
        )
        if not found:
            require_offload_key(key)
            return None
        return int(found[0].block_id)


class PrependingBlockPoolView(VLLMBlockPoolView):
    """The view of 0.23.0, the only release that can free any block to the head (PR #42656).

    Older releases free every block to the tail; later releases free only blocks without KV to the
    head.
    """

    def give_back_blocks(self, block_ids: Sequence[int]) -> None:
        """Release blocks like ``free_blocks``, but to the head of the queue (POOL-12)."""
        block_ids = list(block_ids)
        self.free_with(
            lambda blocks: self._open_pool().free_blocks(blocks, prepend=True), block_ids
        )


@cache
def _try_pool() -> None:
    """Hold, free and walk blocks of a small new pool, once per process.

    Raises:
        UnsupportedEngineError: A result differs from the result of the tested releases.
    """
    seam = PoolSeam.seam
    with reading(seam, "a trial of a pool"):
        pool = make_block_pool(8)
        bound = _view(pool, "kvview trial")
        bound.touch_blocks([1, 2, 1])
        num_free = bound.num_free_blocks()
        bound.free_blocks([1, 2, 1])
        counts = num_free, bound.num_free_blocks()
        expect(seam, "free blocks while two are held, and after their release", counts, (5, 7))
        expect(seam, "keys of a new block", bound.block_keys([1]), [()])
        queue = list(bound.iter_free_block_ids())
        taken = pool.get_new_blocks(3)
        expect(seam, "the next victims", [block.block_id for block in taken], queue[:3])
        pool.free_blocks(taken)
        bound.touch_blocks([3])
        bound.close()


if TYPE_CHECKING:
    _: type[GPUBlockPoolView] = VLLMBlockPoolView
