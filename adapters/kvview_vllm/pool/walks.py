"""Walks over the free queue of a real vLLM pool, either within one step or resumed in later steps.

A block that leaves the queue loses its links, and a block that joins the queue is linked at its
front or its back. A view knows its touches, but not the changes that the engine makes. Both
kinds of walk move to a safe block before the view touches blocks. When a walk resumes, it uses the
blocks that it has read before to check its place.

Source: ``FreeKVCacheBlockQueue`` in ``vllm/v1/core/kv_cache_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvview import FreeBlockWalk, OffloadKey, ViewClosedError
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
    3. If the engine took the block under the cursor, the walk starts again at the front and skips
       the blocks that it has read, so no block is yielded twice.
    4. If the walk has read fewer blocks than were free at the start, a last pass finds the hashed
       blocks that it missed.
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
        hashed_only, missing = self._hashed_only, size
        chunk: list[Any] = []
        block = self._place()
        while missing:
            if block is tail:
                if self._rescanned or self._unseen <= len(seen) - num_seen:
                    break
                self._rescanned = True
                # From 0.24 on unhashed blocks join in front (PR #42656), so the last pass could not
                # distinguish them from missed ones.
                self._hashed_only = hashed_only = hashed_only or self._joins_in_front
                block = self._head.next_free_block
                continue
            block_id = block.block_id
            if block_id not in seen and block_id not in gone:
                if not hashed_only or block.block_hash is not None:
                    chunk.append(block)
                    missing -= 1
                seen.add(block_id)
            block = tail if block is last else block.next_free_block
        self._unseen -= len(seen) - num_seen
        self._cursor = block
        return chunk

    def _place(self) -> Any:
        """Return the block at which to resume: the cursor, or the front if the cursor moved."""
        block, last = self._cursor, self._last
        if not self._rescanned and (
            last is self._head or (last.block_id in self._seen and is_queued(last))
        ):
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


class ResumedWalk:
    """A :class:`~kvview.FreeBlockWalk` over the real free queue (POOL-13).

    Args:
        open_pool: Returns the pool, or raises an exception if the view was closed.
        more_keys: Keys of a block besides its primary one.
        has_more_keys: Whether any block has more keys.
        num_blocks: Number of blocks of the pool.
        before_touch: Callbacks that the view calls before it touches blocks; an open walk adds a
            callback.
    """

    _is_closed = True  # until it was opened

    def __init__(
        self,
        open_pool: Callable[[], Any],
        more_keys: Callable[[int], list[OffloadKey]],
        has_more_keys: Callable[[], bool],
        num_blocks: int,
        before_touch: list[Any],
    ) -> None:
        self._open_pool = open_pool
        self._more_keys = more_keys
        self._has_more_keys = has_more_keys
        self._before_touch = before_touch
        self._place = Place(open_pool().free_block_queue, num_blocks)
        before_touch.append(self._place.before_touch)
        self._is_closed = False

    def take(self, max_blocks: int) -> list[tuple[int, OffloadKey]]:
        """Return the next items, at most ``max_blocks`` blocks; empty at the end of the queue."""
        self._open()
        place, has_more = self._place, self._has_more_keys()
        items: list[tuple[int, OffloadKey]] = []
        missing = max_blocks
        if missing > 0:
            for block_id, key in place.blocks():
                items.append((block_id, key))
                if has_more:
                    items += [(block_id, other) for other in self._more_keys(block_id)]
                missing -= 1
                if not missing:
                    break
        return items

    def restart(self) -> None:
        """Start again with the next victim."""
        self._open()
        self._place.restart()

    def pass_over(self, blocks: Iterable[Any]) -> None:
        """Skip blocks that were released to the head, in front of the walk."""
        self._place.pass_over(blocks)

    def close(self) -> None:
        """End the walk; may be called twice."""
        self._is_closed = True
        own = self._place.before_touch
        self._before_touch[:] = [other for other in self._before_touch if other != own]

    def _open(self) -> Any:
        if self._is_closed:
            raise ViewClosedError("POOL-13: the walk was closed; open one with walk_free_blocks()")
        return self._open_pool()

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()


class Place:
    """The place of a resumed walk in the real free queue.

    1. The place of the walk is behind ``_before``, the last block that it has passed; ``_before``
       moves back before the view's own touches. That block has not moved if it is queued with the
       same key, and the walk has also passed the block in front of it.
    2. If the engine has moved that block, the walk reads from the front and skips the blocks that
       it has passed, so a block that stayed is neither missed nor yielded twice.
    3. If the engine takes and releases a run of blocks together, with its keys, between two calls,
       the move is invisible. So at the end of the queue, once it has read as many blocks as are
       free, the walk reads from the front once more to find missed blocks.
    4. Blocks that the view releases to the head count as passed, if the walk has passed any block
       before.
    """

    def __init__(self, queue: Any, num_blocks: int) -> None:
        self._queue = queue
        self._head, self._tail = queue.fake_free_list_head, queue.fake_free_list_tail
        # By block id: the key under which it was passed. A list costs 8 bytes a block.
        self._seen: list[OffloadKey | None] = [None] * num_blocks
        self.restart()

    def restart(self) -> None:
        """Return to the front of the queue."""
        self._before = self._head
        self._seen[:] = [None] * len(self._seen)
        self._is_lost = False  # so that seen blocks are skipped, up to the end
        self._has_passed = False
        self._num_read = 0  # since the last pass from the front

    def blocks(self) -> Iterator[tuple[int, OffloadKey]]:
        """Resume the walk, up to the end of the queue or until the caller stops."""
        seen, tail, before = self._seen, self._tail, self._find()
        num_read, block = 0, before.next_free_block
        try:
            while block is not tail or self._starts_again(num_read):
                if block is tail:
                    before, num_read = self._head, 0
                    block = before.next_free_block
                    continue
                key = block.block_hash
                this, block = block, block.next_free_block
                num_read += 1
                if key is not None:
                    before, block_id = this, this.block_id
                    if not (self._is_lost and seen[block_id] == key):
                        seen[block_id] = key
                        self._has_passed = True
                        yield block_id, key
        finally:
            self._num_read += num_read
            self._before = before

    def before_touch(self, blocks: list[Any]) -> None:
        """Move to a safe block before the view takes these blocks out of the queue."""
        seen = self._seen
        block_ids = [block.block_id for block in blocks]
        for block_id in block_ids:
            seen[block_id] = None
        if self._before.block_id in block_ids:
            leaving = set(block_ids)
            while self._before.block_id in leaving and is_queued(self._before):
                self._before = self._before.prev_free_block

    def pass_over(self, blocks: Iterable[Any]) -> None:
        """Skip blocks that joined at the front, because this release frees to the head."""
        if not self._has_passed:
            return
        for block in blocks:
            if is_queued(block):
                self._seen[block.block_id] = block.block_hash
        self._is_lost |= self._before is self._head  # because the walk would read them first

    def _starts_again(self, num_read: int) -> bool:
        """Whether the walk must read from the front once more, at the end of the queue."""
        was_lost, self._is_lost = self._is_lost, False
        if not was_lost and self._num_read + num_read >= self._queue.num_free_blocks > 0:
            self._is_lost = True
        if was_lost or self._is_lost:
            self._num_read = -num_read
        return self._is_lost

    def _find(self) -> Any:
        """Return the block behind which the walk resumes."""
        before, head = self._before, self._head
        if before is not head and not self._stayed(before):
            self._is_lost = True
            return head
        return before

    def _stayed(self, block: Any) -> bool:
        key = block.block_hash
        if key is None or self._seen[block.block_id] != key or not is_queued(block):
            return False
        before = block.prev_free_block
        key = before.block_hash
        return key is None or bool(self._seen[before.block_id] == key)


if TYPE_CHECKING:
    _: type[FreeBlockWalk] = ResumedWalk
