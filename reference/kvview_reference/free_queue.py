"""The free blocks of :class:`~kvview_reference.pool.BlockPool`, and their keys.

The queue consists of two arrays of ints and a list of states.

- Every free block has a position on one axis, next victim first. Unhashed blocks join at
  the low end, the stack ``_front``: item i has position ``-1 - i``. Hashed blocks
  join at the high end, ``_back``: item i has position ``_back_start + i``, which is at least
  ``FIRST_BACK``. Items before ``_head`` are not in the queue any more.
- ``_state[b]`` is the position of a free block. For a held block, ``_state[b]`` is twice the number
  of references, plus 1 if the block has a hash. This number is positive and less than
  ``FIRST_BACK``, so it is never a position. A touch or a free reads only this list, because reading
  a second list would cost a second cache miss.
- A method that takes a block writes 0 at its position. 0 is the id of the null block, which is
  never free, so every entry is a free block or 0, and ``filter`` skips the zeros.
- An allocation drops the zeros that it reads. If there are more zeros than blocks, every touch
  compacts some entries (:meth:`FreeQueue._compact`), so that no single call takes long.
- A walk (:mod:`kvview_reference.walks`) is a position on the axis. Before a method takes or moves
  entries, it stops the walks, so that the walks read the entries again.

Source: ``FreeKVCacheBlockQueue`` in ``vllm/v1/core/kv_cache_utils.py`` (0.33.0), for the eviction
order.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from kvview import OffloadKey

NULL_BLOCK_ID = 0
FIRST_BACK = 1 << 29  # above twice the references that a block can have; one digit of an int
_MOVED_PER_TOUCH = 4  # entries per block; keeps the list below 4 entries per block
_FEWEST_MOVED = 256  # entries that a touch moves, however few blocks it takes
_MOST_ENTRIES = 4096  # entries that an allocation of fewer blocks reads at once


class Walk:
    """The position of a walk over the free queue, and the entries that it has read."""

    def __init__(self, start: int, end: int = sys.maxsize) -> None:
        self.position = start - 1  # of the last block that it passed
        self.end = end
        self.entries: list[int] = []  # free blocks; emptied when blocks are taken or moved
        self.last = 0  # the entry that was yielded last

    def stop(self, positions: Sequence[int]) -> None:
        """Make the walk read its entries again, from its position."""
        if self.entries:
            self.entries.clear()
            self.position = positions[self.last]


class FreeQueue:
    """The free queue of a pool; the pool decides which blocks join and leave it.

    Args:
        num_blocks: Number of blocks of the pool, including the null block; at first all other
            blocks are free.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A list, because it is read faster than an array, although an int object takes 32 bytes.
        self._state = list(range(-num_blocks, 0))
        self._front = array("q", range(num_blocks - 1, 0, -1))
        self._back = array("q")
        self._back_start = FIRST_BACK
        self._head = 0
        self._num_free = num_blocks - 1
        # During a compaction, for each list: the next entry to move, and its destination.
        self._front_moves = self._back_moves = (0, 0)
        self._is_compacting = False
        self._is_hashed_in_front = False  # True from a move to the head until it runs empty
        self._is_unhashed_in_back = False  # True once the hash of a free block was dropped
        self._hash: list[OffloadKey | None] = [None] * num_blocks
        self._more_hashes: dict[int, list[OffloadKey]] = {}
        self._walks: list[Walk] = []

    def num_free_blocks(self) -> int:
        """Return the number of blocks that can be allocated now, with or without a hash."""
        return self._num_free

    def free_block_ids(self) -> list[int]:
        """Return the whole free queue, next victim first."""
        return [*filter(None, self._front[::-1]), *filter(None, self._back[self._head :])]

    def _set_entry(self, position: int, block_id: int) -> None:
        if position < 0:
            self._front[~position] = block_id
        else:
            self._back[position - self._back_start] = block_id

    def _take_front(self, num_blocks: int) -> list[int]:
        """Take the next entries of the front, at most ``num_blocks``."""
        front = self._front
        block_ids = front[: -num_blocks - 1 : -1].tolist()
        if not self._is_compacting and all(block_ids):  # the usual case: no touch has left zeros
            del front[len(front) - len(block_ids) :]
            return block_ids
        block_ids, size = [], 1
        while front and (missing := num_blocks - len(block_ids)):
            source, target = self._front_moves
            if target < len(front) <= source:  # between the two all are 0
                del front[target:]
                continue
            size = max(min(2 * size, _MOST_ENTRIES), missing)
            live = _live(front[: -size - 1 : -1])
            if len(live) <= missing:
                del front[-size:]
            else:
                del front[-self._state[live[missing]] :]
            block_ids += live[:missing]
        source, target = (min(index, len(front)) for index in self._front_moves)
        self._front_moves = source, target
        return block_ids

    def _take_back(self, num_blocks: int) -> list[int]:
        """Take the next entries of the back, which must have enough entries."""
        block_ids: list[int] = []
        size = 1
        while missing := num_blocks - len(block_ids):
            source, target = self._back_moves
            if target <= self._head < source:  # between the two all are 0
                self._set_head(source)
                continue
            size = max(min(2 * size, _MOST_ENTRIES), missing)
            stop = min(self._head + size, len(self._back))
            live = _live(self._back[self._head : stop])
            if len(live) > missing:
                stop = self._state[live[missing]] - self._back_start
            block_ids += live[:missing]
            self._set_head(stop)
        return block_ids

    def add_walk(self, walk: Walk) -> None:
        """Register a walk, so that its position changes when entries move."""
        self._walks.append(walk)

    def remove_walk(self, walk: Walk) -> None:
        """Forget a walk."""
        # A new list, because a loop may be using the old one when a walk is dropped.
        self._walks = [other for other in self._walks if other is not walk]

    def positions(self) -> tuple[int, int]:
        """Return the start and the end of the queue."""
        return -len(self._front), self._back_start + len(self._back)

    def first_hashed_position(self) -> int:
        """Return a position before which no block has a hash."""
        return -len(self._front) if self._is_hashed_in_front else self._back_start + self._head

    def entries_after(self, walk: Walk, num_entries: int) -> tuple[int, Sequence[int]]:
        """Return the position of a walk's next entry, and a copy of its next entries."""
        start, stop = walk.position + 1, 0
        if start >= stop:
            start = max(start, self._back_start + self._head)
            stop = self._back_start + len(self._back)
        stop = max(start, min(start + num_entries, stop, walk.end))
        if stop <= 0:
            return start, self._front[-stop:-start][::-1]
        return start, self._back[start - self._back_start : stop - self._back_start]

    def stop_walks(self) -> None:
        """Make all walks read their entries again, because the caller takes or moves entries."""
        for walk in self._walks:
            walk.stop(self._state)

    def _set_head(self, head: int) -> None:
        # Cut the used part off once it is half of the list: O(1) amortised.
        if 2 * head > len(self._back):
            del self._back[:head]
            self._back_start += head
            source, target = (max(0, index - head) for index in self._back_moves)
            self._back_moves = source, target
            head = 0
        self._head = head

    def _compact(self, num_taken: int) -> None:
        """Remove zeros from both lists, one piece in each call.

        Each list is compacted from its start. Each call moves a piece of entries down to the end of
        the previous piece, and the last call cuts off the unused end. A single call for all pieces
        would take 150 ms in a pool of 1M blocks.
        """
        num_entries = _MOVED_PER_TOUCH * num_taken + _FEWEST_MOVED
        self._is_compacting = True
        self.stop_walks()
        front = self._front
        source, target = self._front_moves
        stop = min(source + num_entries, len(front))
        live = _move_down(front, source, stop, target)
        self._renumber(live[::-1], -stop, -target, -target - len(live))
        self._front_moves = front_moves = stop, target + len(live)

        back = self._back
        source, target = (max(index, self._head) for index in self._back_moves)
        stop = min(source + num_entries, len(back))
        live = _move_down(back, source, stop, target)
        start = self._back_start + target
        self._renumber(live, start, self._back_start + stop, start)
        self._back_moves = back_moves = stop, target + len(live)

        if (front_moves[0], back_moves[0]) == (len(front), len(back)):
            start = self._back_start + back_moves[1]
            self._renumber([], start, self._back_start + len(back), start)
            del back[back_moves[1] :]
            del front[front_moves[1] :]
            for walk in self._walks:
                walk.position = max(walk.position, -len(self._front) - 1)
            self._front_moves = self._back_moves = (0, 0)
            self._is_compacting = False

    def _renumber(self, block_ids: Sequence[int], start: int, stop: int, new_start: int) -> None:
        """Give all blocks of a range new positions, and move the walks in the range accordingly."""
        positions = self._state
        old_positions = [positions[block_id] for block_id in block_ids] if self._walks else []
        for position, block_id in enumerate(block_ids, new_start):
            positions[block_id] = position
        for walk in self._walks:
            if start <= walk.position < stop:
                walk.position = new_start - 1 + bisect_right(old_positions, walk.position)
            if start <= walk.end <= stop:
                walk.end = new_start + bisect_left(old_positions, walk.end)


def is_position(state: int) -> bool:
    """Whether a block in this state is free."""
    return not 0 < state < FIRST_BACK


def _live(entries: array[int]) -> list[int]:
    """Return the entries that are blocks, fast even if touches have left many zeros."""
    if len(entries) > _FEWEST_MOVED and entries.tobytes() == bytes(8 * len(entries)):
        return []
    return list(filter(None, entries))


def _move_down(entries: array[int], source: int, stop: int, target: int) -> array[int]:
    """Move the blocks among these entries to ``target``, leaving zeros; return the blocks."""
    live = array("q", _live(entries[source:stop]))
    entries[source:stop] = array("q", bytes(8 * (stop - source)))
    entries[target : target + len(live)] = live
    return live
