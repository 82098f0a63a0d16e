"""A standalone block pool that satisfies the pool contract, and the view of one owner over it.

:mod:`kvview_reference.free_queue` describes its free queue.

Source: vLLM 0.33.0, ``vllm/v1/core/block_pool.py``; PR #39654.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

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
    get_offload_block_hash,
    get_offload_group_idx,
    require_offload_key,
)
from kvview.guard.ledger import Ledger, LedgerView, check_block_ids, ledger_of
from kvview.keys import make_offload_keys
from kvview_reference.events import EventLog
from kvview_reference.free_queue import NULL_BLOCK_ID, FreeQueue


class BlockPool:
    """Fixed-size GPU blocks, with their references, eviction order and prefix cache.

    1. Block 0 is the null block, which is never allocated; touch and free skip it.
    2. Freed blocks without a hash are reused before all others, the first block of a batch first.
       Freed blocks with a hash are reused last, in the order in which they were freed.
    3. Several blocks may have the same hash, and a block may have several hashes.
    4. A call that raises an exception has changed nothing.

    These methods are for the engine and check only the range of ids. A connector receives a
    :meth:`view`, which also checks types and counts the references of each owner.

    Args:
        num_blocks: Number of blocks of the pool, including the null block.
        enable_caching: Whether freed blocks keep their KV for the prefix cache.
        enable_events: Whether :meth:`take_events` reports stored and removed blocks.

    Raises:
        ConfigError: ``num_blocks`` is not an int of at least 2.
    """

    null_block_id = NULL_BLOCK_ID

    def __init__(
        self, num_blocks: int, *, enable_caching: bool = True, enable_events: bool = False
    ) -> None:
        if type(num_blocks) is not int or num_blocks < 2:
            raise ConfigError(f"num_blocks must be an int of at least 2, got {num_blocks!r}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._queue = FreeQueue(num_blocks)
        self._hash: list[OffloadKey | None] = [None] * num_blocks
        self._more_hashes: dict[int, list[OffloadKey]] = {}
        self.enable_caching = enable_caching
        self._block_by_hash: dict[OffloadKey, int] = {}  # the first that was registered
        self._more_blocks: dict[OffloadKey, dict[int, None]] = {}
        self._events: EventLog[GPUEvent] | None = EventLog() if enable_events else None

    # --- references and the free queue ---

    def ref_cnt(self, block_id: int) -> int:
        """Return the number of references of the engine and of all views to a block."""
        return self.ref_counts((block_id,))[0]

    def ref_counts(self, block_ids: Sequence[int]) -> list[int]:
        """Return the same number for each block."""
        self.check_block_ids(block_ids)
        return list(map(self._refs.__getitem__, block_ids))

    def num_free_blocks(self) -> int:
        """Return the number of blocks that can be allocated now, with or without a hash."""
        return len(self._queue)

    def free_block_ids(self) -> list[int]:
        """Return the whole free queue, next victim first."""
        return self._queue.block_ids()

    def allocate_blocks(self, num_blocks: int) -> list[int]:
        """Take one reference on each of the next victims, in order; their hashes are evicted.

        Raises:
            NoFreeBlocksError: Fewer than ``num_blocks`` blocks are free.
        """
        num_free = len(self._queue)
        if not 0 <= num_blocks <= num_free:
            raise NoFreeBlocksError(
                f"cannot allocate {num_blocks} blocks, because only {num_free} are free"
            )
        block_ids = self._queue.take(num_blocks)
        for block_id in block_ids:
            self._refs[block_id] = 1
        self._evict_hashes(block_ids)
        return block_ids

    def touch_blocks(self, block_ids: Iterable[int]) -> None:
        """Take one reference on a block for each occurrence of its id (POOL-1, 2, 3, 5).

        Raises:
            UnknownBlockError: An id does not name a block of this pool; no block was touched.
        """
        block_ids = list(block_ids)
        self.check_block_ids(block_ids)
        for block_id in filter(None, block_ids):
            if not self._refs[block_id]:
                self._queue.remove(block_id)
            self._refs[block_id] += 1

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Release one reference for each occurrence of an id; the first block is evicted first.

        Raises:
            UnknownBlockError: An id does not name a block of this pool.
            BlockNotHeldError: A block has fewer references than occurrences; no block was freed.
        """
        block_ids = list(block_ids)
        self.check_block_ids(block_ids)
        named = list(filter(None, block_ids))
        refs, unhashed = self._refs, list[int]()
        for block_id, times in Counter(named).items():
            if times > refs[block_id]:
                raise BlockNotHeldError(
                    f"POOL-4: block {block_id} is freed more often than it was touched"
                )
        for block_id in named:
            refs[block_id] -= 1
            if not refs[block_id]:
                if self._hash[block_id] is None:
                    unhashed.append(block_id)
                else:
                    self._queue.add_to_tail(block_id)
        for block_id in reversed(unhashed):
            self._queue.add_to_head(block_id)

    def move_to_head(self, block_ids: Iterable[int]) -> None:
        """Make those of these blocks that are free the next victims, in the given order."""
        for block_id in dict.fromkeys(reversed(list(block_ids))):
            if self._is_free(block_id):
                self._queue.remove(block_id)
                self._queue.add_to_head(block_id, is_hashed=self._hash[block_id] is not None)

    def _is_free(self, block_id: int) -> bool:
        return block_id != NULL_BLOCK_ID and not self._refs[block_id]

    def check_block_ids(self, block_ids: Iterable[object]) -> None:
        """Raise ``UnknownBlockError`` unless each id is an int that names a block (POOL-4)."""
        check_block_ids(block_ids, self.num_blocks)

    def iter_free_block_ids(self, check_open: Callable[[], object] = lambda: None) -> Iterator[int]:
        """Walk the whole free queue lazily, next victim first (POOL-7)."""
        return self._queue.walk(check_open)

    def iter_free_block_ids_with_hash(
        self, check_open: Callable[[], object] = lambda: None
    ) -> Iterator[tuple[int, OffloadKey]]:
        """Walk the free blocks with keys, next victim first (POOL-5 to POOL-8)."""
        queue, hashes = self._queue, self._hash
        for block_id in queue.walk(check_open, from_hashed=True):
            if (key := hashes[block_id]) is None:
                continue
            joined, others = queue.joined(block_id), tuple(self._more_hashes.get(block_id, ()))
            yield block_id, key
            for other in others:
                check_open()
                if not self._is_free(block_id) or queue.joined(block_id) != joined:
                    break  # taken since, and perhaps freed again
                if hashes[block_id] is None:
                    break
                yield block_id, other

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
        """Register full blocks under the hashes of their KV.

        Each block receives one hash, without a group index. A block that already has a hash
        receives a further hash, and its first hash stays the primary hash. The event contains the
        block size and the parent.

        Raises:
            UnknownBlockError: An id does not name a block of this pool.
            BlockNotHeldError: A block is free, so no request can have computed its KV.
            ValueError: The numbers of blocks and hashes differ, or the group index is invalid.
        """
        hashes, block_by_hash = self._hash, self._block_by_hash
        self.check_block_ids(block_ids)
        keys = make_offload_keys(block_hashes, group_idx)
        if len(block_ids) != len(keys):
            raise ValueError(
                f"expected one hash per block, got {len(block_ids)} block_ids and {len(keys)} "
                f"block_hashes"
            )
        for block_id in block_ids:
            if self._is_free(block_id):
                raise BlockNotHeldError(f"POOL-4: cannot cache block {block_id}: it is free")
        if not self.enable_caching:
            return
        stored: list[OffloadKey] = []
        for block_id, key in zip(block_ids, keys):  # noqa: B905
            if hashes[block_id] is None and key not in block_by_hash and block_id:  # usual case
                hashes[block_id] = key
                block_by_hash[key] = block_id
            elif not self._add_hash(block_id, key):
                continue
            stored.append(key)
        if self._events is not None and stored:
            new = list(map(get_offload_block_hash, stored))
            self._events.append(BlockStored(new, parent_hash, block_size, group_idx))

    def _add_hash(self, block_id: int, key: OffloadKey) -> bool:
        """Register a hash of a block, besides any other hashes, and return whether it was new."""
        if block_id == NULL_BLOCK_ID or key in self.block_keys([block_id])[0]:
            return False
        if self._hash[block_id] is None:
            self._hash[block_id] = key
        else:
            self._more_hashes.setdefault(block_id, []).append(key)
        if self._block_by_hash.setdefault(key, block_id) != block_id:
            self._more_blocks.setdefault(key, {})[block_id] = None
        return True

    def find_cached_block(self, key: OffloadKey) -> int | None:
        """Return the block that was first registered under this key (POOL-8), or None.

        Raises:
            NotAnOffloadKeyError: The bytes cannot be a key.
        """
        block_id = self._block_by_hash.get(key)
        if block_id is None:
            require_offload_key(key)
        return block_id

    def find_leading_blocks(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Return the blocks that hold these keys, up to the first key without a block."""
        found = list(map(self._block_by_hash.get, keys))
        if not all(found):  # 0 is never found
            del found[found.index(None) :]
        return cast("list[int]", found)

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """Return the keys of each block, primary first."""
        keys, more = self.primary_keys(block_ids), self._more_hashes
        if not more:
            return [() if key is None else (key,) for key in keys]
        return [
            () if key is None else (key, *more.get(block_id, ()))
            for block_id, key in zip(block_ids, keys, strict=True)
        ]

    def primary_keys(self, block_ids: Sequence[int]) -> list[OffloadKey | None]:
        """Return the first key of each block, or None."""
        self.check_block_ids(block_ids)
        # In C, because connectors query many blocks in every step.
        return list(map(self._hash.__getitem__, block_ids))

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Drop blocks from the prefix cache; references and the queue do not change."""
        block_ids = list(block_ids)
        self.check_block_ids(block_ids)
        self._evict_hashes(block_ids)

    def _evict_hashes(self, block_ids: Iterable[int]) -> None:
        """Drop the hashes of these blocks; references and the queue do not change."""
        hashes, block_by_hash = self._hash, self._block_by_hash
        is_plain = not self._more_hashes and not self._more_blocks and self._events is None
        for block_id in block_ids:
            key = hashes[block_id]
            if key is not None:
                hashes[block_id] = None
                if is_plain:
                    del block_by_hash[key]
                else:
                    for one_key in (key, *self._more_hashes.pop(block_id, ())):
                        self._drop_hash(block_id, one_key)

    def _drop_hash(self, block_id: int, key: OffloadKey) -> None:
        others = self._more_blocks.get(key, {})
        if self._block_by_hash[key] != block_id:
            del others[block_id]
        elif others:
            self._block_by_hash[key] = following = next(iter(others))
            del others[following]
        else:
            del self._block_by_hash[key]
        if not others:
            self._more_blocks.pop(key, None)
        if self._events is not None:
            block_hash = get_offload_block_hash(key)
            self._events.append(BlockRemoved([block_hash], get_offload_group_idx(key)))

    def reset_prefix_cache(self) -> bool:
        """Drop every hash; while a block is in use, change nothing and return False (POOL-9)."""
        if len(self._queue) != self.num_blocks - 1:
            return False
        self._queue.forget_hashes()
        self._hash[:] = [None] * self.num_blocks  # in place, because walks have this list
        self._more_hashes.clear()
        self._block_by_hash.clear()
        self._more_blocks.clear()
        if self._events is not None:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[GPUEvent]:
        """Return the events since the last call, in order."""
        return [] if self._events is None else self._events.take()

    def view(self, owner: str = "connector") -> BlockPoolView:
        """Make the view of a connector; errors and reports name the owner."""
        return BlockPoolView(self, owner)


class BlockPoolView(LedgerView):
    """The view of one owner over a :class:`BlockPool`.

    The class has every optional query; :mod:`kvview.pool` documents the methods. The ledger
    checks ids and counts references.
    """

    def __init__(self, pool: BlockPool, owner: str) -> None:
        ledger = ledger_of(pool, lambda: Ledger(list(range(pool.num_blocks)), pool.null_block_id))
        super().__init__(ledger, owner, pool.touch_blocks, pool.free_blocks)
        self.num_blocks = pool.num_blocks  # constants, which a closed view still has
        self.null_block_id = pool.null_block_id
        self._pool = pool

    def _open_pool(self) -> BlockPool:
        self.check_open()
        return self._pool

    def give_back_blocks(self, block_ids: Sequence[int]) -> None:
        """Release blocks like ``free_blocks``, but to the head of the queue (POOL-12)."""
        pool = self._open_pool()

        def move(block_ids: Sequence[int]) -> None:
            pool.free_blocks(block_ids)
            pool.move_to_head(block_ids)

        self.free_with(move, block_ids)

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        """Walk the free blocks with keys, next victim first."""
        return self._pool.iter_free_block_ids_with_hash(self.check_open)

    def iter_free_block_ids(self) -> Iterator[int]:
        """Walk all free blocks lazily, hashed or not, next victim first (POOL-6)."""
        return self._pool.iter_free_block_ids(self.check_open)

    def num_free_blocks(self) -> int:
        """Return the number of blocks that could be allocated now, hashed or not."""
        return self._open_pool().num_free_blocks()

    def is_free(self, block_id: int) -> bool:
        """Return whether the block is free now; False for the null block."""
        return self._open_pool().ref_cnt(block_id) == 0 and block_id != self.null_block_id

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """Return the keys of each block."""
        return self._open_pool().block_keys(block_ids)

    def primary_keys(self, block_ids: Sequence[int]) -> list[OffloadKey | None]:
        """Return the first key of each block, or None."""
        return self._open_pool().primary_keys(block_ids)

    def find_cached_block(self, key: OffloadKey) -> int | None:
        """Return the id of a block that holds this key (POOL-8), free or in use, or None."""
        return self._open_pool().find_cached_block(key)


if TYPE_CHECKING:
    _: type[GPUBlockPoolView] = BlockPoolView
