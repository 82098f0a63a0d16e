"""A walk over the free queue of a real vLLM pool, within one step.

A block that leaves the queue loses its links, and a block that joins the queue is linked at its
front or its back. A view knows its touches, but not the changes that the engine makes. A walk
moves to a safe block before the view touches blocks, and uses the blocks that it has read before to
check its place.

Source: ``FreeKVCacheBlockQueue`` in ``vllm/v1/core/kv_cache_utils.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvview_vllm.releases import PoolSeam

_FIRST_CHUNK = 16
_LARGEST_CHUNK = 1024


def is_queued(block: Any) -> bool:
    """Whether a block is in the free queue; a block outside the queue has no links."""
    return bool(block.next_free_block is not None)


class Walk:
    """One walk over the real free queue, which reads chunks of blocks ahead.

    1. Each chunk has twice the size of the previous chunk, so a caller that takes k blocks causes
       about 2k reads at most.
    2. A block that leaves the queue loses its links, and a block that joins the queue is in front
       of the cursor or behind ``_last``; cursor and ``_last`` move before the view's own touches
       (:meth:`before_touch`).
    3. If the engine took the block under the cursor, or moved it behind ``_last``, the walk starts
       again at the front and skips the blocks that it has read, so no block is yielded twice.
    4. If the walk has read fewer blocks than were free at the start, a last pass finds the blocks
       that it missed, and perhaps blocks that were freed since the start.
    """

    def __init__(self, queue: Any, release: PoolSeam, hashed_only: bool) -> None:
        self._gone: set[int] = set()  # touched through the view since the start
        self._seen: set[int] = set()
        self._head = queue.fake_free_list_head
        self._tail = queue.fake_free_list_tail
        self._cursor = self._head.next_free_block  # the first block not read yet
        self._last = self._tail.prev_free_block
        self._unseen = queue.num_free_blocks
        self._joins_in_front = release.joins_in_front
        self._hashed_only = hashed_only
        self._rescanned = False

    def blocks(self) -> Iterator[Any]:
        """Yield blocks that are free when they are yielded, next victim first."""
        size, gone = _FIRST_CHUNK, self._gone
        while chunk := self._read(size):
            for block in chunk:
                if block.next_free_block is not None and block.block_id not in gone:
                    yield block
            size = min(2 * size, _LARGEST_CHUNK)

    def has(self, block: Any) -> bool:
        """Whether a yielded block is still part of the walk: free, and not touched."""
        return is_queued(block) and block.block_id not in self._gone

    def before_touch(self, blocks: Iterable[Any]) -> None:
        """Move to a safe block before the view takes these blocks out of the queue."""
        leaving = {block.block_id for block in blocks if is_queued(block)}
        while self._cursor.block_id in leaving:
            self._cursor = self._cursor.next_free_block
        while self._last.block_id in leaving:
            self._last = self._last.prev_free_block
        self._unseen -= len(leaving - self._gone - self._seen)
        self._gone.update(block.block_id for block in blocks)

    def before_free(self, blocks: Iterable[Any]) -> None:
        """Skip blocks that a view releases during the walk."""
        self._gone.update(block.block_id for block in blocks)

    def _read(self, size: int) -> list[Any]:
        """Return the next blocks of the queue, at most ``size``; empty at the end."""
        seen, gone, tail, last = self._seen, self._gone, self._tail, self._last
        num_seen = len(seen)
        missing = size
        chunk: list[Any] = []
        block = self._place()
        while missing:
            if block is tail:
                if not self._rescanned and self._is_ahead(last):
                    block = self._head.next_free_block
                    continue
                if self._rescanned or self._unseen <= len(seen) - num_seen:
                    break
                self._rescanned = True
                block = self._head.next_free_block
                continue
            block_id = block.block_id
            if block_id not in seen and block_id not in gone:
                if not self._hashed_only or block.block_hash is not None:
                    chunk.append(block)
                    missing -= 1
                seen.add(block_id)
            block = tail if block is last else block.next_free_block
        self._unseen -= len(seen) - num_seen
        self._cursor = block
        return chunk

    def _is_ahead(self, block: Any) -> bool:
        """Whether a block is still part of the walk, and not read yet."""
        is_read = block.block_id in self._seen or block.block_id in self._gone
        return block is not self._head and is_queued(block) and not is_read

    def _place(self) -> Any:
        """Return the block at which to resume: the cursor, or the front if the cursor moved."""
        block, last = self._cursor, self._last
        # A last block that the engine moved to the front is no end while other blocks are missing.
        is_read = last.block_id in self._seen and is_queued(last) and self._unseen <= 0
        if not self._rescanned and (last is self._head or is_read):
            return self._tail
        if block is self._tail:
            return block
        if is_queued(block):
            before = block.prev_free_block
            if (
                before is self._head
                or before.block_id in self._seen
                or before.block_id in self._gone
            ):
                return block
            if self._joins_in_front and before.block_hash is None:
                return block
        return self._head.next_free_block
