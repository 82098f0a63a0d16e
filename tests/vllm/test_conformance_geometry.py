"""The geometry checks on vLLM's real coordinators, of a release that has them.

Blocks are cached with the real pool's own public methods; nothing is patched.
"""

from __future__ import annotations

import importlib
import inspect
import math
import random
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvview import (
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview.testing import BoundCheck, Capability, parametrize_with_checks
from kvview.testing.geometry.driver import GeometryDriver

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="needs a vLLM release", exc_type=ImportError)
    coordinators = pytest.importorskip(
        "vllm.v1.core.kv_cache_coordinator", reason="needs a vLLM release", exc_type=ImportError
    )
    torch = importlib.import_module("torch")
    interface: Any = importlib.import_module("vllm.v1.kv_cache_interface")

MAKE = coordinators.get_kv_cache_coordinator
if "allow_partial_hash_hits" not in inspect.signature(MAKE).parameters:
    pytest.skip("needs coordinators that can end hits with whole blocks", allow_module_level=True)

NUM_BLOCKS = 80
MAX_TOKENS = 512


def make_spec(group: CacheGroup) -> Any:
    """What vLLM calls a group's attention."""
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
    """The real coordinator, with block ids for its blocks."""

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
                allow_partial_hash_hits=False,  # else Mamba's end with a hash, by design
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


ASSERTS = "asserts that sizes divide, and names no number: no error under python -O"
EXPECTED_FAILURES = {
    "check_geo_1_hit_of_one_group_is_a_multiple_of_the_size_given": (
        "with one group, hits are multiples of its block size"
    ),
    "check_geo_1_every_group_is_looked_up_at_the_size_given": (
        "chunked local attention is refused unless its blocks are as large as the scheduler's"
    ),
    "check_geo_2_sizes_that_do_not_divide_are_refused": ASSERTS,
    "check_geo_2_every_group_must_fit": ASSERTS,
    "check_geo_2_sizes_are_positive": "sizes of 0 and less are taken where they divide",
    "check_geo_2_sizes_that_divide_are_taken": (
        "with one group, hashes must be as large as its blocks"
    ),
    "check_geo_3_sliding_window_of_one_token_needs_no_block": (
        "a window of one token wants the last block cached: shorter hits than there are"
    ),
    "check_geo_3_chunk_may_begin_inside_a_block": (
        "a chunk that begins inside a block: tokens of it are taken for skipped, the hit is wrong"
    ),
    "check_geo_any_mix_of_groups": "finds what is listed here one by one",
}


@parametrize_with_checks(VLLMGeometry, EXPECTED_FAILURES)
def test_coordinators(check: BoundCheck) -> None:
    check()


def make_mix(rng: random.Random) -> tuple[int, int, list[CacheGroup]]:
    """Sizes and groups without what is known to differ."""
    hash_block_size = rng.randint(1, 2)
    groups: list[CacheGroup] = []
    for _ in range(rng.randint(2, 4)):
        size = hash_block_size * rng.randint(1, 3)
        window = SlidingWindow(size, rng.randint(2, 9))
        groups.append(rng.choice([FullAttention(size), window, Mamba(size)]))
    common = math.lcm(*(group.block_size for group in groups))
    return common * rng.randint(1, 2), hash_block_size, groups


@pytest.mark.parametrize("seed", range(100))
def test_any_mix_of_groups(seed: int) -> None:
    rng = random.Random(seed)
    scheduler_block_size, hash_block_size, groups = make_mix(rng)
    driver = GeometryDriver(VLLMGeometry, "GEO-*")
    for _ in range(5):
        driver.start(scheduler_block_size, hash_block_size, *groups)
        request = driver.request("a", 24)
        for index, group in enumerate(groups):
            blocks = [b for b in range(24 // group.block_size) if rng.random() < 0.8]
            driver.cache(request, index, blocks[: driver.room])
        driver.check_hits(request, 24)
