"""The scheduler half of a host cache like vLLM's SimpleCPUOffloadConnector.

The eager mode stores the blocks of each request as soon as they have a key; the lazy mode stores
the next victims of the free queue. Both hold blocks during a copy, and register every key that a
block has at its end. :class:`SimpleOffload` uses only the contract; :class:`RawSimpleOffload` makes
the same decisions on vLLM's own objects, as the connector there does.

Source: ``SimpleCPUOffloadScheduler``, vllm/v1/simple_kv_offload/manager.py, 0.33.0 (its decisions,
not its code).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from kvview import (
    BlockHash,
    GPUBlockPoolView,
    OffloadKey,
    SupportsBlockKeys,
    SupportsFindCachedBlock,
    SupportsResumableWalk,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from kvview_reference.pool import BlockPool

Decision = tuple[str, tuple[int, ...]]


class ClientView(
    GPUBlockPoolView, SupportsBlockKeys, SupportsFindCachedBlock, SupportsResumableWalk, Protocol
):
    """The methods of a view that the client needs."""


class SimpleOffload:
    """Plans stores and loads of a host pool.

    Args:
        view: Of the GPU pool.
        num_host_blocks: Size of the host pool.
        stores_per_step: Most blocks that one lazy step stores; None for eager mode.
        latency: Steps until a copy is done.
    """

    def __init__(
        self, view: Any, num_host_blocks: int, *, stores_per_step: int | None, latency: int
    ) -> None:
        self.host = BlockPool(num_host_blocks)
        self.stores_per_step = stores_per_step
        self.latency = latency
        self.in_flight: set[int] = set()
        self.num_stored: dict[str, int] = {}
        self.jobs: deque[tuple[int, bool, list[int], list[int]]] = deque()
        self.now = 0
        self.bind(view)

    def bind(self, view: ClientView) -> None:
        self.view = view
        self.walk = view.walk_free_blocks()

    # --- calls of the engine ---

    def match(self, block_hashes: Sequence[BlockHash], num_hit: int) -> list[int]:
        """Return the host blocks after a GPU hit, up to the first miss."""
        found = []
        for block_hash in block_hashes[num_hit:]:
            host_block = self.host.find_cached_block(make_offload_key(block_hash, 0))
            if host_block is None:
                break
            found.append(host_block)
        return found

    def load(self, host_blocks: list[int], gpu_blocks: list[int]) -> None:
        """Hold both sides of a load until it is done."""
        self.host.touch_blocks(host_blocks)
        self.touch(gpu_blocks)
        self.jobs.append((self.now + self.latency, False, gpu_blocks, host_blocks))

    def plan(self, running: dict[str, list[int]]) -> Decision:
        """Finish due copies, and store the blocks of running requests or the next victims."""
        self.now += 1
        while self.jobs and self.jobs[0][0] <= self.now:
            _, is_store, gpu_blocks, host_blocks = self.jobs.popleft()
            if is_store:
                self.register(gpu_blocks, host_blocks)
                self.in_flight.difference_update(gpu_blocks)
            self.host.free_blocks(host_blocks)
            self.free(gpu_blocks)
        room = self.host.num_free_blocks()
        chosen: list[int] = []
        if self.stores_per_step is not None:
            chosen = self.next_victims(min(self.stores_per_step, room))
        else:
            for request_id, block_ids in running.items():
                start = self.num_stored.get(request_id, 0)
                chosen += self.not_stored(block_ids[start:])[: room - len(chosen)]
                self.num_stored[request_id] = len(block_ids)
        if chosen:
            chosen = list(dict.fromkeys(chosen))
            self.touch(chosen)
            self.in_flight.update(chosen)
            job = (self.now + self.latency, True, chosen, self.host.allocate_blocks(len(chosen)))
            self.jobs.append(job)
        return ("store", tuple(chosen))

    def forget(self, request_id: str) -> None:
        """End a request; its jobs continue."""
        self.num_stored.pop(request_id, None)

    def is_new(self, block_id: int, key: OffloadKey) -> bool:
        return block_id not in self.in_flight and self.host.find_cached_block(key) is None

    def keep(self, host_block: int, key: OffloadKey) -> None:
        block_hash, group_idx = get_offload_block_hash(key), get_offload_group_idx(key)
        self.host.cache_blocks([host_block], [block_hash], block_size=16, group_idx=group_idx)

    # --- access to the GPU pool ---

    def touch(self, block_ids: list[int]) -> None:
        self.view.touch_blocks(block_ids)

    def free(self, block_ids: list[int]) -> None:
        self.view.free_blocks(block_ids)

    def not_stored(self, block_ids: list[int]) -> list[int]:
        return [
            block_id
            for block_id, key in zip(block_ids, self.view.primary_keys(block_ids), strict=True)
            if key is not None and self.is_new(block_id, key)
        ]

    def next_victims(self, num_blocks: int) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < num_blocks:
            items = self.walk.take(num_blocks - len(chosen))
            if not items:
                break
            # The first item of a block is its primary key.
            primaries = dict(reversed(items))
            chosen += [b for b, key in reversed(primaries.items()) if self.is_new(b, key)]
        return chosen

    def register(self, gpu_blocks: list[int], host_blocks: list[int]) -> None:
        for host_block, keys in zip(host_blocks, self.view.block_keys(gpu_blocks), strict=True):
            for key in keys:
                self.keep(host_block, key)


class RawSimpleOffload(SimpleOffload):
    """The same over the raw pool of vLLM 0.26 and later, without any check."""

    def bind(self, view: Any) -> None:
        self.pool = view
        self.cursor: Any = None

    def touch(self, block_ids: list[int]) -> None:
        self.pool.touch([self.pool.blocks[block_id] for block_id in block_ids])

    def free(self, block_ids: list[int]) -> None:
        self.pool.free_blocks([self.pool.blocks[block_id] for block_id in block_ids])

    def not_stored(self, block_ids: list[int]) -> list[int]:
        chosen = []
        for block_id in block_ids:
            block = self.pool.blocks[block_id]
            if block.is_null or block.block_hash is None:
                continue
            if self.is_new(block_id, block.block_hash):
                chosen.append(block_id)
        return chosen

    def next_victims(self, num_blocks: int) -> list[int]:
        if self.cursor is not None and self.cursor.ref_cnt > 0:
            self.cursor = None
        chosen: list[int] = []
        cursor = self.cursor
        for block in self.pool.free_block_queue.iter_blocks_after(cursor):
            if len(chosen) >= num_blocks:
                break
            cursor = block
            key = block.block_hash
            if key is not None and not block.is_null and self.is_new(block.block_id, key):
                chosen.append(block.block_id)
        self.cursor = cursor
        return chosen

    def register(self, gpu_blocks: list[int], host_blocks: list[int]) -> None:
        secondary = self.pool.cached_block_hashes_by_block
        for gpu_block, host_block in zip(gpu_blocks, host_blocks, strict=True):
            primary = self.pool.blocks[gpu_block].block_hash
            if primary is not None:
                self.keep(host_block, primary)
            for key in secondary.get(gpu_block, ()):
                self.keep(host_block, key)
