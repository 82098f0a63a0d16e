"""The view over a real vLLM ``BlockPool``, the same for every release.

How the laws of :mod:`kvview.pool` are kept over a pool that checks nothing:

1. The pool's ledger (:mod:`kvview.guard.ledger`) checks ids, counts the view's own
   references and looks blocks up in the list taken at bind; a ``KVCacheBlock`` goes
   nowhere else and nothing of it is ever written (POOL-3, POOL-4).
2. The null block is never passed on: older releases count references on it.
3. A block that leaves the free queue loses its links, so a walk reads some blocks
   ahead and checks each again when it yields it (:class:`_Walk`).

Source: ``vllm/v1/core/block_pool.py`` and ``FreeKVCacheBlockQueue`` in
``vllm/v1/core/kv_cache_utils.py``; :mod:`kvview_vllm.releases` says what differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvview import (
    GPUBlockPoolView,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    require_offload_key,
)
from kvview.guard.ledger import Ledger, LedgerView, check_block_ids, ledger_of
from kvview_vllm.releases import PoolSeam, probe_pool

NULL_BLOCK_ID = 0
_FIRST_CHUNK = 16
_LARGEST_CHUNK = 1024


def view(block_pool: Any, *, owner: str = "connector") -> VLLMBlockPoolView:
    """A view over a real ``vllm.v1.core.block_pool.BlockPool``.

    Args:
        block_pool: The scheduler's pool, of any tested release.
        owner: Named in errors and reports.

    Raises:
        UnsupportedEngineError: The pool has a shape that no tested release has.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    release = probe_pool(block_pool)
    kind = _PrependingView if release.free_prepend else VLLMBlockPoolView
    return kind(block_pool, release, owner)


