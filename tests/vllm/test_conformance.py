"""The conformance kit on the real BlockPool of the vLLM release that can be imported.

The harness makes the engine's moves with the pool's own public methods.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import settings

from kvview import GPUBlockPoolView, GuardedView, SupportsGiveBack
from kvview.testing import PoolConformance
from kvview_vllm.pool import view as make_view
from tests.guard.machine import GuardMachine

block_pool: Any = import_module("vllm.v1.core.block_pool")

HASH_BLOCK_SIZE = 16


class VLLMPool:
    """The real pool, the adapter's view of it, and the calls of an engine.

    Args:
        num_blocks: Blocks in the pool, the null block included.
        enable_caching: Whether the prefix cache is on.
    """

    null_block_id = 0

    def __init__(self, num_blocks: int, *, enable_caching: bool = True) -> None:
        arguments = {}
        if "hash_block_size" in inspect.signature(block_pool.BlockPool).parameters:
            arguments["hash_block_size"] = HASH_BLOCK_SIZE
        self.pool: Any = block_pool.BlockPool(num_blocks, enable_caching, **arguments)
        self.plain_view: Any = make_view(self.pool)
        self.view: GPUBlockPoolView = self.guard(self.plain_view)

    def guard(self, plain_view: Any) -> GPUBlockPoolView:
        """Return the view under test, which may wrap the adapter's."""
        view: GPUBlockPoolView = plain_view
        return view

    def another_view(self) -> GPUBlockPoolView:
        """Open another view of the same pool."""
        return make_view(self.pool)

    def allocate(self, num_blocks: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(num_blocks)]

    def release(self, block_ids: Sequence[int]) -> None:
        # A request has each block once, so the other releases are those of other requests.
        last = list(dict.fromkeys(reversed(block_ids)))[::-1]
        for others in (list((Counter(block_ids) - Counter(last)).elements()), last):
            self.pool.free_blocks([self.pool.blocks[block_id] for block_id in others])

    def share(self, block_ids: Sequence[int]) -> None:
        blocks = [self.pool.blocks[block_id] for block_id in block_ids]
        self.pool.touch((blocks,) if self.plain_view.release.touch_nested else blocks)

    def cache(
        self, block_ids: Sequence[int], block_hashes: Sequence[bytes], group_idx: int
    ) -> None:
        size = HASH_BLOCK_SIZE
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            block = self.pool.blocks[block_id]
            request = SimpleNamespace(block_hashes=[block_hash])
            if block.block_hash is None:
                self.pool.cache_full_blocks(request, [block], 0, 1, size, group_idx)
            else:  # a second hash, of a prefix that ends inside the block
                self.pool.cache_partial_block(request, block, size, group_idx, 2 * size)

    def evict(self, block_ids: Sequence[int]) -> None:
        self.pool.evict_blocks(set(block_ids))

    def reset(self) -> bool:
        done: bool = self.pool.reset_prefix_cache()
        return done

    def close(self) -> Mapping[int, int]:
        still_held: Mapping[int, int] = self.plain_view.close()
        return still_held


class GuardedVLLMPool(VLLMPool):
    """The real pool behind a guard."""

    def guard(self, plain_view: Any) -> GPUBlockPoolView:
        return GuardedView(plain_view, owner="conformance")

    def close(self) -> Mapping[int, int]:
        guard: Any = self.view
        still_held: Mapping[int, int] = guard.close()
        return still_held


class VLLMGuardMachine(GuardMachine):
    """Plays guards over the real pool."""

    Pool: ClassVar[type[Any]] = VLLMPool


TestGuards = VLLMGuardMachine.TestCase
TestGuards.settings = settings(max_examples=60, deadline=None)


def lacking() -> set[str]:
    """Return the capabilities for which the release has no method."""
    pool = VLLMPool(16)
    has = {
        "give_back": isinstance(pool.view, SupportsGiveBack),
        "evict": hasattr(pool.pool, "evict_blocks"),
        "many_hashes": pool.plain_view.release.several_hashes,
    }
    return {name for name, is_there in has.items() if not is_there}


@pytest.mark.newest  # the guarded pool has the same tests
class TestVLLMPool(PoolConformance):
    """The real pool satisfies the laws."""

    lacks = lacking()

    def make(self, num_blocks: int) -> VLLMPool:
        return VLLMPool(num_blocks)


class TestGuardedVLLMPool(PoolConformance):
    """The real pool behind a guard satisfies the laws."""

    lacks = lacking()

    def make(self, num_blocks: int) -> VLLMPool:
        return GuardedVLLMPool(num_blocks)
