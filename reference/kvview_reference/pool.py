"""A standalone block pool that keeps the pool contract, and the view over it.

How the free queue is kept, without an object a block, in plain lists of ints:

- The queue is one axis of positions, next victim first. Unhashed blocks join at
  its low end, the stack ``_front``: item i has position ``num_blocks - 1 - i``.
  Hashed blocks join at its high end, the list ``_back``: item i has position
  ``_back_start + i``, and what lies before ``_head`` is used up.
- ``_ref_cnt[b]`` counts references: a block is free exactly when it is 0.
  ``_position[b]`` is where block b joined the queue last.
- Touching only counts. The entry stays where it is and is *stale* from then on:
  an entry is live when its block is free and ``_position`` points at it. Stale
  entries are dropped when an allocation reaches them, where a walk meets more of
  them than of live ones, and all at once when they outnumber the blocks.
- A walk (:mod:`kvview_reference.walks`) is a position on that axis. Whoever moves
  entries empties the copies that a walk looks at, so that it looks again.

Source: vLLM 0.33.0, ``vllm/v1/core/block_pool.py`` and ``FreeKVCacheBlockQueue``
in ``vllm/v1/core/kv_cache_utils.py`` (the eviction order); PR #39654.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from typing_extensions import override

from kvview import (
    AllBlocksCleared,
    BlockNotHeldError,
    BlockRemoved,
    BlockStored,
    ConfigError,
    FreeBlockWalk,
    GPUBlockPoolView,
    GPUEvent,
    NoFreeBlocksError,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    require_offload_key,
)
from kvview.guard.ledger import Ledger, LedgerView, check_block_ids, ledger_of
from kvview.keys import make_offload_keys
from kvview_reference.events import EventLog
from kvview_reference.walks import (
    ResumedWalk,
    Walk,
    walk_free_block_ids,
    walk_free_block_ids_with_hash,
)

NULL_BLOCK_ID = 0
_MAX_STALE_SHARE = 8  # stale entries per block before they are dropped

_logger = logging.getLogger(__name__)


class BlockPool:
    """Fixed-size GPU blocks: allocation, references, eviction order, prefix cache.

    1. Block 0 is the null block: never allocated, ignored by touch and free.
    2. Freed blocks without a hash are reused first, the first of a batch first;
       freed blocks with a hash are reused last, in the order freed.
    3. A hash may name several blocks, a block may have several hashes.
    4. A call that raises has changed nothing.

    These are the engine's moves; ids are checked for their range. A connector gets
    :meth:`view`, which also checks types and who holds what.

    Args:
        num_blocks: Blocks in the pool, the null block included.
        enable_caching: Whether freed blocks keep their KV for the prefix cache.
        enable_events: Whether :meth:`take_events` reports stored and removed blocks.

    Raises:
        ConfigError: ``num_blocks`` is not an int of at least 2.
    """

    def __init__(
        self, num_blocks: int, *, enable_caching: bool = True, enable_events: bool = False
    ) -> None:
        if type(num_blocks) is not int or num_blocks < 2:
            raise ConfigError(f"num_blocks must be an int of at least 2, got {num_blocks!r}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self._ref_cnt = [0] * num_blocks
        self._position = list(range(num_blocks))
        self._front = self._position[:0:-1]  # the same int objects: 32 bytes a block saved
        self._back: list[int] = []
        self._back_start = num_blocks
        self._head = 0
        self._num_free = num_blocks - 1
        self._is_hashed_in_front = False  # since a move to the head; until it runs empty
        self._hash: list[OffloadKey | None] = [None] * num_blocks
        self._more_hashes: dict[int, list[OffloadKey]] = {}
        self._blocks_by_hash: dict[OffloadKey, int | dict[int, None]] = {}
        self._walks: list[Walk] = []
        self._watchers: dict[int, dict[object, Callable[[int], None]]] = {}  # by block, by owner
        self._events: EventLog[GPUEvent] | None = EventLog() if enable_events else None

    # --- references and the free queue ---

    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, hashed or not."""
        return self._num_free

    def ref_cnt(self, block_id: int) -> int:
        """References on a block, the engine's and every view's."""
        self.check_block_ids((block_id,))
        return self._ref_cnt[block_id]

    def allocate_blocks(self, num_blocks: int) -> list[int]:
        """Take the next victims, in order, a reference each; their hashes are evicted.

        Raises:
            NoFreeBlocksError: Fewer are free.
        """
        if not 0 <= num_blocks <= self._num_free:
            raise NoFreeBlocksError(f"cannot take {num_blocks} of {self._num_free} free blocks")
        ref_cnt, positions, front = self._ref_cnt, self._position, self._front
        block_ids: list[int] = []
        nothing_stale = self._num_entries() == self._num_free
        while front and (missing := num_blocks - len(block_ids)):
            start = self._front_start()
            entries = front[: -missing - 1 : -1]
            del front[-missing:]
            if nothing_stale and not self._is_hashed_in_front:
                block_ids = entries
                for block_id in entries:
                    ref_cnt[block_id] = 1
                continue
            for position, block_id in enumerate(entries, start):
                if ref_cnt[block_id] == 0 and positions[block_id] == position:
                    ref_cnt[block_id] = 1
                    block_ids.append(block_id)
                    self._evict_hashes(block_id)
        if not front:
            self._is_hashed_in_front = False
        while missing := num_blocks - len(block_ids):
            entries = self._back[self._head : self._head + missing]
            for position, block_id in enumerate(entries, self._back_start + self._head):
                if ref_cnt[block_id] == 0 and positions[block_id] == position:
                    ref_cnt[block_id] = 1
                    block_ids.append(block_id)
                    self._evict_hashes(block_id)
            self._set_head(self._head + len(entries))
        self._num_free -= num_blocks
        # Positions of the front stack are used again: keep walks out of them.
        for walk in self._walks:
            walk.entries.clear()
            walk.position = max(walk.position, self._front_start() - 1)
        if self._watchers:
            self._notify_reuse(block_ids)
        return block_ids

    def touch_blocks(self, block_ids: Iterable[int]) -> None:
        """Take one reference a block named; free ones leave the queue (POOL-1 to 3, 5).

        Raises:
            UnknownBlockError: An id is no block of this pool; nothing was touched.
        """
        block_ids = list(block_ids)
        ref_cnt = self._ref_cnt
        num_not_free = 0
        remaining = iter(block_ids)
        try:
            for block_id in remaining:
                if block_id > 0:
                    if count := ref_cnt[block_id]:
                        ref_cnt[block_id] = count + 1
                        num_not_free += 1
                    else:
                        ref_cnt[block_id] = 1
                elif block_id == NULL_BLOCK_ID:
                    num_not_free += 1
                else:
                    raise IndexError
        except Exception:
            self._add_references(block_ids, remaining, -1)
            self.check_block_ids(block_ids)
            raise
        self._num_free -= len(block_ids) - num_not_free
        if self._num_entries() - self._num_free > _MAX_STALE_SHARE * self.num_blocks:
            self._drop_stale_entries(self.num_blocks)
            self._drop_stale_entries(self._back_start + len(self._back))

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Give one reference back a block named; the first is evicted first.

        Raises:
            UnknownBlockError: An id is no block of this pool.
            BlockNotHeldError: More frees than references; nothing was freed.
        """
        block_ids = list(block_ids)
        ref_cnt, hashes, positions = self._ref_cnt, self._hash, self._position
        unhashed: list[int] = []
        hashed: list[int] = []
        position = self._back_start + len(self._back)
        remaining = iter(block_ids)
        try:
            for block_id in remaining:
                if block_id > 0:
                    count = ref_cnt[block_id]
                    if count == 1:
                        ref_cnt[block_id] = 0
                        if hashes[block_id] is None:
                            unhashed.append(block_id)
                        else:
                            positions[block_id] = position
                            position += 1
                            hashed.append(block_id)
                    elif count:
                        ref_cnt[block_id] = count - 1
                    else:
                        raise BlockNotHeldError(f"POOL-4: block {block_id} is freed too often")
                elif block_id != NULL_BLOCK_ID:
                    raise IndexError
        except Exception:
            self._add_references(block_ids, remaining, 1)
            self.check_block_ids(block_ids)
            raise
        if unhashed:
            unhashed.reverse()
            position = self._front_start()
            for block_id in unhashed:
                position -= 1
                positions[block_id] = position
            self._front += unhashed
        self._back += hashed
        self._num_free += len(unhashed) + len(hashed)

    def move_to_head(self, block_ids: Iterable[int]) -> None:
        """Make those of the blocks that are free the next victims, in the order given."""
        ref_cnt, hashes, positions = self._ref_cnt, self._hash, self._position
        position = self._front_start()
        for block_id in dict.fromkeys(reversed(list(block_ids))):
            if ref_cnt[block_id] == 0 and block_id != NULL_BLOCK_ID:
                position -= 1
                positions[block_id] = position  # its entry elsewhere is stale from now on
                self._front.append(block_id)
                self._is_hashed_in_front |= hashes[block_id] is not None

    def _add_references(self, block_ids: list[int], remaining: Iterator[int], change: int) -> None:
        """Undo a loop over ``block_ids`` that failed at the item before ``remaining``."""
        num_done = len(block_ids) - len(list(remaining)) - 1
        for block_id in block_ids[:num_done]:
            if block_id != NULL_BLOCK_ID:
                self._ref_cnt[block_id] += change

    def check_block_ids(self, block_ids: Iterable[object]) -> None:
        """Raise ``UnknownBlockError`` unless each is an int that names a block (POOL-4)."""
        check_block_ids(block_ids, self.num_blocks)

    def free_block_ids(self) -> list[int]:
        """The whole free queue at once, next victim first."""
        if self._num_entries() == self._num_free:  # nothing is stale
            return self._front[::-1] + self._back[self._head :]
        ref_cnt, positions = self._ref_cnt, self._position
        front, back = self._front[::-1], self._back[self._head :]
        return [
            block_id
            for entries in (
                enumerate(front, self._front_start()),
                enumerate(back, self._back_start + self._head),
            )
            for position, block_id in entries
            if ref_cnt[block_id] == 0 and positions[block_id] == position
        ]

    def iter_free_block_ids(self) -> Iterator[int]:
        """The whole free queue, next victim first; lazy, and safe as POOL-7."""
        return walk_free_block_ids(lambda: self)

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        """Free blocks that hold reusable KV, next victim first (POOL-5 to POOL-8)."""
        return walk_free_block_ids_with_hash(lambda: self)

    # --- for walks ---

    def add_walk(self, walk: Walk) -> None:
        """Move this walk along from now on, whenever entries move."""
        self._walks.append(walk)

    def remove_walk(self, walk: Walk) -> None:
        """Forget a walk."""
        # A new list, because the old one may be in use when a walk is dropped.
        self._walks = [other for other in self._walks if other is not walk]

    def positions(self) -> tuple[int, int]:
        """Where the queue starts, and where it ends."""
        return self._front_start(), self._back_start + len(self._back)

    def first_hashed_position(self) -> int:
        """Where a walk over hashed blocks starts: none of them lies before."""
        return self._front_start() if self._is_hashed_in_front else self._back_start + self._head

    def entries_after(self, walk: Walk, num_entries: int) -> tuple[int, list[int]]:
        """A copy of the next entries of a walk, stale ones too, and where they start."""
        start, stop = walk.position + 1, self.num_blocks
        if start >= stop:
            start = max(start, self._back_start + self._head)
            stop = self._back_start + len(self._back)
        stop = min(start + num_entries, stop, walk.end)
        return start, self._entries(start, stop) if start < stop else []

    def tidy(self, walk: Walk, stop: int) -> None:
        """Drop the stale entries before ``stop``, where a walk met more than live ones."""
        if 2 * walk.num_stale > stop - self._first_position(stop):
            self._drop_stale_entries(stop)

    def _front_start(self) -> int:
        return self.num_blocks - len(self._front)

    def _first_position(self, stop: int) -> int:
        """Where the list starts that ends at, or goes on past, position ``stop``."""
        return self._front_start() if stop <= self.num_blocks else self._back_start + self._head

    def _entries(self, start: int, stop: int) -> list[int]:
        """A copy of a range of entries that lies in one of the two lists."""
        if stop <= self.num_blocks:
            return self._front[self.num_blocks - stop : self.num_blocks - start][::-1]
        return self._back[start - self._back_start : stop - self._back_start]

    def _num_entries(self) -> int:
        return len(self._front) + len(self._back) - self._head

    def _set_head(self, head: int) -> None:
        # Cut the used part off once it is half of the list: O(1) amortised.
        if 2 * head > len(self._back):
            del self._back[:head]
            self._back_start += head
            head = 0
        self._head = head

    def _drop_stale_entries(self, stop: int) -> None:
        """Drop them before position ``stop``, from the one list that it belongs to.

        The live ones move up to ``stop``: entries after it stay where they are.
        """
        ref_cnt, positions = self._ref_cnt, self._position
        start = self._first_position(stop)
        many = stop - start >= self.num_blocks
        live = [
            block_id
            for block_id in (range(1, self.num_blocks) if many else set(self._entries(start, stop)))
            if ref_cnt[block_id] == 0 and start <= positions[block_id] < stop
        ]
        live.sort(key=positions.__getitem__)
        new_start = stop - len(live)
        self._renumber(live, start, stop, new_start)
        if stop <= self.num_blocks:
            self._front[self.num_blocks - stop :] = live[::-1]
        else:
            self._back[new_start - self._back_start : stop - self._back_start] = live
            self._set_head(new_start - self._back_start)

    def _renumber(self, block_ids: list[int], start: int, stop: int, new_start: int) -> None:
        """Give the live entries of a range new positions; walks in the range move along."""
        positions = self._position
        old_positions = [positions[block_id] for block_id in block_ids] if self._walks else []
        for position, block_id in enumerate(block_ids, new_start):
            positions[block_id] = position
        for walk in self._walks:
            walk.entries.clear()
            walk.num_stale = 0
            if start - 1 <= walk.position < stop:
                walk.position = new_start - 1 + bisect_right(old_positions, walk.position)
            if start <= walk.end <= stop:
                walk.end = new_start + bisect_left(old_positions, walk.end)

    # --- the prefix cache ---

    def cache_blocks(
        self,
        block_ids: Sequence[int],
        block_hashes: Sequence[bytes],
        *,
        block_size: int,
        group_idx: int = 0,
        parent_hash: bytes | None = None,
    ) -> None:
        """Register full blocks under the hashes of the KV that they hold.

        One hash a block, without group index; a block that has one already gets another
        (the first stays the primary). Block size and parent are for the event.

        Raises:
            UnknownBlockError: An id is no block of this pool.
            BlockNotHeldError: A block is free: nobody can have computed its KV.
            ValueError: Not one hash a block, or an impossible group index.
        """
        self.check_block_ids(block_ids)
        keys = make_offload_keys(block_hashes, group_idx)
        if len(block_ids) != len(keys):
            raise ValueError(f"{len(block_ids)} block_ids, {len(keys)} block_hashes")
        for block_id in block_ids:
            if self._ref_cnt[block_id] == 0 and block_id != NULL_BLOCK_ID:
                raise BlockNotHeldError(f"POOL-4: cannot cache block {block_id}: it is free")
        if not self.enable_caching:
            return
        stored = [
            get_offload_block_hash(key)
            for block_id, key in zip(block_ids, keys, strict=True)
            if block_id != NULL_BLOCK_ID and self._insert_hash(block_id, key)
        ]
        if self._events is not None and stored:
            self._events.append(BlockStored(stored, parent_hash, block_size, group_idx))

    def _insert_hash(self, block_id: int, key: OffloadKey) -> bool:
        if self._hash[block_id] is None:
            self._hash[block_id] = key
        elif key in self.block_keys([block_id])[0]:
            return False
        else:
            self._more_hashes.setdefault(block_id, []).append(key)
        holders = self._blocks_by_hash.get(key)
        if holders is None:
            self._blocks_by_hash[key] = block_id
        elif isinstance(holders, int):
            self._blocks_by_hash[key] = {holders: None, block_id: None}
        else:
            holders[block_id] = None
        return True

    def find_cached_block(self, key: OffloadKey) -> int | None:
        """The block that was first registered under this key (POOL-8), or None.

        Raises:
            NotAnOffloadKeyError: The bytes cannot be a key.
        """
        holders = self._blocks_by_hash.get(key)
        if holders is None:
            require_offload_key(key)
        return next(iter(holders)) if isinstance(holders, dict) else holders

    def find_leading_blocks(self, keys: Sequence[OffloadKey]) -> list[int]:
        """The blocks that hold these keys, up to the first key that none holds."""
        found = list(map(self._blocks_by_hash.get, keys))
        if set(map(type, found)) <= {int}:  # as a rule; a loop takes a quarter longer
            return cast("list[int]", found)
        if None in found:
            del found[found.index(None) :]
        return [next(iter(held)) if isinstance(held, dict) else cast("int", held) for held in found]

    def are_cached(self, keys: Iterable[OffloadKey]) -> Iterable[bool]:
        """Of each key, whether a block holds it; lazy."""
        return map(self._blocks_by_hash.__contains__, keys)

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """Keys of each block, primary first; none of one that holds nothing reusable."""
        keys, more = self.primary_keys(block_ids), self._more_hashes
        if not more:
            return [() if key is None else (key,) for key in keys]
        return [
            () if key is None else (key, *more.get(block_id, ()))
            for block_id, key in zip(block_ids, keys, strict=True)
        ]

    def primary_keys(self, block_ids: Sequence[int]) -> list[OffloadKey | None]:
        """The first key of each block, or None."""
        self.check_block_ids(block_ids)
        # In C: connectors ask for all that they wait for, every step.
        return list(map(self._hash.__getitem__, block_ids))

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Drop blocks from the prefix cache; references and queue stay as they are."""
        block_ids = list(block_ids)
        self.check_block_ids(block_ids)
        for block_id in block_ids:
            self._evict_hashes(block_id)

    def _evict_hashes(self, block_id: int) -> None:
        primary = self._hash[block_id]
        if primary is None:
            return
        self._hash[block_id] = None
        for key in (primary, *self._more_hashes.pop(block_id, ())):
            holders = self._blocks_by_hash[key]
            if isinstance(holders, int):
                del self._blocks_by_hash[key]
            else:
                del holders[block_id]
                if len(holders) == 1:
                    self._blocks_by_hash[key] = next(iter(holders))
            if self._events is not None:
                block_hash = get_offload_block_hash(key)
                self._events.append(BlockRemoved([block_hash], get_offload_group_idx(key)))

    def reset_prefix_cache(self) -> bool:
        """Forget every hash; refused with False while any block is in use (POOL-9)."""
        if self._num_free != self.num_blocks - 1:
            return False
        # Nothing is hashed now, so all of it goes to the front: no walk for hashes
        # has to pass it again.
        block_ids = self.free_block_ids()
        self._renumber(block_ids, self._front_start(), self._back_start + len(self._back), 1)
        self._front, self._back = block_ids[::-1], []
        self._back_start, self._head = self.num_blocks, 0
        self._is_hashed_in_front = False
        self._hash[:] = [None] * self.num_blocks  # in place: walks hold the list
        self._more_hashes.clear()
        self._blocks_by_hash.clear()
        if self._events is not None:
            self._events.append(AllBlocksCleared())
        self._notify_reuse(list(self._watchers))
        return True

    # --- notices of reuse ---

    def watch_reuse(
        self, block_ids: Iterable[int], owner: object, on_reuse: Callable[[int], None]
    ) -> None:
        """Tell an owner, once, when these blocks are handed out again (POOL-14)."""
        for block_id in block_ids:
            if block_id != NULL_BLOCK_ID:
                self._watchers.setdefault(block_id, {})[owner] = on_reuse

    def _notify_reuse(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            for on_reuse in self._watchers.pop(block_id, {}).values():
                try:
                    on_reuse(block_id)
                except Exception:
                    _logger.exception("POOL-14: on_reuse(%d) raised; the pool goes on", block_id)

    def forget_owner(self, owner: object) -> None:
        """Tell an owner nothing any more, and make its walks ask for the pool again."""
        for walk in self._walks:
            walk.entries.clear()
        for watchers in self._watchers.values():
            watchers.pop(owner, None)

    def take_events(self) -> list[GPUEvent]:
        """Events since the last call, in order."""
        return [] if self._events is None else self._events.take()

    def view(self, owner: str = "connector") -> BlockPoolView:
        """What a connector gets; errors and reports name the owner."""
        return BlockPoolView(self, owner)


class BlockPoolView(LedgerView):
    """The view of one owner over a :class:`BlockPool`.

    Keeps every law of :mod:`kvview.pool`, where its methods are described, and
    answers every optional query; the ledger checks ids and counts.
    """

    def __init__(self, pool: BlockPool, owner: str) -> None:
        ledger = ledger_of(pool, lambda: Ledger(list(range(pool.num_blocks)), NULL_BLOCK_ID))
        super().__init__(ledger, owner, pool.touch_blocks, pool.free_blocks)
        self.num_blocks = pool.num_blocks  # facts, which a closed view still tells
        self.null_block_id = NULL_BLOCK_ID
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
        return self._open_pool().ref_cnt(block_id) == 0 and block_id != NULL_BLOCK_ID

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
