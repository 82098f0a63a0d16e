"""LMCache's lazy-offload manager over a view.

:class:`PoolShim` lets the unmodified manager run on a pool that has the methods of vLLM's. The
manager then reads the hash of one block at a time, which is slow. :class:`ViewManager` is a port,
which reads all blocks that it needs in one call. Neither uses a private name of a pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import chain, islice
from typing import Any

_manager: Any = import_module("lmcache.integration.vllm.lazy_offload_manager")
_policy: Any = import_module("lmcache.integration.vllm.lazy_offload_policy.eviction_aware")


class Block:
    """The attributes of a block that the manager reads."""

    __slots__ = ("_next", "_queue", "_view", "block_id")

    def __init__(self, view: Any, block_id: int, queue: Iterator[int] | None = None) -> None:
        self._view = view
        self.block_id = block_id
        self._queue = queue
        self._next: Block | None = None

    @property
    def block_hash(self) -> Any:
        (key,) = self._view.primary_keys((self.block_id,))
        return key

    @property
    def next_free_block(self) -> Block | None:
        """The next victim, read at the first access; the last block has none."""
        if self._queue is not None:
            block_id = next(self._queue, -1)
            self._next = Block(self._view, block_id, self._queue if block_id >= 0 else None)
            self._queue = None
        return self._next


class PoolShim:
    """A view with the methods of vLLM's BlockPool that the manager uses."""

    def __init__(self, view: Any) -> None:
        self.view = view
        self.blocks: list[Any] = [Block(view, block_id) for block_id in range(view.num_blocks)]

    @property
    def free_block_queue(self) -> PoolShim:
        return self

    @property
    def fake_free_list_head(self) -> Block:
        return Block(self.view, -1, self.view.iter_free_block_ids())

    def touch(self, blocks: Sequence[Any]) -> None:
        self.view.touch_blocks([block.block_id for block in blocks])

    def free_blocks(self, blocks: Sequence[Any]) -> None:
        self.view.free_blocks([block.block_id for block in blocks])


class ReadBlock:
    """A block whose hash is read together with those of other blocks."""

    __slots__ = ("block_hash", "block_id")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.block_hash: Any = None


class ReadPool(PoolShim):
    """The same for :class:`ViewManager`, which announces its reads."""

    def __init__(self, view: Any) -> None:
        super().__init__(view)
        self.blocks = [ReadBlock(block_id) for block_id in range(view.num_blocks)]

    def read(self, block_ids: Sequence[int]) -> None:
        blocks = self.blocks
        for block_id, key in zip(block_ids, self.view.primary_keys(block_ids), strict=True):
            blocks[block_id].block_hash = key

    def touch(self, blocks: Sequence[Any]) -> None:
        block_ids = [block.block_id for block in blocks]
        self.view.touch_blocks(block_ids)
        self.read(block_ids)


class ViewStoreQueue(_policy.EvictionAwareStoreQueue):  # type: ignore[misc]
    """LMCache's policy, with one call for each of its two reads of the pool."""

    def _free_queue_ranks(self, depth: int) -> dict[int, int]:
        victims = islice(self._pool.view.iter_free_block_ids(), max(0, depth))
        return {block_id: rank for rank, block_id in enumerate(victims)}

    def _drop_evicted_suffix(self, request_id: str, ops: list[Any]) -> list[Any]:
        snapshots = [op.block_hashes for op in ops]
        block_ids = list(chain.from_iterable(snapshots))
        expected = list(chain.from_iterable(map(dict.values, snapshots)))
        if self._pool.view.primary_keys(block_ids) == expected:
            return ops
        self._pool.read(block_ids)
        ops_left: list[Any] = super()._drop_evicted_suffix(request_id, ops)
        return ops_left


class ViewManager(_manager.LazyOffloadManager):  # type: ignore[misc]
    """LMCache's manager over a :class:`ReadPool`."""

    def bind_block_pool(self, gpu_block_pool: ReadPool) -> None:
        super().bind_block_pool(gpu_block_pool)
        config = _policy.EvictionAwarePolicyConfig.from_configs(self._configs)
        self._policy = ViewStoreQueue(config, gpu_block_pool)

    def add_store_candidate(self, metadata: Any) -> None:
        self._require_block_pool().read(metadata.op.flat_block_ids)
        super().add_store_candidate(metadata)


class AllWorkersAtOnce:
    """One worker, whose every report is complete."""

    def update_pending_store_count(self, request_id: str, count: int, /) -> bool:
        return True


def make_manager(pool: Any, *, max_drain_per_step: int = 64) -> Any:
    """Make LMCache's manager over vLLM's own pool or a :class:`PoolShim`, or its port."""
    configs = {"lmcache.mp.lazy_offload_max_drain_per_step": max_drain_per_step}
    kind = ViewManager if isinstance(pool, ReadPool) else _manager.LazyOffloadManager
    manager = kind(configs, [16], AllWorkersAtOnce())
    manager.bind_block_pool(pool)
    return manager
