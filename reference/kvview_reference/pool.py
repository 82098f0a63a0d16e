"""A standalone block pool that keeps the pool contract, and the view over it.

How the free queue is kept, and why: every other structure that was measured
(``benchmarks/pool.py``) was slower or larger than these plain lists of ints.

- ``_ref_cnt[b]`` counts references. A block is free exactly when it is 0.
- Unhashed free blocks lie on the stack ``_front`` (the next victim is its last
  item), hashed ones in the list ``_back`` from ``_head`` on. Victims are taken
  from the front stack first: that is vLLM's one queue with both its ends.
- Touching only counts; it leaves the entry where it is, and the entry is *stale*
  from then on. An entry of ``_back`` is live when its block is free and
  ``_slot[b]`` is its position; one of ``_front`` when its block is free,
  ``_slot[b]`` is ``_IN_FRONT`` and no entry above it names the same block
  (which, taken from the top, cannot be). Stale entries are dropped when they
  are reached, and all at once when they outnumber the blocks.

Source: vLLM 0.33.0, ``vllm/v1/core/block_pool.py`` and ``FreeKVCacheBlockQueue``
in ``vllm/v1/core/kv_cache_utils.py`` (the eviction order); PR #39654.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, islice
from typing import TYPE_CHECKING
from weakref import WeakSet

from kvview import (
    AllBlocksCleared,
    BlockNotHeldError,
    BlockRemoved,
    BlockStored,
    ConfigError,
    GPUBlockPoolView,
    GPUEvent,
    NoFreeBlocksError,
    OffloadKey,
    UnknownBlockError,
    ViewClosedError,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

NULL_BLOCK_ID = 0
_IN_FRONT = -1
_INT_ONLY = {int}
_MAX_STALE_SHARE = 2  # stale entries per block before they are dropped
_STALE_SKIPS_PER_TIDY = 1024


class BlockPool:
    """Fixed-size GPU blocks: allocation, references, eviction order, prefix cache.

    1. Block 0 is the null block: never allocated, ignored by touch and free.
    2. Freed blocks without a hash are reused first, the first of a batch first;
       freed blocks with a hash are reused last, in the order freed.
    3. A hash may name several blocks, a block may have several hashes.
    4. A call that raises has changed nothing.

    These are the engine's moves. A connector gets :meth:`view`.

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
            raise ConfigError(
                f"num_blocks must be an int of at least 2 (block 0 is the null block), "
                f"got {num_blocks!r}"
            )
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self._ref_cnt = [0] * num_blocks
        self._slot = [_IN_FRONT] * num_blocks
        self._front = list(range(num_blocks - 1, 0, -1))
        self._back: list[int] = []
        self._head = 0  # index into _back of the next victim
        self._dropped = 0  # position of _back[0]: entries ever cut off before it
        self._layout = 0  # changes when entries of _back move
        self._num_free = num_blocks - 1
        self._hash: list[OffloadKey | None] = [None] * num_blocks
        self._more_hashes: dict[int, list[OffloadKey]] = {}
        self._blocks_by_hash: dict[OffloadKey, int | dict[int, None]] = {}
        self._walks: WeakSet[_Walk] = WeakSet()
        self._events: list[GPUEvent] | None = [] if enable_events else None

    # --- references and the free queue ---

    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, hashed or not."""
        return self._num_free

    def ref_cnt(self, block_id: int) -> int:
        """References on a block, the engine's and every view's.

        Raises:
            UnknownBlockError: The id is no block of this pool.
        """
        self.check_block_ids((block_id,))
        return self._ref_cnt[block_id]

    def allocate_blocks(self, num_blocks: int) -> list[int]:
        """Take the next victims, with one reference each; their hashes are evicted.

        Args:
            num_blocks: How many.

        Returns:
            Block ids in the order in which they stood in the free queue.

        Raises:
            NoFreeBlocksError: Fewer are free.
        """
        if num_blocks > self._num_free or num_blocks < 0:
            raise NoFreeBlocksError(
                f"cannot allocate {num_blocks} blocks: {self._num_free} of "
                f"{self.num_blocks - 1} are free"
            )
        front, ref_cnt = self._front, self._ref_cnt
        if len(front) >= num_blocks and self._num_entries() == self._num_free:
            block_ids = front[: -num_blocks - 1 : -1]
            del front[len(front) - num_blocks :]
            for block_id in block_ids:
                ref_cnt[block_id] = 1
        else:
            block_ids = self._pop_live_entries(num_blocks)
        self._num_free -= num_blocks
        return block_ids

    def _pop_live_entries(self, num_blocks: int) -> list[int]:
        ref_cnt, slot, front, back = self._ref_cnt, self._slot, self._front, self._back
        block_ids: list[int] = []
        missing = num_blocks
        while missing and front:
            block_id = front.pop()
            if ref_cnt[block_id] == 0 and slot[block_id] == _IN_FRONT:
                ref_cnt[block_id] = 1
                block_ids.append(block_id)
                missing -= 1
        head = self._head
        while missing:
            block_id = back[head]
            if ref_cnt[block_id] == 0 and slot[block_id] == self._dropped + head:
                ref_cnt[block_id] = 1
                block_ids.append(block_id)
                missing -= 1
                if self._hash[block_id] is not None:
                    self._evict_hashes(block_id)
            head += 1
        self._advance_head(head)
        return block_ids

    def touch_blocks(self, block_ids: Sequence[int]) -> None:
        """Take one reference a block named; free ones leave the queue (POOL-1 to 5)."""
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
        except (IndexError, TypeError):
            self._add_references(block_ids, remaining, -1)
            self.check_block_ids(block_ids)
            raise
        self._num_free -= len(block_ids) - num_not_free
        if self._num_entries() - self._num_free > _MAX_STALE_SHARE * self.num_blocks:
            self._tidy()

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Give one reference back a block named; the first is evicted first.

        Raises:
            UnknownBlockError: An id is no block of this pool.
            BlockNotHeldError: More frees than references; nothing was freed.
        """
        ref_cnt, hashes, slot = self._ref_cnt, self._hash, self._slot
        unhashed: list[int] = []
        hashed: list[int] = []
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
                            hashed.append(block_id)
                    elif count:
                        ref_cnt[block_id] = count - 1
                    else:
                        raise BlockNotHeldError(_not_held_message(block_id, block_ids))
                elif block_id != NULL_BLOCK_ID:
                    raise IndexError
        except (IndexError, TypeError, BlockNotHeldError):
            self._add_references(block_ids, remaining, 1)
            self.check_block_ids(block_ids)
            raise
        if unhashed:
            unhashed.reverse()
            for block_id in unhashed:
                slot[block_id] = _IN_FRONT
            self._front += unhashed
        if hashed:
            position = self._dropped + len(self._back)
            for block_id in hashed:
                slot[block_id] = position
                position += 1
            self._back += hashed
        self._num_free += len(unhashed) + len(hashed)

    def _add_references(
        self, block_ids: Sequence[int], remaining: Iterator[int], change: int
    ) -> None:
        """Undo a loop over ``block_ids`` that failed at the item before ``remaining``."""
        num_done = len(block_ids) - len(list(remaining)) - 1
        for block_id in block_ids[:num_done]:
            if block_id != NULL_BLOCK_ID:
                self._ref_cnt[block_id] += change

    def check_block_ids(self, block_ids: Iterable[object]) -> None:
        """Raise unless every id names a block of this pool (POOL-4).

        Raises:
            UnknownBlockError: An id is not a plain int, or out of range.
        """
        for block_id in block_ids:
            if type(block_id) is not int or not 0 <= block_id < self.num_blocks:
                raise UnknownBlockError(
                    f"POOL-4: {block_id!r} ({type(block_id).__name__}) is no block of this pool; "
                    f"block ids are ints from 0 to {self.num_blocks - 1}"
                )

    def iter_free_block_ids(self) -> Iterator[int]:
        """The free queue, next victim first; the pool must not change meanwhile."""
        if self._num_entries() == self._num_free:  # nothing stale
            yield from reversed(self._front)
            yield from islice(self._back, self._head, None)
            return
        yield from self._live_in_front()
        yield from compress(self._back[self._head :], self._is_live_in_back())

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        """Free blocks that hold reusable KV, next victim first (POOL-5 to POOL-8)."""
        ref_cnt, slot, hashes, more_hashes = (
            self._ref_cnt,
            self._slot,
            self._hash,
            self._more_hashes,
        )
        walk = _Walk(self._dropped + self._head, self._dropped + len(self._back))
        self._walks.add(walk)
        num_skipped = 0
        moved = True
        while moved:
            moved, layout = False, self._layout
            back, dropped = self._back, self._dropped
            for position in range(max(walk.position, dropped + self._head), walk.end):
                block_id = back[position - dropped]
                if ref_cnt[block_id] == 0 and slot[block_id] == position:
                    key = hashes[block_id]
                    if key is None:
                        continue
                    walk.position = position + 1
                    yield block_id, key
                    if block_id in more_hashes:
                        for key in tuple(more_hashes[block_id]):
                            if ref_cnt[block_id] == 0 and key in more_hashes.get(block_id, ()):
                                yield block_id, key
                elif position == dropped + self._head:
                    self._head += 1
                else:
                    num_skipped += 1
                    if num_skipped % _STALE_SKIPS_PER_TIDY == 0:
                        # Later walks must not pay again for stale entries that
                        # lie between victims.
                        walk.position = position + 1
                        self._tidy()
                if self._layout != layout:
                    moved = True
                    break

    def _num_entries(self) -> int:
        return len(self._front) + len(self._back) - self._head

    def _advance_head(self, head: int) -> None:
        # Cut the consumed part off once it is half of the list: O(1) amortised.
        if 2 * head > len(self._back):
            del self._back[:head]
            self._dropped += head
            self._layout += 1
            head = 0
        self._head = head

    def _tidy(self) -> None:
        """Drop every stale entry, and tell the walks where they stand now."""
        self._front = list(self._live_in_front())
        self._front.reverse()
        is_live = self._is_live_in_back()
        first = self._dropped + self._head
        self._back = list(compress(self._back[self._head :], is_live))
        # New positions follow all old ones, so that none is ever used twice.
        self._dropped = first + len(is_live)
        self._head = 0
        self._layout += 1
        for position, block_id in enumerate(self._back, self._dropped):
            self._slot[block_id] = position
        for walk in self._walks:
            walk.position = self._dropped + sum(is_live[: max(0, walk.position - first)])
            walk.end = self._dropped + sum(is_live[: max(0, walk.end - first)])

    def _live_in_front(self) -> Iterator[int]:
        # Above a stale entry of a free block lies its live one: the first from the top counts.
        ref_cnt, slot = self._ref_cnt, self._slot
        for block_id in dict.fromkeys(reversed(self._front)):
            if ref_cnt[block_id] == 0 and slot[block_id] == _IN_FRONT:
                yield block_id

    def _is_live_in_back(self) -> list[bool]:
        ref_cnt, slot = self._ref_cnt, self._slot
        entries = enumerate(islice(self._back, self._head, None), self._dropped + self._head)
        return [ref_cnt[b] == 0 and slot[b] == position for position, b in entries]

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

        A block that has a hash already gets another one (the first stays the
        primary). The null block is skipped.

        Args:
            block_ids: Blocks in use, in prefix order.
            block_hashes: One hash a block, without group index.
            block_size: Tokens in a block, for the event.
            group_idx: KV-cache group of the blocks.
            parent_hash: Hash of the block before the first, for the event.

        Raises:
            UnknownBlockError: An id is no block of this pool.
            BlockNotHeldError: A block is free: nobody can have computed its KV.
        """
        self.check_block_ids(block_ids)
        if len(block_ids) != len(block_hashes):
            raise ValueError(f"{len(block_ids)} block_ids, {len(block_hashes)} block_hashes")
        pairs = [
            (block_id, block_hash)
            for block_id, block_hash in zip(block_ids, block_hashes, strict=True)
            if block_id != NULL_BLOCK_ID
        ]
        for block_id, _ in pairs:
            if self._ref_cnt[block_id] == 0:
                raise BlockNotHeldError(
                    f"cannot cache block {block_id}: it is free, so its KV is nobody's"
                )
        if not self.enable_caching or not pairs:
            return
        stored = [
            block_hash
            for block_id, block_hash in pairs
            if self._insert_hash(block_id, make_offload_key(block_hash, group_idx))
        ]
        if self._events is not None and stored:
            self._events.append(BlockStored(stored, parent_hash, block_size, group_idx))

    def _insert_hash(self, block_id: int, key: OffloadKey) -> bool:
        primary = self._hash[block_id]
        if primary is None:
            self._hash[block_id] = key
        else:
            others = self._more_hashes.get(block_id)
            if key == primary or (others is not None and key in others):
                return False
            self._more_hashes.setdefault(block_id, []).append(key)
        holders = self._blocks_by_hash.get(key)
        if holders is None:
            self._blocks_by_hash[key] = block_id
        elif isinstance(holders, int):
            self._blocks_by_hash[key] = {holders: None, block_id: None}
        else:
            holders[block_id] = None
        return True

    def find_cached_block(self, key: bytes) -> int | None:
        """The block that was first registered under this hash (POOL-8), or None."""
        holders = self._blocks_by_hash.get(OffloadKey(key))
        return next(iter(holders)) if isinstance(holders, dict) else holders

    def block_hashes(self, block_id: int) -> tuple[OffloadKey, ...]:
        """Hashes of a block, primary first; empty when it holds nothing reusable."""
        self.check_block_ids((block_id,))
        primary = self._hash[block_id]
        return () if primary is None else (primary, *self._more_hashes.get(block_id, ()))

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Drop blocks from the prefix cache; references and queue stay as they are.

        Raises:
            UnknownBlockError: An id is no block of this pool; nothing was evicted.
        """
        block_ids = list(block_ids)
        self.check_block_ids(block_ids)
        for block_id in block_ids:
            self._evict_hashes(block_id)

    def _evict_hashes(self, block_id: int) -> None:
        for key in self.block_hashes(block_id):
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
        self._hash[block_id] = None
        self._more_hashes.pop(block_id, None)

    def reset_prefix_cache(self) -> bool:
        """Forget every hash; refused with False while any block is in use (POOL-9)."""
        if self._num_free != self.num_blocks - 1:
            return False
        self._hash[:] = [None] * self.num_blocks  # in place: walks hold the list
        self._more_hashes.clear()
        self._blocks_by_hash.clear()
        if self._events is not None:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[GPUEvent]:
        """Events since the last call, in order."""
        if self._events is None:
            return []
        events, self._events = self._events, []
        return events

    def view(self, owner: str = "connector") -> BlockPoolView:
        """What a connector gets of this pool.

        Args:
            owner: Named in errors and reports.
        """
        return BlockPoolView(self, owner)


