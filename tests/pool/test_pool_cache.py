"""The prefix cache of the reference pool (POOL-8)."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from kvview import (
    AllBlocksCleared,
    BlockNotHeldError,
    BlockRemoved,
    BlockStored,
)
from kvview_reference.pool import BlockPool
from tests.pool.test_pool import key, make_pool, state

NO_IDS: list[Any] = [
    *(-1, -9, 9, 10**30),
    *(True, False, 1.0, 0.0, float("nan"), "1", b"1", None, (1,), [1], Decimal(1), 1j),
    *(np.int64(1), np.int32(0), np.float64(1.0), np.bool_(True), np.array([1, 2])),
    *(torch.tensor(1), torch.tensor([1, 2])),
]


@pytest.fixture
def pool() -> BlockPool:
    return make_pool()


def test_pool_8_a_hash_is_the_block_hash_and_its_group(pool: BlockPool) -> None:
    pool.touch_blocks([1, 2])
    pool.cache_blocks([1, 2], [b"x", b"x"], block_size=16, group_idx=258)
    assert pool.find_cached_block(key("x", 258)) == 1
    assert pool.find_cached_block(key("x")) is None
    assert pool.block_keys([2])[0] == (key(2), b"x\x00\x00\x01\x02")


def test_several_blocks_of_one_hash_are_found_in_the_order_registered(pool: BlockPool) -> None:
    block_ids = pool.allocate_blocks(3)
    pool.cache_blocks(block_ids, [b"x"] * 3, block_size=16)
    for first in (1, 2, 3):
        assert pool.find_cached_block(key("x")) == first
        pool.evict_blocks([first])
        assert pool.block_keys([first])[0] == ()
    assert pool.find_cached_block(key("x")) is None
    assert [pool.ref_cnt(b) for b in block_ids] == [1, 1, 1]


def test_evicting_free_blocks_leaves_them_in_their_place(pool: BlockPool) -> None:
    pool.evict_blocks([1, 3])
    assert list(pool.iter_free_block_ids()) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [b for b, _ in pool.iter_free_block_ids_with_hash()] == [2, 4, 5, 6, 7, 8]
    assert pool.allocate_blocks(3) == [1, 2, 3]


@pytest.mark.parametrize(
    ("block_ids", "block_hashes", "group_idx", "error"),
    [
        ([1], [b"x", b"y"], 0, ValueError),
        ([1, 3], [b"x", b"y"], 0, BlockNotHeldError),
        ([1, 2], [b"x", "y"], 0, TypeError),
        ([1, 2], [b"x", b"y"], -1, ValueError),
        ([1, 2], [b"x", b"y"], 2**32, ValueError),
    ],
)
def test_a_registration_that_raises_has_changed_nothing(
    block_ids: Any, block_hashes: Any, group_idx: int, error: type[Exception]
) -> None:
    pool = make_pool(events=True)
    pool.touch_blocks([1, 2])
    before = state(pool)
    with pytest.raises(error):
        pool.cache_blocks(block_ids, block_hashes, block_size=16, group_idx=group_idx)
    assert state(pool) == before


def test_events_tell_what_is_reusable_in_the_order_in_which_it_happened() -> None:
    pool = BlockPool(5, enable_events=True)
    block_ids = pool.allocate_blocks(3)
    pool.cache_blocks(block_ids, [b"a", b"b", b"a"], block_size=16, group_idx=1, parent_hash=b"p")
    pool.cache_blocks([1, 2], [b"a", b"c"], block_size=32, group_idx=1)
    pool.cache_blocks([1], [b"a"], block_size=16, group_idx=1)  # known already: no event
    pool.free_blocks([3, 2, 1])
    pool.allocate_blocks(3)  # evicts block 3, then block 2 with both its hashes
    pool.evict_blocks([1, 4])
    assert not pool.reset_prefix_cache()
    pool.free_blocks([2, 3, 4])
    assert pool.reset_prefix_cache()
    assert pool.take_events() == [
        BlockStored([b"a", b"b", b"a"], b"p", 16, 1),
        BlockStored([b"c"], None, 32, 1),
        *(BlockRemoved([b"a"], 1), BlockRemoved([b"b"], 1), BlockRemoved([b"c"], 1)),
        BlockRemoved([b"a"], 1),
        AllBlocksCleared(),
    ]
    assert pool.take_events() == []
