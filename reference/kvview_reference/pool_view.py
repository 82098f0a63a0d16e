"""The view of one owner over the reference's block pool.

The ledger (:mod:`kvview.guard.ledger`) checks ids and counts, the pool
(:mod:`kvview_reference.pool`) does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from kvview import FreeBlockWalk, GPUBlockPoolView, OffloadKey
from kvview.guard.ledger import Ledger, LedgerView, ledger_of
from kvview_reference.walks import (
    ResumedWalk,
    walk_free_block_ids,
    walk_free_block_ids_with_hash,
)

if TYPE_CHECKING:
    from kvview_reference.pool import BlockPool


class BlockPoolView(LedgerView):
    """The view of one owner over a :class:`BlockPool`.

    Keeps every law of :mod:`kvview.pool`, where its methods are described, and
    answers every optional query; the ledger checks ids and counts.
    """

    def __init__(self, pool: BlockPool, owner: str) -> None:
        ledger = ledger_of(pool, lambda: Ledger(list(range(pool.num_blocks)), pool.null_block_id))
        super().__init__(ledger, owner, pool.touch_blocks, pool.free_blocks)
        self.num_blocks = pool.num_blocks  # facts, which a closed view still tells
        self.null_block_id = pool.null_block_id
        self._pool = pool

    def _open_pool(self) -> BlockPool:
        self.check_open()
        return self._pool

    def give_back_blocks(self, block_ids: Sequence[int]) -> None:
        """Give back as ``free_blocks`` does, to the head of the queue (POOL-12)."""
        pool = self._open_pool()

        def move(block_ids: Sequence[int]) -> None:
            pool.free_blocks(block_ids)
            pool.move_to_head(block_ids)

        self.free_with(move, block_ids)

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        """Walk the free blocks that still hold reusable KV, next victim first."""
        return walk_free_block_ids_with_hash(self._open_pool)

    def iter_free_block_ids(self) -> Iterator[int]:
        """All free blocks, hashed or not, next victim first; lazy as POOL-6."""
        return walk_free_block_ids(self._open_pool)

    def walk_free_blocks(self) -> FreeBlockWalk:
        """A walk that goes on in later steps (POOL-13)."""
        return ResumedWalk(self._open_pool)

    def free_blocks_with_notice(
        self, block_ids: Sequence[int], on_reuse: Callable[[int], None]
    ) -> None:
        """Give back as ``free_blocks`` does, and hear of each block once (POOL-14)."""
        block_ids = list(block_ids)
        self.free_blocks(block_ids)
        self._open_pool().watch_reuse(block_ids, self, on_reuse)

    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now, hashed or not."""
        return self._open_pool().num_free_blocks()

    def is_free(self, block_id: int) -> bool:
        """Whether the block is free now. False for the null block."""
        return self._open_pool().ref_cnt(block_id) == 0 and block_id != self.null_block_id

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """The keys registered for each block, in one call."""
        return self._open_pool().block_keys(block_ids)

    def primary_keys(self, block_ids: Sequence[int]) -> list[OffloadKey | None]:
        """The first key of each block, or None."""
        return self._open_pool().primary_keys(block_ids)

    def find_cached_block(self, key: OffloadKey) -> int | None:
        """Id of a block that holds this key (POOL-8), free or in use, or None."""
        return self._open_pool().find_cached_block(key)

    @override
    def _shut(self) -> None:
        self._pool.forget_owner(self)
        super()._shut()


if TYPE_CHECKING:
    _: type[GPUBlockPoolView] = BlockPoolView
