"""The view over a real vLLM ``BlockPool``, the same for every release.

How the laws of :mod:`kvview.pool` are kept over a pool that checks nothing:

1. Ids are checked before the engine is called, and blocks are looked up in the
   list taken at bind; a ``KVCacheBlock`` never leaves this module and nothing
   of it is ever written (POOL-3, POOL-4).
2. The view counts its own references, so that it never drops the engine's.
3. The null block is never passed on: older releases count references on it.
4. A block that one call frees several times reaches the engine so that its last
   reference goes alone: older releases would queue it twice (vLLM #42571).
5. A block that leaves the free queue loses its links, so a walk reads some blocks
   ahead and checks each again when it yields it (:mod:`kvview_vllm.walks`).

Source: ``vllm/v1/core/block_pool.py`` and ``FreeKVCacheBlockQueue`` in
``vllm/v1/core/kv_cache_utils.py``; :mod:`kvview_vllm.releases.capabilities` says what
differs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvview import (
    BlockNotHeldError,
    FreeBlockWalk,
    GPUBlockPoolView,
    OffloadKey,
    UnknownBlockError,
    ViewClosedError,
    get_offload_block_hash,
    get_offload_group_idx,
    require_offload_key,
)
from kvview_vllm.releases.probes import probe_pool
from kvview_vllm.walks import Place, ResumedWalk, Walk, is_queued

NULL_BLOCK_ID = 0

_logger = logging.getLogger(__name__)


def view(block_pool: Any, *, owner: str = "connector") -> VLLMBlockPoolView:
    """A view over a real ``vllm.v1.core.block_pool.BlockPool``.

    Args:
        block_pool: The scheduler's pool, of any tested release.
        owner: Named in errors and reports.

    Raises:
        UnsupportedEngineError: The pool has a shape that no tested release has.
        VLLMNotInstalledError: No vLLM can be imported.
    """
    capabilities = probe_pool(block_pool)
    if "reuse_watchers" in capabilities:
        return NotifyingBlockPoolView(block_pool, capabilities, owner)
    return VLLMBlockPoolView(block_pool, capabilities, owner)


class VLLMBlockPoolView:
    """The view of one owner over a real pool, with a ledger of its holds.

    1. Keeps every law of :mod:`kvview.pool` and every optional query that the engine
       can answer in all releases; :class:`NotifyingBlockPoolView` adds one.
    2. Views of several owners may be open at once; each counts its own.
    3. Use it on the scheduler's thread only.

    Args:
        block_pool: The pool, as :func:`probe_pool` recognised it.
        capabilities: What :func:`probe_pool` returned for it.
        owner: Named in errors and reports.
    """

    def __init__(self, block_pool: Any, capabilities: frozenset[str], owner: str) -> None:
        self.owner = owner
        self.capabilities = capabilities
        self.num_blocks = len(block_pool.blocks)  # facts, which a closed view still tells
        self.null_block_id = NULL_BLOCK_ID
        self._pool: Any = block_pool
        self._blocks: list[Any] = block_pool.blocks
        self._holds = [0] * len(self._blocks)  # references of this view, by block id
        self._walks: list[Walk | Place] = []
        self._touch = block_pool.touch
        if "touch_nested" in capabilities:
            # Up to 0.13 touch takes one list per KV-cache group.
            self._touch = lambda blocks: block_pool.touch((blocks,))
        self._free = block_pool.free_blocks
        # ``block_hash`` is a property over this field: a Python call for each block.
        has_field = hasattr(block_pool.null_block, "_block_hash")
        self._hash_of = attrgetter("_block_hash" if has_field else "block_hash")

    # --- references ---

    def touch_blocks(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each block named, once per occurrence."""
        # One loop that checks, counts and looks up: sets, Counter and itemgetter cost
        # more for small batches and as much for large ones (benchmarks/guard.py).
        holds, blocks = self._holds, self._blocks
        found: list[Any] = []
        try:
            for block_id in block_ids:
                if type(block_id) is int and block_id > 0:
                    holds[block_id] += 1
                    found.append(blocks[block_id])
                elif type(block_id) is not int or block_id:
                    raise IndexError
        except IndexError:
            for block in found:
                holds[block.block_id] -= 1
            self._open_pool()
            self._check_block_ids(block_ids)
            raise
        if not found:
            self._open_pool()
            return
        for walk in self._walks:
            walk.before_touch(found)
        self._touch(found)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Give back one reference on each block named, once per occurrence."""
        holds, blocks = self._holds, self._blocks
        found: list[Any] = []
        may_repeat = False
        try:
            for block_id in block_ids:
                if type(block_id) is int and block_id > 0:
                    count = holds[block_id]
                    if count == 1:
                        holds[block_id] = 0
                    elif count:
                        holds[block_id] = count - 1
                        may_repeat = True
                    else:
                        raise IndexError
                    found.append(blocks[block_id])
                elif type(block_id) is not int or block_id:
                    raise IndexError
        except IndexError:
            for block in found:
                holds[block.block_id] += 1
            self._open_pool()
            self._check_block_ids(block_ids)
            self._check_held(block_ids)
            raise
        if not found:
            self._open_pool()
            return
        if may_repeat:
            # Up to 0.23 the engine queues a block once per occurrence when its last
            # reference goes with others of its own in one call (vLLM #42571).
            surplus, found = _split_repeated(found)
            if surplus:
                self._free(surplus)
        self._free(found)

    def _open_pool(self) -> Any:
        if self._pool is None:
            raise ViewClosedError(
                f"POOL-10: the view of {self.owner!r} was closed; ask the engine for a new one"
            )
        return self._pool

    def _check_block_ids(self, block_ids: Iterable[object]) -> None:
        for block_id in block_ids:
            # A negative id would silently name a block from the end.
            if type(block_id) is not int or not 0 <= block_id < len(self._blocks):
                raise UnknownBlockError(
                    f"POOL-4: {block_id!r} ({type(block_id).__name__}) is no block of this pool; "
                    f"block ids are ints from 0 to {len(self._blocks) - 1}"
                )

    def _check_held(self, block_ids: Sequence[int]) -> None:
        for block_id, freed in Counter(block_ids).items():
            held = self._holds[block_id]
            if block_id != NULL_BLOCK_ID and freed > held:
                raise BlockNotHeldError(
                    f"POOL-4: block {block_id} is freed {freed}x in this call and held {held}x "
                    f"through the view of {self.owner!r}"
                )

    # --- walks over the free queue ---

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        """Walk the free blocks that still hold reusable KV, next victim first.

        Unhashed blocks in front of a hashed one are passed over, so the first
        item costs what stands before it. What the engine itself takes *and* gives
        back between two items cannot be told from what stayed where it was: such
        a block may still be yielded, if what is yielded is true then.
        """
        with self._walking(hashed_only=True) as walk:
            for block in walk.blocks():
                block_id: int = block.block_id
                if (primary := block.block_hash) is not None:
                    yield block_id, primary
                    self._open_pool()
                    for block_hash in self._more_keys(block_id):
                        if is_queued(block) and block_hash in self._more_keys(block_id):
                            yield block_id, block_hash
                            self._open_pool()

    def iter_free_block_ids(self) -> Iterator[int]:
        """All free blocks, next victim first."""
        with self._walking(hashed_only=False) as walk:
            for block in walk.blocks():
                yield block.block_id
                if self._pool is None:
                    self._open_pool()

    @contextmanager
    def _walking(self, *, hashed_only: bool) -> Iterator[Walk]:
        walk = Walk(self._open_pool().free_block_queue, self.capabilities, hashed_only)
        self._walks.append(walk)
        try:
            yield walk
        finally:
            self._walks.remove(walk)

    def walk_free_blocks(self) -> FreeBlockWalk:
        """A walk that goes on in later steps (POOL-13)."""
        return ResumedWalk(self._open_pool, self._more_keys, self.num_blocks, self._walks)

    # --- queries ---

    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now."""
        return int(self._open_pool().get_num_free_blocks())

    def is_free(self, block_id: int) -> bool:
        """Whether the block is free now."""
        self._open_pool()
        self._check_block_ids((block_id,))
        return is_queued(self._blocks[block_id])

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """The keys registered for each block, primary first."""
        keys = self.primary_keys(block_ids)
        if not getattr(self._pool, "cached_block_hashes_by_block", None):
            return [() if key is None else (key,) for key in keys]
        return [
            () if key is None else (key, *self._more_keys(block_id))
            for block_id, key in zip(block_ids, keys, strict=True)
        ]

    def primary_keys(self, block_ids: Sequence[int]) -> list[OffloadKey | None]:
        """The first key of each block, or None."""
        self._open_pool()
        # In C as far as it goes: connectors ask for all that they wait for, every step.
        if set(map(type, block_ids)) - {int} or min(block_ids, default=0) < 0:
            self._check_block_ids(block_ids)
        try:
            return list(map(self._hash_of, map(self._blocks.__getitem__, block_ids)))
        except IndexError:
            self._check_block_ids(block_ids)
            raise

    def _more_keys(self, block_id: int) -> list[OffloadKey]:
        """Hashes beside the primary one, in one order whatever the process."""
        if "several_hashes" not in self.capabilities:  # before 0.24, PR #45939
            return []
        return sorted(self._pool.cached_block_hashes_by_block.get(block_id, ()))

    def find_cached_block(self, key: OffloadKey) -> int | None:
        """Id of a block that holds this key, or None."""
        # The map behind get_cached_block is replaced at every cache reset.
        found = self._open_pool().get_cached_block(
            get_offload_block_hash(key), [get_offload_group_idx(key)]
        )
        if not found:
            require_offload_key(key)
            return None
        return int(found[0].block_id)

    def held_blocks(self) -> Mapping[int, int]:
        """References held through this view, ``{block_id: count}``; costs O(pool)."""
        self._open_pool()
        return {block_id: count for block_id, count in enumerate(self._holds) if count}

    def close(self) -> Mapping[int, int]:
        """Close the view and report what it still held."""
        still_held = {block_id: count for block_id, count in enumerate(self._holds) if count}
        self._holds, self._blocks = [], []  # no id passes from here on
        self._pool = self._touch = self._free = None
        return still_held


