"""The pool laws, one by one, on the reference pool and its view.

``test_pool_machine.py`` runs everything at once, against an oracle.
"""

from __future__ import annotations

import copy
import gc
import sys
import tracemalloc
from collections.abc import Callable
from decimal import Decimal
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from kvview import (
    BlockNotHeldError,
    ConfigError,
    GPUBlockPoolView,
    NoFreeBlocksError,
    OffloadKey,
    SupportsBlockKeys,
    SupportsClose,
    SupportsFindCachedBlock,
    SupportsFreeCount,
    SupportsFreeOrder,
    SupportsHolds,
    SupportsIsFree,
    SupportsPoolSize,
    UnknownBlockError,
    make_offload_key,
)
from kvview_reference import free_queue, walks
from kvview_reference import pool as pool_module
from kvview_reference.pool import BlockPool, BlockPoolView

NO_IDS: list[Any] = [
    *(-1, -9, 9, 10**30),
    *(True, False, 1.0, 0.0, float("nan"), "1", b"1", None, (1,), [1], Decimal(1), 1j),
    *(np.int64(1), np.int32(0), np.float64(1.0), np.bool_(True), np.array([1, 2])),
    *(torch.tensor(1), torch.tensor([1, 2])),
]


def key(name: object, group_idx: int = 0) -> OffloadKey:
    return make_offload_key(str(name).encode(), group_idx)


def cache(pool: BlockPool, *block_ids: int) -> None:
    """Give each block a hash named after it."""
    pool.cache_blocks(block_ids, [str(b).encode() for b in block_ids], block_size=16)


def make_pool(num_blocks: int = 9, *, hashed: bool = True, events: bool = False) -> BlockPool:
    """A pool where every block is free, in order of its id."""
    pool = BlockPool(num_blocks, enable_events=events)
    if hashed:
        block_ids = pool.allocate_blocks(num_blocks - 1)
        cache(pool, *block_ids)
        pool.free_blocks(block_ids)
    return pool


def state(pool: BlockPool, *views: BlockPoolView) -> object:
    """All that can be observed, without touching the pool."""
    pool = copy.deepcopy(pool)
    block_ids = range(pool.num_blocks)
    return (
        [pool.ref_cnt(b) for b in block_ids],
        [pool.block_keys([b])[0] for b in block_ids],
        list(pool.iter_free_block_ids()),
        pool.num_free_blocks(),
        [view.held_blocks() for view in views],
        pool.take_events(),
        pool.allocate_blocks(pool.num_free_blocks()),
    )


@pytest.fixture
def pool() -> BlockPool:
    return make_pool()


@pytest.fixture
def view(pool: BlockPool) -> BlockPoolView:
    return pool.view("test")


def test_the_view_offers_every_query(view: BlockPoolView) -> None:
    for protocol in (
        *(GPUBlockPoolView, SupportsPoolSize, SupportsFreeCount, SupportsIsFree),
        *(SupportsBlockKeys, SupportsFindCachedBlock, SupportsFreeOrder),
        *(SupportsHolds, SupportsClose),
    ):
        assert isinstance(view, protocol)
    assert (view.num_blocks, view.null_block_id, view.num_free_blocks()) == (9, 0, 8)


@pytest.mark.parametrize("num_blocks", [1, 0, -1, True, 2.0, "9", None, np.int64(9)])
def test_a_pool_that_cannot_be_is_refused(num_blocks: Any) -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        BlockPool(num_blocks)


# --- POOL-1 and the eviction order ---


