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
from kvview.testing import BoundCheck, Capability, Outcome, parametrize_with_checks, run_checks
from kvview_vllm.pool import view as make_view
from tests.guard.machine import GuardMachine

block_pool: Any = import_module("vllm.v1.core.block_pool")

HASH_BLOCK_SIZE = 16


class VLLMPool:
    """The real pool, and the adapter's view of it.

    Args:
        num_blocks: Blocks in the pool, the null block included.
    """

    null_block_id = 0

    def __init__(self, num_blocks: int = 24, *, enable_caching: bool = True) -> None:
        arguments = {}
        if "hash_block_size" in inspect.signature(block_pool.BlockPool).parameters:
            arguments["hash_block_size"] = HASH_BLOCK_SIZE
        self.num_blocks = num_blocks
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

    @property
    def capabilities(self) -> frozenset[Capability]:
        """All capabilities of a pool for which the release has a method."""
        has = {
            *(Capability.CACHE, Capability.RESET, Capability.CLOSE, Capability.SIZED),
            *(Capability.POOL_SIZE, Capability.FREE_COUNT, Capability.IS_FREE),
            *(Capability.BLOCK_KEYS, Capability.FIND_CACHED, Capability.FREE_ORDER),
            *(Capability.HOLDS, Capability.RESUMABLE_WALK, Capability.VIEWS),
            Capability.SHARE,
        }
        if isinstance(self.view, SupportsGiveBack):
            has.add(Capability.GIVE_BACK)
        if self.plain_view.release.reuse_watchers:
            has.add(Capability.REUSE_NOTICE)
        if hasattr(self.pool, "evict_blocks"):
            has.add(Capability.EVICT)
        if self.plain_view.release.several_hashes:
            has.add(Capability.MANY_HASHES)
        return frozenset(has)

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

    def sized(self, num_blocks: int) -> VLLMPool:
        return type(self)(num_blocks)


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


@pytest.mark.newest  # the guarded pool has the same checks
@parametrize_with_checks(VLLMPool)
def test_the_bare_pool_satisfies_the_laws(check: BoundCheck) -> None:
    check()


@parametrize_with_checks(GuardedVLLMPool)
def test_the_guarded_pool_satisfies_the_laws(check: BoundCheck) -> None:
    check()


def test_only_missing_features_of_the_release_are_skipped() -> None:
    report = run_checks(GuardedVLLMPool, select=["check_pool_*"])
    skipped = {result.reason for result in report if result.outcome is Outcome.SKIPPED}
    pool = VLLMPool().pool
    lacks = ["gpu_events"]  # the harness folds no events of vLLM
    lacks += [] if isinstance(GuardedVLLMPool().view, SupportsGiveBack) else ["give_back"]
    lacks += [] if hasattr(pool, "unpin_blocks") else ["reuse_notice"]
    assert skipped == {f"the harness does not declare {name}" for name in lacks}