class NotifyingBlockPoolView(VLLMBlockPoolView):
    """The view of a release that says when a block is handed out again: 0.30 and later."""

    def __init__(self, block_pool: Any, capabilities: frozenset[str], owner: str) -> None:
        super().__init__(block_pool, capabilities, owner)
        self._watched: dict[int, Callable[[int], None]] = {}

    def free_blocks_with_notice(
        self, block_ids: Sequence[int], on_reuse: Callable[[int], None]
    ) -> None:
        """Give back as :meth:`free_blocks` does, and hear of each block once (POOL-14)."""
        block_ids, free = list(block_ids), self._free
        self._free = self._unpin
        try:
            self.free_blocks(block_ids)
        finally:
            self._free = free
        self._watched.update((b, on_reuse) for b in block_ids if b != NULL_BLOCK_ID)

    def _unpin(self, blocks: list[Any]) -> None:
        # The engine keeps one watcher a block: what others had there is told by ours.
        watchers = self._pool._reuse_watchers
        others = {block.block_id: watchers.get(block.block_id) for block in blocks}

        def on_reuse(block: Any) -> None:
            self._notify(block.block_id)
            other = others[block.block_id]
            if other is not None:
                other(block)

        self._pool.unpin_blocks(blocks, on_reuse)

    def _notify(self, block_id: int) -> None:
        on_reuse = self._watched.pop(block_id, None)
        if on_reuse is not None:
            try:
                on_reuse(block_id)
            except Exception:
                _logger.exception(
                    "POOL-14: on_reuse(%d) of %r raised; the engine goes on", block_id, self.owner
                )

    def close(self) -> Mapping[int, int]:
        """Close the view and report what it still held; it is told nothing any more."""
        self._watched.clear()
        return super().close()


def _split_repeated(blocks: list[Any]) -> tuple[list[Any], list[Any]]:
    """All occurrences but the last of each block, and the last ones in order."""
    last: dict[int, Any] = {}
    surplus = []
    for block in reversed(blocks):
        if block.block_id in last:
            surplus.append(block)
        else:
            last[block.block_id] = block
    return surplus, list(last.values())[::-1]


if TYPE_CHECKING:
    _: type[GPUBlockPoolView] = VLLMBlockPoolView
