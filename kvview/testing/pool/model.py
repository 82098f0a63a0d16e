"""The pool contract as an executable model: dictionaries, lists and the laws.

The model calls no pool. The model computes which blocks are free, in which order blocks are
evicted, and which items and refusals every call must produce. If the contract leaves a
choice to the engine (the place of a block without a key, the order of victims without keys), the
model adopts the choice of the pool, and only checks the promised part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from kvview.keys import OffloadKey
from kvview.testing.suites.conformance import Promises

Walk = list[tuple[int, int]]
"""The blocks that are ahead of a walk, each with the time at which it became free."""

KeySet = tuple[int, OffloadKey, frozenset[OffloadKey]]
"""A block, its primary key, and its other keys."""


def key_sets(items: Iterable[tuple[int, OffloadKey]]) -> list[KeySet]:
    """Group the items of a walk by block, so that the order of secondary keys does not matter."""
    found = []
    for block, run in groupby(items, key=itemgetter(0)):
        primary, *others = [key for _, key in run]
        found.append((block, primary, frozenset(others)))
    return found


class PoolModel:
    """The state of a pool, as the contract defines it.

    Args:
        num_blocks: Blocks in the pool, the null block included.
        null: The null block, or None.
    """

    def __init__(self, num_blocks: int, null: int | None) -> None:
        self.blocks = [block for block in range(num_blocks) if block != null]
        self.null = null
        self.engine: Counter[int] = Counter()
        """References of the engine."""
        self.held: list[Counter[int]] = []
        """References taken through each view."""
        self.keys: dict[int, list[OffloadKey]] = {}
        """Keys of each block, primary first."""
        self.joined: dict[int, int] = dict.fromkeys(self.blocks, 0)
        """Free blocks, with the time at which each became free."""
        self.place: dict[int, int] = dict.fromkeys(self.blocks, 0)
        """Position in the queue; negative for a block that was released to the head (POOL-12)."""
        self.at_head: set[int] = set()
        self.released_by: dict[int, int | None] = {}
        """The view whose release made a block free; None for the engine."""
        self.now = 0
        """The time, which is the number of blocks that became free so far."""
        self.closed: set[int] = set()
        """The closed views; their blocks stay held (POOL-10)."""

    def add_view(self) -> None:
        """Add a view that holds no block."""
        self.held.append(Counter())

    def accounts(self) -> Iterable[Counter[int]]:
        """Return the references of each owner except the engine."""
        return self.held

    def held_through(self, view: int) -> Counter[int]:
        """Return the references that a view's ``held_blocks`` and ``close`` report (POOL-9)."""
        return self.held[view]

    # --- the present state ---

    def is_free(self, block: int) -> bool:
        """Return whether a block is free: neither the engine nor a view holds it (POOL-1)."""
        return block in self.joined

    def order(self) -> list[int]:
        """Return the free blocks that have keys, next victim first (POOL-6, POOL-11, POOL-12)."""
        return sorted((b for b in self.keys if b in self.joined), key=self.place.__getitem__)

    def key_sets(self, blocks: Sequence[int]) -> list[KeySet]:
        """Return the keys of each block: the primary key, and other keys in any order (POOL-6)."""
        return key_sets((block, key) for block in blocks for key in self.keys[block])

    def holders(self, key: OffloadKey) -> list[int]:
        """Return the blocks that hold a key, free or in use (POOL-8)."""
        return [block for block, keys in self.keys.items() if key in keys]

    # --- references ---

    def take(self, blocks: Sequence[int], refs: Counter[int]) -> None:
        """Take references, one per mention (POOL-2), except on the null block (POOL-5)."""
        for block in blocks:
            if block != self.null:
                refs[block] += 1
                self.joined.pop(block, None)
                self.at_head.discard(block)

    def give(self, blocks: Sequence[int], refs: Counter[int], *, to_head: bool = False) -> None:
        """Release references; a block without references joins the queue at its last mention."""
        real = [block for block in blocks if block != self.null]
        refs.subtract(real)
        for block in set(real):
            if not refs[block]:
                del refs[block]
        last_first = list(dict.fromkeys(reversed(real)))
        accounts = [self.engine, *self.accounts()]
        freed = [block for block in last_first if not any(held[block] for held in accounts)]
        for block in freed if to_head else freed[::-1]:
            self.now += 1
            self.joined[block], self.place[block] = self.now, -self.now if to_head else self.now
            if to_head:
                self.at_head.add(block)
            self.released_by[block] = next(
                (view for view, held in enumerate(self.held) if held is refs), None
            )

    # --- the engine ---

    def allocated(self, blocks: Sequence[int]) -> Promises:
        """Take the blocks of an allocation; yields a law, a promise, and whether it was kept."""
        order = self.order()
        victims = [block for block in blocks if block in self.keys]
        yield "POOL-5", "the null block is not allocated", self.null not in blocks
        yield "POOL-2", "an allocation names a block once", len(set(blocks)) == len(blocks)
        yield "POOL-1", "an allocation takes free blocks only", all(map(self.is_free, blocks))
        expected = order[: len(victims)]
        yield "POOL-11", f"victims with keys come in the order {expected}", victims == expected
        for block in blocks:
            for other in self.at_head:
                is_late = other != block and self.joined[block] < self.joined[other]
                yield "POOL-12", f"{other}, given back to the head, is before {block}", not is_late
            self.take([block], self.engine)
            self.keys.pop(block, None)

    def cache(self, block: int, key: OffloadKey) -> None:
        """Register a key of a block, unless the block already has the key."""
        if key not in self.keys.setdefault(block, []):
            self.keys[block].append(key)

    def evict(self, blocks: Sequence[int]) -> None:
        """Drop all keys of these blocks."""
        for block in blocks:
            self.keys.pop(block, None)

    def reset(self) -> bool:
        """Drop all keys unless a block is held; returns whether the keys were dropped (POOL-9)."""
        if self.engine or any(self.accounts()):
            return False
        self.keys.clear()
        return True

    # --- walks ---

    def was_moved_since(self, block: int, time: int, view: int) -> bool:
        """Whether the block became free after ``time`` by a release that this view did not make.

        A view is not notified when the engine or another view takes and frees a block. So by
        POOL-7, a walk may or may not yield a block that was moved in this way.
        """
        now = self.joined.get(block, -1)
        return now > time and self.released_by.get(block) != view

    def next_block(self, walk: Walk) -> int | None:
        """Return the next block that stayed free since the start of the walk, or None (POOL-7)."""
        while walk and self.joined.get(walk[0][0]) != walk[0][1]:
            walk.pop(0)
        return walk[0][0] if walk else None

    def next_keys(self, block: int, yielded: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that a walk may yield next: the primary key, then the other keys."""
        keys = self.keys.get(block, [])
        return [key for key in keys if key not in yielded] if yielded else keys[:1]
