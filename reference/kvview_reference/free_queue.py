"""The free blocks of :class:`~kvview_reference.pool.BlockPool`, and the keys that they hold.

In arrays of ints and a list of states:

- The queue is one axis of positions, next victim first. Unhashed blocks join at
  its low end, the stack ``_front``: item i has position ``-1 - i``. Hashed blocks
  join at its high end, ``_back``: item i has position ``_back_start + i``, from
  ``FIRST_BACK`` up, and what lies before ``_head`` is used up.
- ``_state[b]`` is all that a touch or a free asks of a block, since a further list is a
  further miss of the processor's cache: of a free block its position, of a held one
  twice its references, plus 1 if it has a hash, which lies between the two ends.
- Who takes a block writes 0 at its position, the null block's id, which is never free:
  so every entry is a free block or 0, and ``filter`` reads them.
- Entries of 0 are dropped when an allocation reaches them. Once they outnumber the blocks,
  every touch moves some together (:meth:`FreeQueue._compact`), so that no call takes long.
- A walk (:mod:`kvview_reference.walks`) is a position on that axis. Whoever takes or
  moves entries stops the walks first, so that they look again.

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
_MOVED_PER_TOUCH = 4  # entries: the list has at most 4 a block then, with those that join
_FEWEST_MOVED = 256  # by a touch, however few blocks it takes
_MOST_ENTRIES = 4096  # looked at together by an allocation that wants fewer


class Walk:
    """Where a walk over the free queue stands, and the entries that it looks at."""

    def __init__(self, start: int, end: int = sys.maxsize) -> None:
        self.position = start - 1  # of what was passed last
        self.end = end
        self.entries: list[int] = []  # free blocks, while nobody takes or moves any
        self.last = 0  # of the entries, the one yielded last

    def stop(self, positions: Sequence[int]) -> None:
        """Have it look again, from where it is."""
        if self.entries:
            self.entries.clear()
            self.position = positions[self.last]


class FreeQueue:
    """The free queue of a pool; which blocks enter and leave it is the pool's affair.

    Args:
        num_blocks: Blocks in the pool, the null block included; all others are free.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A list, which is read sooner than an array, though a position is an object (32 bytes).
        self._state = list(range(-num_blocks, 0))
        self._front = array("q", range(num_blocks - 1, 0, -1))
        self._back = array("q")
        self._back_start = FIRST_BACK
        self._head = 0
        self._num_free = num_blocks - 1
        # While entries are moved together, per list: what is moved next, and where to.
        self._front_moves = self._back_moves = (0, 0)
        self._is_compacting = False
        self._is_hashed_in_front = False  # since a move to the head; until it runs empty
        self._is_unhashed_in_back = False  # since the hash of a free block was dropped
        self._hash: list[OffloadKey | None] = [None] * num_blocks
        self._more_hashes: dict[int, list[OffloadKey]] = {}
        self._walks: list[Walk] = []

    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, hashed or not."""
        return self._num_free

    def free_block_ids(self) -> list[int]:
        """The whole free queue at once, next victim first."""
        return [*filter(None, self._front[::-1]), *filter(None, self._back[self._head :])]

    def _set_entry(self, position: int, block_id: int) -> None:
        if position < 0:
            self._front[~position] = block_id
        else:
            self._back[position - self._back_start] = block_id

    def _take_front(self, num_blocks: int) -> list[int]:
        """Take the next entries of the front, as many as there are and are wanted."""
        front = self._front
        block_ids = front[: -num_blocks - 1 : -1].tolist()
        if not self._is_compacting and all(block_ids):  # as a rule: nothing was touched there
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
        """Take the next entries of the back; the caller knows that there are so many."""
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
        """Move this walk along from now on, whenever entries move."""
        self._walks.append(walk)

    def remove_walk(self, walk: Walk) -> None:
        """Forget a walk."""
        # A new list, because the old one may be in use when a walk is dropped.
        self._walks = [other for other in self._walks if other is not walk]

    def positions(self) -> tuple[int, int]:
        """Where the queue starts, and where it ends."""
        return -len(self._front), self._back_start + len(self._back)

    def first_hashed_position(self) -> int:
        """Where a walk over hashed blocks starts: none of them lies before."""
        return -len(self._front) if self._is_hashed_in_front else self._back_start + self._head

    def entries_after(self, walk: Walk, num_entries: int) -> tuple[int, Sequence[int]]:
        """A copy of the next entries of a walk, and where they start."""
        start, stop = walk.position + 1, 0
        if start >= stop:
            start = max(start, self._back_start + self._head)
            stop = self._back_start + len(self._back)
        stop = max(start, min(start + num_entries, stop, walk.end))
        if stop <= 0:
            return start, self._front[-stop:-start][::-1]
        return start, self._back[start - self._back_start : stop - self._back_start]

    def _stop_walks(self) -> None:
        """Have walks look again before they go on: entries are taken or moved."""
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
        """Move some entries together, at both ends, away from those of 0.

        Each end is gone through from its start: a stretch of entries is moved down to
        where the one before it ended, and what is left at the end is cut off. That is
        done in pieces, since all at once takes 150 ms in a pool of 1M blocks.
        """
        num_entries = _MOVED_PER_TOUCH * num_taken + _FEWEST_MOVED
        self._is_compacting = True
        self._stop_walks()
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
        """Give all blocks of a range new positions; walks in the range move along."""
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
    """The blocks among some entries; a long stretch of 0, as touches leave it, costs little."""
    if len(entries) > _FEWEST_MOVED and entries.tobytes() == bytes(8 * len(entries)):
        return []
    return list(filter(None, entries))


def _move_down(entries: array[int], source: int, stop: int, target: int) -> array[int]:
    """Move the blocks among some entries to ``target``, and return them; 0 stays behind."""
    live = array("q", _live(entries[source:stop]))
    entries[source:stop] = array("q", bytes(8 * (stop - source)))
    entries[target : target + len(live)] = live
    return live
