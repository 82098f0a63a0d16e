"""LMCache's lazy-offload manager over a view: its own code, and what it takes to run it.

:class:`PoolShim` is the plain way: the manager unmodified, and a pool that looks to it
like vLLM's. It asks for the hash of one block at a time, though. :func:`make_manager`
is what a port would do: the two places that read the pool in every step ask for all
that they need in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import chain, islice
from typing import Any

_manager: Any = import_module("lmcache.integration.vllm.lazy_offload_manager")
_policy: Any = import_module("lmcache.integration.vllm.lazy_offload_policy.eviction_aware")


class Block:
    """What the manager reads of a block."""

    __slots__ = ("_next", "_queue", "_view", "block_id")

    def __init__(self, view: Any, block_id: int, queue: Iterator[int] | None = None) -> None:
        self._view = view
        self.block_id = block_id
        self._queue = queue
        self._next: Block | None = None

    @property
    def block_hash(self) -> Any:
        (keys,) = self._view.block_keys((self.block_id,))
        return keys[0] if keys else None

    @property
    def next_free_block(self) -> Block | None:
        """The next victim, found when it is asked for first; the last one has none."""
        if self._queue is not None:
            block_id = next(self._queue, -1)
            self._next = Block(self._view, block_id, self._queue if block_id >= 0 else None)
            self._queue = None
        return self._next


class PoolShim:
    """A view, in the shape of the part of vLLM's BlockPool that the manager uses."""

    def __init__(self, view: Any) -> None:
        self.view = view
        self.blocks = [Block(view, block_id) for block_id in range(view.num_blocks)]

    @property
    def free_block_queue(self) -> PoolShim:
        return self

    @property
    def fake_free_list_head(self) -> Block:
        return Block(self.view, -1, self.view.iter_free_block_ids())

    def touch(self, blocks: Sequence[Block]) -> None:
        self.view.touch_blocks([block.block_id for block in blocks])

    def free_blocks(self, blocks: Sequence[Block]) -> None:
        self.view.free_blocks([block.block_id for block in blocks])


class ViewStoreQueue(_policy.EvictionAwareStoreQueue):  # type: ignore[misc]
    """LMCache's policy, with its two looks at the pool in one call each."""

    def _free_queue_ranks(self, depth: int) -> dict[int, int]:
        victims = islice(self._pool.view.iter_free_block_ids(), max(0, depth))
        return {block_id: rank for rank, block_id in enumerate(victims)}

    def _drop_evicted_suffix(self, request_id: str, ops: list[Any]) -> list[Any]:
        snapshots = [op.block_hashes for op in ops]
        keys = self._pool.view.block_keys(list(chain.from_iterable(snapshots)))
        if keys == list(zip(chain.from_iterable(map(dict.values, snapshots)))):
            return ops
        ops_left: list[Any] = super()._drop_evicted_suffix(request_id, ops)
        return ops_left


class AllWorkersAtOnce:
    """One worker, whose every report is complete."""

    def update_pending_store_count(self, request_id: str, count: int, /) -> bool:
        return True


def make_manager(pool: Any, *, in_batches: bool, **options: Any) -> Any:
    """LMCache's manager.

    Args:
        pool: vLLM's own pool, or a :class:`PoolShim`.
        in_batches: Whether its policy asks the view for many blocks at once.
        options: Of its policy, ``horizon_steps`` for one.
    """
    configs = {f"lmcache.mp.lazy_offload_{name}": value for name, value in options.items()}
    manager = _manager.LazyOffloadManager(configs, [16], AllWorkersAtOnce())
    manager.bind_block_pool(pool)
    if in_batches:
        manager._policy = ViewStoreQueue(
            _policy.EvictionAwarePolicyConfig.from_configs(configs), pool
        )
    return manager