class _Walk:
    """Where a walk over ``_back`` stands; the pool moves it along when it tidies."""

    def __init__(self, position: int, end: int) -> None:
        self.position = position
        self.end = end


class BlockPoolView:
    """The view of one owner over a :class:`BlockPool`, with a ledger of its holds.

    Keeps every law of :mod:`kvview.pool` and every optional query.

    Args:
        pool: The pool to look at.
        owner: Named in errors and reports.
    """

    def __init__(self, pool: BlockPool, owner: str) -> None:
        self.owner = owner
        self._pool: BlockPool | None = pool
        self._held: Counter[int] = Counter()

    def _open_pool(self) -> BlockPool:
        if self._pool is None:
            raise ViewClosedError(
                f"POOL-10: the view of {self.owner!r} was closed; ask the engine for a new one"
            )
        return self._pool

    def touch_blocks(self, block_ids: Sequence[int], /) -> None:
        """Take one reference on each block named, once per occurrence."""
        pool = self._open_pool()
        if not set(map(type, block_ids)) <= _INT_ONLY:
            pool.check_block_ids(block_ids)
        pool.touch_blocks(block_ids)
        self._held.update(block_ids)
        self._held.pop(NULL_BLOCK_ID, None)

    def free_blocks(self, block_ids: Sequence[int], /) -> None:
        """Give back one reference on each block named, once per occurrence."""
        pool = self._open_pool()
        if not set(map(type, block_ids)) <= _INT_ONLY:
            pool.check_block_ids(block_ids)
        held = self._held
        for number, block_id in enumerate(block_ids):
            if count := held.get(block_id):
                if count == 1:
                    del held[block_id]
                else:
                    held[block_id] = count - 1
            elif block_id != NULL_BLOCK_ID:
                held.update(b for b in block_ids[:number] if b != NULL_BLOCK_ID)
                raise BlockNotHeldError(
                    f"{_not_held_message(block_id, block_ids)} through the view of {self.owner!r}"
                )
        pool.free_blocks(block_ids)

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, bytes]]:
        """Walk the free blocks that still hold reusable KV, next victim first."""
        for item in self._open_pool().iter_free_block_ids_with_hash():
            yield item
            self._open_pool()

    def iter_free_block_ids(self) -> Iterator[int]:
        """All free blocks, next victim first."""
        return self._open_pool().iter_free_block_ids()

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self._open_pool().num_blocks

    @property
    def null_block_id(self) -> int:
        """Id of the placeholder block that is never allocated."""
        self._open_pool()
        return NULL_BLOCK_ID

    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now."""
        return self._open_pool().num_free_blocks()

    def is_free(self, block_id: int, /) -> bool:
        """Whether the block is free now."""
        return block_id != NULL_BLOCK_ID and self._open_pool().ref_cnt(block_id) == 0

    def block_hashes(self, block_id: int, /) -> tuple[bytes, ...]:
        """Hashes registered for the block, primary first."""
        return self._open_pool().block_hashes(block_id)

    def find_cached_block(self, block_hash: bytes, /) -> int | None:
        """Id of a block that holds this hash, or None."""
        return self._open_pool().find_cached_block(block_hash)

    def held_blocks(self) -> Mapping[int, int]:
        """References held through this view, ``{block_id: count}``."""
        self._open_pool()
        return dict(self._held)

    def close(self) -> Mapping[int, int]:
        """Close the view and report what it still held."""
        still_held = dict(self._held)
        self._held.clear()
        self._pool = None
        return still_held


def _not_held_message(block_id: int, block_ids: Sequence[int]) -> str:
    return (
        f"POOL-4: block {block_id} is freed {list(block_ids).count(block_id)}x in this call, "
        f"more often than it is held"
    )


if TYPE_CHECKING:
    _: type[GPUBlockPoolView] = BlockPoolView