def test_victims_are_unhashed_ones_first_in_batch_order_then_hashed_ones_oldest_first() -> None:
    pool = make_pool(hashed=False)
    assert pool.allocate_blocks(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    cache(pool, 2, 4, 6)
    pool.free_blocks([1, 2, 3])
    pool.free_blocks([4, 5, 6, 7])
    assert list(pool.iter_free_block_ids()) == [5, 7, 1, 3, 2, 4, 6]
    assert pool.allocate_blocks(7) == [5, 7, 1, 3, 2, 4, 6]


def test_without_caching_no_block_gets_a_hash() -> None:
    pool = BlockPool(5, enable_caching=False, enable_events=True)
    block_ids = pool.allocate_blocks(3)
    cache(pool, *block_ids)
    assert pool.block_keys([1])[0] == ()
    pool.free_blocks(block_ids)
    assert list(pool.iter_free_block_ids()) == [1, 2, 3, 4]
    assert pool.take_events() == []


@pytest.mark.parametrize("num_blocks", [9, 10**30, -1, 1.5, "1", None])
@pytest.mark.parametrize("hashed", [False, True])
def test_an_impossible_allocation_changes_nothing(num_blocks: Any, hashed: bool) -> None:
    pool = make_pool(hashed=hashed)
    before = state(pool)
    with pytest.raises((NoFreeBlocksError, TypeError)):
        pool.allocate_blocks(num_blocks)
    assert state(pool) == before
    assert pool.allocate_blocks(0) == []


# --- POOL-2 ---


# --- POOL-3 and POOL-4 ---


def test_pool_3_the_ledger_stands_when_the_engine_gave_the_hold_away(
    pool: BlockPool, view: BlockPoolView
) -> None:
    view.touch_blocks([1, 2])
    pool.free_blocks([2])
    before = state(pool, view)
    with pytest.raises(BlockNotHeldError):
        view.free_blocks([1, 2])
    assert state(pool, view) == before


@pytest.mark.parametrize("make", [list, tuple, iter, set, dict.fromkeys, np.array, memoryview])
def test_ids_may_come_in_any_iterable_of_ints(
    pool: BlockPool, view: BlockPoolView, make: Callable[[Any], Any]
) -> None:
    source = bytes([1, 2]) if make is memoryview else [1, 2]
    if make is np.array:  # its items are numpy scalars
        with pytest.raises(UnknownBlockError):
            view.touch_blocks(make(source))  # type: ignore[arg-type, unused-ignore]
        return
    view.touch_blocks(make(source))
    assert view.held_blocks() == {1: 1, 2: 1}
    view.free_blocks(make(source))
    assert view.held_blocks() == {}
    pool.touch_blocks(make(source))
    pool.free_blocks(make(source))
    with pytest.raises(BlockNotHeldError):
        pool.free_blocks(make(source))
    assert view.num_free_blocks() == 8


@pytest.mark.parametrize("block_ids", [None, 1, 1.0])
def test_pool_3_what_cannot_be_iterated_raises_type_error(
    pool: BlockPool, view: BlockPoolView, block_ids: Any
) -> None:
    before = state(pool, view)
    for call in (view.touch_blocks, view.free_blocks, pool.touch_blocks, pool.free_blocks):
        with pytest.raises(TypeError):
            call(block_ids)
    assert state(pool, view) == before


# --- POOL-5 ---


# --- POOL-6 and POOL-7 ---


def test_pool_13_a_dropped_walk_is_forgotten(pool: BlockPool, view: BlockPoolView) -> None:
    walk = view.walk_free_blocks()
    assert len(pool._walks) == 1
    del walk
    gc.collect()
    assert not pool._walks


def steps(call: Callable[[], object]) -> int:
    """Lines of the pool that a call runs through: its cost, without a clock."""
    own_files = {one.__file__ for one in (free_queue, pool_module, walks)}
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in own_files:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_pool_6_after_a_reset_a_walk_does_not_pass_what_was_hashed() -> None:
    pool = make_pool(5001)
    assert pool.reset_prefix_cache()
    assert pool.allocate_blocks(2) == [1, 2]
    cache(pool, 1)
    pool.free_blocks([1])
    assert steps(lambda: list(pool.iter_free_block_ids_with_hash())) < 100
    assert list(pool.iter_free_block_ids_with_hash()) == [(1, key(1))]


@pytest.mark.parametrize("num_unhashed", [0, 3, 8])
def test_pool_7_the_walk_goes_on_while_entries_are_moved_together(
    pool: BlockPool, monkeypatch: pytest.MonkeyPatch, num_unhashed: int
) -> None:
    monkeypatch.setattr(pool_module, "_MAX_ZEROS", 0)
    monkeypatch.setattr(free_queue, "_FEWEST_MOVED", 1)
    pool.free_blocks(pool.allocate_blocks(num_unhashed))
    view = pool.view()
    seen = []
    for block_id in view.iter_free_block_ids():
        seen.append(block_id)
        for _ in range(3):
            view.touch_blocks([block_id, 5])
            view.free_blocks([block_id, 5])
    assert seen == [1, 2, 3, 4, 6, 7, 8]


def test_pool_7_a_walk_begins_at_its_first_next(pool: BlockPool, view: BlockPoolView) -> None:
    walk = view.iter_free_block_ids()
    view.touch_blocks([1, 2])
    view.free_blocks([2])
    assert list(walk) == [3, 4, 5, 6, 7, 8, 2]


def test_an_abandoned_walk_leaves_nothing_behind(pool: BlockPool) -> None:
    walk = pool.iter_free_block_ids()
    next(walk)
    assert len(pool._walks) == 1
    del walk
    gc.collect()
    assert not pool._walks


# --- POOL-9, POOL-10, POOL-11 ---


# --- size ---


def test_a_pool_costs_nothing_per_block_to_the_garbage_collector() -> None:
    gc.collect()
    before = len(gc.get_objects())
    pool = BlockPool(1_000_000)
    assert len(gc.get_objects()) - before < 100
    pool.free_blocks(pool.allocate_blocks(1000))


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("walking", [False, True])
def test_the_queue_stays_in_proportion_to_the_pool_without_any_allocation(
    hashed: bool, walking: bool
) -> None:
    pool = make_pool(hashed=hashed)
    for number in range(1000):
        block_ids = [1 + number % 8, 1 + (number + 3) % 8]
        pool.touch_blocks(block_ids)
        if walking:
            list(pool.iter_free_block_ids())
        pool.free_blocks(block_ids)
    num_entries = len(pool._front) + len(pool._back)
    assert num_entries <= 2 * (pool_module._MAX_ZEROS + 2) * pool.num_blocks


def test_a_block_costs_at_most_100_bytes() -> None:
    tracemalloc.start()
    try:
        pool = BlockPool(1_000_000)
        size, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size <= peak <= 100 * pool.num_blocks
