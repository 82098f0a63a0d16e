"""The hits of the real coordinators of a vLLM release that has them, compared with the model.

Blocks are cached with the real pool's own public methods; nothing is patched.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvview import (
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from tests.geometry.hits import Sizes, compare_hits
from tests.geometry.hits import sizes as drawn_sizes
from tests.geometry.model import GeometryModel

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

    null_block_id = 0

    def __init__(
        self,
        scheduler_block_size: int,
        hash_block_size: int,
        groups: Sequence[CacheGroup],
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


def differs(sizes: Sizes) -> bool:
    """Whether vLLM is known to differ, in its hits or because it asserts that sizes fit."""
    scheduler, hashed, groups = sizes
    if len(groups) == 1 and not scheduler == hashed == groups[0].block_size:
        return True  # hits of one group are multiples of its own block size
    return any(
        # A chunk that starts inside a block counts as skipped, and a window of one token requires
        # the last block to be cached.
        isinstance(group, ChunkedLocalAttention)
        or (isinstance(group, SlidingWindow) and group.sliding_window == 1)
        for group in groups
    )


@settings(max_examples=200, deadline=None)
@given(drawn_sizes().filter(lambda sizes: not differs(sizes)), st.data())
def test_hits_are_those_of_the_contract(sizes: Sizes, data: st.DataObject) -> None:
    cache = VLLMGeometry(*sizes)
    compare_hits(cache, GeometryModel(*sizes, cache.null_block_id), data)


@pytest.mark.parametrize(
    ("sizes", "law"),
    [
        ((8, 4, (FullAttention(4),)), "GEO-1"),
        ((4, 4, (SlidingWindow(4, 1),)), "GEO-3"),
        ((4, 4, (ChunkedLocalAttention(4, 6),)), "GEO-3"),
    ],
    ids=["one group", "a window of one token", "a chunk inside a block"],
)
def test_known_differences_are_still_there(sizes: Sizes, law: str) -> None:
    @settings(max_examples=300, deadline=None, database=None, report_multiple_bugs=False)
    @given(st.data())
    def compare(data: st.DataObject) -> None:
        cache = VLLMGeometry(*sizes)
        compare_hits(cache, GeometryModel(*sizes, cache.null_block_id), data)

    with pytest.raises(AssertionError, match=law):
        compare()