class VLLMBlockPoolView(LedgerView):
    """The view of one owner over a real pool, with a ledger of its holds.

    1. Keeps every law of :mod:`kvview.pool` and every optional query.
    2. Views of several owners may be open at once; each counts its own.
    3. Use it on the scheduler's thread only.

    Args:
        block_pool: The pool, as :func:`probe_pool` recognised it.
        release: What :func:`probe_pool` returned for it.
        owner: Named in errors and reports.
    """

    def __init__(self, block_pool: Any, release: PoolSeam, owner: str) -> None:
        touch = block_pool.touch
        if release.touch_nested:
            # Up to 0.13 touch takes one list per KV-cache group.
            touch = lambda blocks: block_pool.touch((blocks,))  # noqa: E731
        ledger = ledger_of(block_pool, lambda: Ledger(block_pool.blocks, NULL_BLOCK_ID))
        super().__init__(ledger, owner, touch, block_pool.free_blocks)
        self.release = release
        self.num_blocks = len(block_pool.blocks)  # facts, which a closed view still tells
        self.null_block_id = NULL_BLOCK_ID
        self._pool: Any = block_pool
        self._blocks: list[Any] = block_pool.blocks
        self._walks: list[_Walk] = []

    def _open_pool(self) -> Any:
        self.check_open()
        return self._pool

    # --- walks over the free queue ---

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        """Walk the free blocks that still hold reusable KV, next victim first.

        Unhashed blocks in front of a hashed one are passed over, so the first
        item costs what stands before it. What the engine itself takes *and* gives
        back between two items cannot be told from what stayed where it was: such
        a block may still be yielded, if what is yielded is true then.
        """
        for block in self._walk(hashed_only=True):
            block_id: int = block.block_id
            if (primary := block.block_hash) is not None:
                yield block_id, primary
                self._open_pool()
                for block_hash in self._more_keys(block_id):
                    if _is_queued(block) and block_hash in self._more_keys(block_id):
                        yield block_id, block_hash
                        self._open_pool()

    def iter_free_block_ids(self) -> Iterator[int]:
        """All free blocks, next victim first."""
        for block in self._walk(hashed_only=False):
            yield block.block_id
            self._open_pool()

    def _walk(self, *, hashed_only: bool) -> Iterator[Any]:
        walk = _Walk(self._open_pool().free_block_queue, self.release, hashed_only)
        self.before_touch.append(walk.before_touch)
        self._walks.append(walk)
        try:
            yield from walk.blocks()
        finally:
            self.before_touch.remove(walk.before_touch)
            self._walks.remove(walk)

    # --- queries ---

    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now."""
        return int(self._open_pool().get_num_free_blocks())

    def is_free(self, block_id: int) -> bool:
        """Whether the block is free now."""
        self._open_pool()
        check_block_ids((block_id,), self.num_blocks)
        return _is_queued(self._blocks[block_id])

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """The keys registered for each block, primary first."""
        self._open_pool()
        check_block_ids(block_ids, self.num_blocks)
        blocks = self._blocks
        return [
            ()
            if (key := blocks[block_id].block_hash) is None
            else (key, *self._more_keys(block_id))
            for block_id in block_ids
        ]

    def _more_keys(self, block_id: int) -> list[OffloadKey]:
        """Hashes beside the primary one, in one order whatever the process."""
        if not self.release.several_hashes:  # before 0.24, PR #45939
            return []
        return sorted(self._pool.cached_block_hashes_by_block.get(block_id, ()))

    def find_cached_block(self, key: OffloadKey) -> int | None:
        """Id of a block that holds this key, or None."""
        key = require_offload_key(key)
        # The map behind get_cached_block is replaced at every cache reset.
        found = self._open_pool().get_cached_block(
            get_offload_block_hash(key), [get_offload_group_idx(key)]
        )
        return int(found[0].block_id) if found else None


class _PrependingView(VLLMBlockPoolView):
    """The view of 0.23.0, the one release that can give back to the head (PR #42656).

    Before it everything freed goes to the tail, after it all that is hashed: to the head
    goes only what has lost its KV.
    """

    def give_back_blocks(self, block_ids: Sequence[int]) -> None:
        """Give back as ``free_blocks`` does, to the head of the queue (POOL-12)."""
        block_ids = list(block_ids)
        self.free_with(
            lambda blocks: self._open_pool().free_blocks(blocks, prepend=True), block_ids
        )
        for walk in self._walks:
            walk.pass_over(block_ids)


class _Walk:
    """One walk over the real free queue, in chunks read ahead.

    1. A chunk doubles in size: taking k blocks reads at most about 2k of them.
    2. What leaves the queue loses its links, and what joins it stands in front of
       the cursor or behind ``_last``; both move out of the way of the view's own
       touches (:meth:`before_touch`).
    3. If the engine took the block under the cursor, the walk finds its place from
       the front, passing over what it has seen: nothing is yielded twice.
    4. If fewer blocks were seen than were free at the start, a last pass looks for
       hashed ones that were missed.
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
        """Blocks that are free when they are yielded, next victim first."""
        size = _FIRST_CHUNK
        while chunk := self._read(size):
            for block in chunk:
                if _is_queued(block) and block.block_id not in self._gone:
                    yield block
            size = min(2 * size, _LARGEST_CHUNK)

    def before_touch(self, blocks: Iterable[Any]) -> None:
        """Step aside before the view takes these blocks out of the queue."""
        leaving = {block.block_id for block in blocks if _is_queued(block)}
        while self._cursor.block_id in leaving:
            self._cursor = self._cursor.next_free_block
        while self._last.block_id in leaving:
            self._last = self._last.prev_free_block
        self._unseen -= len(leaving - self._gone - self._seen)
        self._gone.update(block.block_id for block in blocks)

    def pass_over(self, block_ids: Iterable[int]) -> None:
        """Leave out what joined in front after the walk began."""
        self._gone.update(block_ids)

    def _read(self, size: int) -> list[Any]:
        """The next blocks of the queue, at most ``size``; none at the end."""
        seen, gone, tail, last = self._seen, self._gone, self._tail, self._last
        num_seen = len(seen)
        chunk: list[Any] = []
        block = self._place()
        while len(chunk) < size:
            if block is tail:
                if self._rescanned or self._unseen <= len(seen) - num_seen:
                    break
                self._rescanned = True
                # From 0.24 unhashed blocks join in front (PR #42656): the last pass
                # could not tell them from missed ones.
                self._hashed_only = self._hashed_only or self._joins_in_front
                block = self._head.next_free_block
                continue
            block_id = block.block_id
            if block_id not in seen and block_id not in gone:
                if not self._hashed_only or block.block_hash is not None:
                    chunk.append(block)
                seen.add(block_id)
            block = tail if block is last else block.next_free_block
        self._unseen -= len(seen) - num_seen
        self._cursor = block
        return chunk

    def _place(self) -> Any:
        """Where to read on: the cursor if it kept its place, else the front."""
        block, last = self._cursor, self._last
        if not self._rescanned and (
            last is self._head or (last.block_id in self._seen and _is_queued(last))
        ):
            return self._tail
        if block is self._tail:
            return block
        if _is_queued(block):
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


def _is_queued(block: Any) -> bool:
    """Whether a block is in the free queue: only there it has links."""
    return block.next_free_block is not None


if TYPE_CHECKING:
    _: type[GPUBlockPoolView] = VLLMBlockPoolView
