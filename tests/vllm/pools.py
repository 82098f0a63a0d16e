"""The real block pool, of whichever vLLM release can be imported."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvview import make_offload_key
from kvview_vllm.releases import probe_pool

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    vllm = pytest.importorskip("vllm", reason="needs a vLLM release", exc_type=ImportError)
    block_pool = pytest.importorskip(
        "vllm.v1.core.block_pool", reason="needs a vLLM release", exc_type=ImportError
    )

BLOCK_SIZE = 16
NULL = 0


class Engine:
    """The real pool, moved as the scheduler moves it."""

    def __init__(self, num_blocks: int, *, enable_caching: bool = True) -> None:
        arguments = {}
        if "hash_block_size" in inspect.signature(block_pool.BlockPool).parameters:
            arguments["hash_block_size"] = BLOCK_SIZE
        self.pool: Any = block_pool.BlockPool(num_blocks, enable_caching, **arguments)
        self.release = probe_pool(self.pool)

    def blocks(self, block_ids: Sequence[int]) -> list[Any]:
        return [self.pool.blocks[block_id] for block_id in block_ids]

    def allocate(self, num_blocks: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(num_blocks)]

    def hit(self, block_ids: Sequence[int]) -> None:
        blocks = self.blocks(block_ids)
        self.pool.touch((blocks,) if self.release.touch_nested else blocks)

    def free(self, block_ids: Sequence[int]) -> None:
        self.pool.free_blocks(self.blocks(block_ids))

    def cache(self, block_id: int, block_hash: bytes, group: int = 0) -> bytes:
        request = SimpleNamespace(block_hashes=[block_hash])
        self.pool.cache_full_blocks(request, self.blocks([block_id]), 0, 1, BLOCK_SIZE, group)
        return make_offload_key(block_hash, group)

    def cache_again(self, block_id: int, block_hash: bytes, group: int = 0) -> bytes:
        request = SimpleNamespace(block_hashes=[block_hash])
        block = self.pool.blocks[block_id]
        self.pool.cache_partial_block(request, block, BLOCK_SIZE, group, 2 * BLOCK_SIZE)
        return make_offload_key(block_hash, group)

    def reset(self) -> bool:
        return bool(self.pool.reset_prefix_cache())

    def queue(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def cached_and_free(self, num_blocks: int) -> dict[int, bytes]:
        """That many hashed blocks at the end of the free queue, in order."""
        block_ids = self.allocate(num_blocks)
        keys = {block_id: self.cache(block_id, b"%032d" % block_id) for block_id in block_ids}
        self.free(block_ids)
        return keys
