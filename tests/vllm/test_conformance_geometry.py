"""The geometry checks on the real coordinators of a vLLM release that has them.

Blocks are cached with the real pool's own public methods; nothing is patched.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import override

from kvview import (
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview.testing import (
    BoundCheck,
    Capability,
    Effort,
    GeometryPlayer,
    parametrize_with_checks,
)
from kvview.testing.geometry.player import Sizes
from kvview.testing.search import search

coordinators: Any = importlib.import_module("vllm.v1.core.kv_cache_coordinator")
torch = importlib.import_module("torch")
interface: Any = importlib.import_module("vllm.v1.kv_cache_interface")

MAKE = coordinators.get_kv_cache_coordinator
if "allow_partial_hash_hits" not in inspect.signature(MAKE).parameters:
    pytest.skip("needs coordinators that can end hits with whole blocks", allow_module_level=True)

NUM_BLOCKS = 80
MAX_TOKENS = 512


def make_spec(group: CacheGroup) -> Any:
    """Return vLLM's specification of a group's attention."""
    heads = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    size = group.block_size
    if isinstance(group, SlidingWindow):
        return interface.SlidingWindowSpec(size, sliding_window=group.sliding_window, **heads)
    if isinstance(group, ChunkedLocalAttention):
        chunk = group.attention_chunk_size
        return interface.ChunkedLocalAttentionSpec(size, attention_chunk_size=chunk, **heads)
    if isinstance(group, Mamba):
        return interface.MambaSpec(
            size, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
    return interface.FullAttentionSpec(size, **heads)


class Ids:
    """The real coordinator, which returns block ids instead of blocks."""

    def __init__(self, coordinator: Any) -> None:
        self.real = coordinator

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[list[list[int]], int]:
        tables, num_tokens, *_ = self.real.find_longest_cache_hit(list(block_hashes), max_tokens)
        return [[block.block_id for block in table] for table in tables], num_tokens


class VLLMGeometry:
    """The coordinator that vLLM picks for its groups."""

    capabilities = frozenset(
        {
            Capability.SLIDING_WINDOW,
            Capability.CHUNKED_LOCAL,
            Capability.MAMBA,
            Capability.HYBRID,
        }
    )
    null_block_id = 0

    def __init__(
        self,
        scheduler_block_size: int = 16,
        hash_block_size: int = 16,
        groups: Sequence[CacheGroup] = (FullAttention(16),),
    ) -> None:
        self.groups = groups
        specs = [
            interface.KVCacheGroupSpec([f"layer {index}"], make_spec(group))
            for index, group in enumerate(groups)
        ]
        self.coordinator = Ids(
            MAKE(
                interface.KVCacheConfig(NUM_BLOCKS, [], specs),
                max_model_len=MAX_TOKENS,
                max_in_flight_tokens=MAX_TOKENS,
                use_eagle=False,
                enable_caching=True,
                enable_kv_cache_events=False,
                dcp_world_size=1,
                pcp_world_size=1,
                scheduler_block_size=scheduler_block_size,
                hash_block_size=hash_block_size,
                allow_partial_hash_hits=False,  # otherwise hits of Mamba end with a hash, by design
            )
        )
        self.pool = self.coordinator.real.block_pool

    def with_geometry(
        self, scheduler_block_size: int, hash_block_size: int, groups: Sequence[CacheGroup]
    ) -> VLLMGeometry:
        return VLLMGeometry(scheduler_block_size, hash_block_size, groups)

    def cache(self, block_hashes: Sequence[bytes], group_idx: int, block: int) -> int:
        (taken,) = self.pool.get_new_blocks(1)
        self.pool.cache_full_blocks(
            SimpleNamespace(block_hashes=list(block_hashes)),
            [self.pool.null_block] * block + [taken],
            block,
            block + 1,
            self.groups[group_idx].block_size,
            group_idx,
        )
        self.pool.free_blocks([taken])
        block_id: int = taken.block_id
        return block_id


EXPECTED_FAILURES = {
    "check_geo_2": "asserts that sizes divide, so that python -O raises no error",
    "check_geo_3": "a window of one token requires the last block to be cached, and a chunk that "
    "starts inside a block counts as skipped",
    "check_geo_4": "the same for several groups",
}


@parametrize_with_checks(VLLMGeometry, EXPECTED_FAILURES)
def test_coordinators_satisfy_the_laws(check: BoundCheck) -> None:
    check()


class VLLMGeometryPlayer(GeometryPlayer):
    """Plays the geometries in which vLLM is not known to differ."""

    @override
    def draw_sizes(self) -> Sizes:
        while True:
            scheduler, hashed, groups = sizes = super().draw_sizes()
            if not any(map(differs, groups)) and (
                len(groups) > 1 or scheduler == hashed == groups[0].block_size
            ):
                return sizes

    @override
    def refuse(self) -> None:
        """Skip wrong sizes, because vLLM asserts."""


def differs(group: CacheGroup) -> bool:
    """Whether a group's hits are known to differ."""
    is_one_token = isinstance(group, SlidingWindow) and group.sliding_window == 1
    return isinstance(group, ChunkedLocalAttention) or is_one_token


def test_all_other_geometries_satisfy_the_contract() -> None:
    result = search(VLLMGeometryPlayer, VLLMGeometry, Effort())
    assert not result.failures, next(iter(result.failures.values()))


def test_hits_of_one_group_are_multiples_of_its_block_size() -> None:
    class OneGroup(VLLMGeometryPlayer):
        @override
        def draw_sizes(self) -> Sizes:
            return 8, 4, (FullAttention(4),)

    result = search(OneGroup, VLLMGeometry, replace(Effort(), is_brief=True))
    assert list(result.failures) == ["GEO-1"]
