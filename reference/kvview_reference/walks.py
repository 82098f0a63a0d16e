"""Walks over the free queue of :class:`~kvview_reference.pool.BlockPool`.

A walk is a position on the queue's axis, and copies a few entries at a time. A method
that takes or moves entries first stops the walk by emptying the copy, and the walk then reads the
entries again. So every item is true without a further check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvview import OffloadKey
from kvview_reference.free_queue import FreeQueue, Walk

_ENTRIES_PER_LOOK = (32, 1024)  # entries in a copy: the first one or after a stop, and at most

OpenPool = Callable[[], FreeQueue]  # raises if the view was closed


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
