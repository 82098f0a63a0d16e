"""The free queue of a pool, as a doubly linked list of block ids.

- The null block, which is never free, stands at both ends of the list.
- A walk has the next block that it will pass. If this block leaves the queue, the walk continues
  at the following block.
- Blocks are numbered as they join the queue, so that a walk skips those that joined later.

Source: ``FreeKVCacheBlockQueue`` in ``vllm/v1/core/kv_cache_utils.py`` (0.33.0).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NULL_BLOCK_ID = 0


@dataclass(eq=False, slots=True)
class _Walk:
    following: int


class FreeQueue:
    """The free blocks, next victim first; at first all blocks except the null block.

    Args:
        num_blocks: Number of blocks of the pool, including the null block.
    """

    def __init__(self, num_blocks: int) -> None:
        self._next = array("q", range(1, num_blocks + 1))
        self._next[-1] = NULL_BLOCK_ID
        self._previous = array("q", range(-1, num_blocks - 1))
        self._previous[NULL_BLOCK_ID] = num_blocks - 1
        self._joined = array("q", bytes(8 * num_blocks))
        self._num_joined = 0
        self._first_hashed = NULL_BLOCK_ID  # no block before it has a hash
        self._walks: list[_Walk] = []
        self._num_free = num_blocks - 1

    def __len__(self) -> int:
        return self._num_free

    def add_to_tail(self, block_id: int) -> None:
        """Make a block with a hash the last victim."""
        self._insert(self._previous[NULL_BLOCK_ID], block_id, NULL_BLOCK_ID)
        if self._first_hashed == NULL_BLOCK_ID:
            self._first_hashed = block_id

    def add_to_head(self, block_id: int, *, is_hashed: bool = False) -> None:
        """Make a block the next victim."""
        self._insert(NULL_BLOCK_ID, block_id, self._next[NULL_BLOCK_ID])
        if is_hashed:
            self._first_hashed = block_id

    def remove(self, block_id: int) -> None:
        """Remove a free block."""
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before
        self._num_free -= 1
        if self._first_hashed == block_id:
            self._first_hashed = after
        for walk in self._walks:
            if walk.following == block_id:
                walk.following = after

    def take(self, num_blocks: int) -> list[int]:
        """Remove the next victims, of which there must be enough, and return them in order."""
        block_ids: list[int] = []
        block_id = self._next[NULL_BLOCK_ID]
        for _ in range(num_blocks):
            block_ids.append(block_id)
            block_id = self._next[block_id]
        self._next[NULL_BLOCK_ID] = block_id
        self._previous[block_id] = NULL_BLOCK_ID
        self._num_free -= num_blocks
        if self._first_hashed in block_ids:
            self._first_hashed = block_id
        for walk in self._walks:
            if walk.following in block_ids:
                walk.following = block_id
        return block_ids

    def block_ids(self) -> list[int]:
        """Return all free blocks, next victim first."""
        following = self._next
        block_ids: list[int] = []
        block_id = following[NULL_BLOCK_ID]
        while block_id:
            block_ids.append(block_id)
            block_id = following[block_id]
        return block_ids

    def forget_hashes(self) -> None:
        """Record that no block has a hash any more."""
        self._first_hashed = NULL_BLOCK_ID

    def joined(self, block_id: int) -> int:
        """Return the number that a block received when it last joined the queue."""
        return self._joined[block_id]

    def walk(self, check_open: Callable[[], object], *, from_hashed: bool = False) -> Iterator[int]:
        """Walk the blocks that are free at the first ``next()``, next victim first (POOL-7).

        Args:
            check_open: Called at the start and before each further item; raises if the walk must
                not continue.
            from_hashed: Whether to skip the blocks at the head that certainly have no hash.
        """
        check_open()
        walk = _Walk(self._first_hashed if from_hashed else self._next[NULL_BLOCK_ID])
        began = self._num_joined
        self._walks.append(walk)
        try:
            while block_id := walk.following:
                walk.following = self._next[block_id]
                if self._joined[block_id] <= began:
                    yield block_id
                    check_open()
        finally:
            # A new list, because a loop may be using the old one when a walk is dropped.
            self._walks = [other for other in self._walks if other is not walk]

    def _insert(self, before: int, block_id: int, after: int) -> None:
        self._next[before] = self._previous[after] = block_id
        self._next[block_id] = after
        self._previous[block_id] = before
        self._num_joined += 1
        self._joined[block_id] = self._num_joined
        self._num_free += 1
