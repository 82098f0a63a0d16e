"""LMCache's lazy-offload manager over a view.

:class:`PoolShim` lets the unmodified manager run on a pool that has the methods of vLLM's, without
a private name of a pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

_manager: Any = import_module("lmcache.integration.vllm.lazy_offload_manager")


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


class AllWorkersAtOnce:
    """One worker, whose every report is complete."""

    def update_pending_store_count(self, request_id: str, count: int, /) -> bool:
        return True


def make_manager(pool: Any, *, max_drain_per_step: int = 64) -> Any:
    """Make LMCache's manager over vLLM's own pool or a :class:`PoolShim`."""
    configs = {"lmcache.mp.lazy_offload_max_drain_per_step": max_drain_per_step}
    manager = _manager.LazyOffloadManager(configs, [16], AllWorkersAtOnce())
    manager.bind_block_pool(pool)
    return manager
