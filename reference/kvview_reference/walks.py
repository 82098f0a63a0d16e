"""Walks over the free queue of :class:`~kvview_reference.pool.BlockPool`.

A walk is a position on the queue's axis. A one-shot walk copies a few entries at a time. A method
that takes or moves entries first stops the walk by emptying the copy, and the walk then reads the
entries again. So every item is true without a further check. A resumed walk keeps only its position
between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvview import FreeBlockWalk, OffloadKey, ViewClosedError
from kvview_reference.free_queue import FreeQueue, Walk

_ENTRIES_PER_LOOK = (32, 1024)  # entries in a copy: the first one or after a stop, and at most

OpenPool = Callable[[], FreeQueue]  # raises if the view was closed


class ResumedWalk:
    """A :class:`~kvview.FreeBlockWalk` over the reference pool (POOL-13).

    Args:
        open_pool: Returns the pool, or raises an exception if the view was closed.
    """

    def __init__(self, open_pool: OpenPool) -> None:
        self._open_pool = open_pool
        self._pool: FreeQueue | None = open_pool()
        self._walk = Walk(self._pool.first_hashed_position())
        self._has_started = False  # before its first item, blocks at the head are ahead of it
        self._pool.add_walk(self._walk)

    def _open(self) -> FreeQueue:
        if self._pool is None:
            raise ViewClosedError(
                "POOL-13: the walk was closed; open another one with walk_free_blocks()"
            )
        return self._open_pool()

    def take(self, max_blocks: int) -> list[tuple[int, OffloadKey]]:
        """Return the next items, of at most ``max_blocks`` blocks; none at the end of the queue."""
        pool, walk = self._open(), self._walk
        if not self._has_started:
            self.restart()
        hashes, more_hashes = pool._hash, pool._more_hashes
        items: list[tuple[int, OffloadKey]] = []
        missing, size = max_blocks, _ENTRIES_PER_LOOK[0]
        while missing > 0:
            start, entries = pool.entries_after(walk, max(missing, size))
            if not entries:
                break
            size *= 2
            for position, block_id in enumerate(entries, start):  # noqa: B007
                key = hashes[block_id] if block_id else None
                if key is not None:
                    items.append((block_id, key))
                    if more_hashes and block_id in more_hashes:
                        items += [(block_id, other) for other in more_hashes[block_id]]
                    missing -= 1
                    if missing == 0:
                        break
            walk.position = position
        self._has_started = bool(items) or self._has_started
        return items

    def restart(self) -> None:
        """Start again with the next victim."""
        self._walk.position = self._open().first_hashed_position() - 1
        self._has_started = False

    def close(self) -> None:
        """End the walk; a second call does nothing."""
        if self._pool is not None:
            self._pool.remove_walk(self._walk)
            self._pool = None

    def __del__(self) -> None:
        if hasattr(self, "_walk"):  # otherwise the view was closed when it was opened
            self.close()


def walk_free_block_ids(open_pool: OpenPool) -> Iterator[int]:
    """Walk the blocks that are free at the first ``next()``, next victim first."""
    pool = open_pool()
    walk = Walk(*pool.positions())
    for entries in _look(pool, walk, open_pool):
        for block_id in entries:
            walk.last = block_id
            yield block_id


def walk_free_block_ids_with_hash(open_pool: OpenPool) -> Iterator[tuple[int, OffloadKey]]:
    """Walk the blocks with keys that are free at the first ``next()``, each with all its keys."""
    pool = open_pool()
    hashes, more_hashes = pool._hash, pool._more_hashes
    any_has_more = bool(more_hashes)  # it stays, because a free block gets no hash
    walk = Walk(pool.first_hashed_position(), pool.positions()[1])
    for entries in _look(pool, walk, open_pool):
        for block_id in entries:
            if (key := hashes[block_id]) is not None:
                walk.last = block_id
                yield block_id, key
                if any_has_more and block_id in more_hashes:
                    for key in tuple(more_hashes[block_id]):
                        if not entries:  # stopped
                            open_pool()
                            if pool._state[block_id] != walk.position:
                                break  # taken since, and perhaps freed again
                        if hashes[block_id] is None:
                            break
                        yield block_id, key


def _look(pool: FreeQueue, walk: Walk, open_pool: OpenPool) -> Iterator[list[int]]:
    """Yield the free blocks of a walk in lists, which are emptied when the walk is stopped."""
    pool.add_walk(walk)
    fewest, most = _ENTRIES_PER_LOOK
    num_entries = fewest
    try:
        while True:
            open_pool()
            start, entries = pool.entries_after(walk, num_entries)
            if not entries:
                return
            live = walk.entries = list(filter(None, entries))
            if live:
                yield live
                if not live:  # stopped
                    num_entries = fewest
                    continue
                walk.entries = []
            walk.position = start + len(entries) - 1
            num_entries = min(2 * num_entries, most)
    finally:
        pool.remove_walk(walk)


if TYPE_CHECKING:
    _: type[FreeBlockWalk] = ResumedWalk
