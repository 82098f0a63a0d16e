"""The reference pool, as far as the kit's player does not see it: sizes, order, walks, memory."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvview import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockNotHeldError,
    BlockRemoved,
    BlockStored,
    ConfigError,
    NoFreeBlocksError,
    OffloadKey,
    UnknownBlockError,
    make_offload_key,
)
from kvview.events.fold import FoldedEvents
from kvview.testing.pool.machine import PoolMachine
from kvview.testing.suites.conformance import observable
from kvview.testing.suites.cost import cost_of
from kvview_reference.harness import ReferenceEnginePool, ReferencePool
from kvview_reference.pool import BlockPool


def key(name: object, group_idx: int = 0) -> OffloadKey:
    return make_offload_key(str(name).encode(), group_idx)


def cache(pool: BlockPool, *block_ids: int) -> None:
    """Give each block a hash named after it."""
    pool.cache_blocks(block_ids, [str(b).encode() for b in block_ids], block_size=16)


def make_pool(num_blocks: int = 9, *, hashed: bool = True) -> BlockPool:
    """A pool where every block is free, in order of its id."""
    pool = BlockPool(num_blocks)
    if hashed:
        block_ids = pool.allocate_blocks(num_blocks - 1)
        cache(pool, *block_ids)
        pool.free_blocks(block_ids)
    return pool


@pytest.mark.parametrize("num_blocks", [1, 0, -1, True, 2.0, "9", None, np.int64(9)])
def test_an_impossible_pool_size_is_refused(num_blocks: Any) -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        BlockPool(num_blocks)


@pytest.mark.parametrize("num_blocks", [10**30, -1, 1.5, "1", None])
def test_an_impossible_allocation_is_refused(num_blocks: Any) -> None:
    pool = make_pool()
    with pytest.raises((NoFreeBlocksError, TypeError)):
        pool.allocate_blocks(num_blocks)
    assert list(pool.iter_free_block_ids()) == [1, 2, 3, 4, 5, 6, 7, 8]


# --- events of the prefix cache ---


class EventsMachine(PoolMachine):
    """Also compares the keys that follow from the events of the pool."""

    laws = (*PoolMachine.laws, "EVENT-2")

    @observable("EVENT-2")
    def events(self) -> None:
        folded = vars(self.pool).setdefault("folded", FoldedEvents())
        for event in self.pool.take_events():
            if isinstance(event, AllBlocksCleared):
                folded.clear_gpu()
                continue
            for one in event.block_hashes:
                key = make_offload_key(one, event.group_idx)
                is_removal = isinstance(event, BlockRemoved)
                is_allowed = folded.change(event.medium, key, removed=is_removal)
                self.true(is_allowed, "a removed key was stored", key, "a stored key")
        got = folded.held.get(MEDIUM_GPU, Counter())
        expected = Counter(key for keys in self.model.keys.values() for key in keys)
        self.equal(got, expected, "the events add up to the prefix cache")


class TestEvents(ReferencePool):
    machine = EventsMachine

    def make(self, num_blocks: int) -> ReferenceEnginePool:
        return self.engine_class(num_blocks, enable_events=True)


# --- the order that the contract leaves to the engine ---


def test_unhashed_victims_come_first_in_batch_order_and_hashed_ones_oldest_first() -> None:
    pool = make_pool(hashed=False)
    assert pool.allocate_blocks(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    cache(pool, 2, 4, 6)
    pool.free_blocks([1, 2, 3])
    pool.free_blocks([4, 5, 6, 7])
    assert list(pool.iter_free_block_ids()) == [5, 7, 1, 3, 2, 4, 6]
    assert pool.allocate_blocks(7) == [5, 7, 1, 3, 2, 4, 6]


def test_evicted_free_blocks_keep_their_place() -> None:
    pool = make_pool()
    pool.evict_blocks([1, 3])
    assert list(pool.iter_free_block_ids()) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_several_blocks_with_one_hash_are_found_in_the_order_of_registration() -> None:
    pool = make_pool()
    block_ids = pool.allocate_blocks(3)
    pool.cache_blocks(block_ids, [b"x"] * 3, block_size=16)
    for first in (1, 2, 3):
        assert pool.find_cached_block(key("x")) == first
        pool.evict_blocks([first])
    assert pool.find_cached_block(key("x")) is None


def test_without_caching_no_block_gets_a_hash() -> None:
    pool = BlockPool(5, enable_caching=False, enable_events=True)
    block_ids = pool.allocate_blocks(3)
    cache(pool, *block_ids)
    assert pool.block_keys([1])[0] == ()
    pool.free_blocks(block_ids)
    assert list(pool.iter_free_block_ids()) == [1, 2, 3, 4]
    assert pool.take_events() == []


# --- arguments ---


@pytest.mark.parametrize("make", [list, tuple, iter, set, dict.fromkeys, np.array, memoryview])
def test_ids_may_be_in_any_iterable_of_ints(make: Callable[[Any], Any]) -> None:
    pool = make_pool()
    view = pool.view()
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


def test_pool_3_the_ledger_is_unchanged_if_the_engine_has_freed_the_hold() -> None:
    pool = make_pool()
    view = pool.view()
    view.touch_blocks([1, 2])
    pool.free_blocks([2])
    with pytest.raises(BlockNotHeldError):
        view.free_blocks([1, 2])
    assert view.held_blocks() == {1: 1, 2: 1}
    assert [pool.ref_cnt(block) for block in (1, 2)] == [1, 0]


def test_a_walk_reads_no_block_twice_if_its_last_one_moves_to_the_head() -> None:
    pool = make_pool()
    walk = pool.iter_free_block_ids()
    seen = [next(walk) for _ in range(3)]
    pool.move_to_head(seen[-1:])
    pool.allocate_blocks(1)  # the walk reads the queue again
    rest = [*walk]
    assert sorted([*seen, *rest]) == [*range(1, 9)]


@pytest.mark.parametrize(
    ("block_hashes", "group_idx", "error"),
    [
        ([b"x", "y"], 0, TypeError),
        ([b"x", b"y"], -1, ValueError),
        ([b"x", b"y"], 2**32, ValueError),
    ],
)
def test_a_registration_that_raises_has_changed_nothing(
    block_hashes: Any, group_idx: int, error: type[Exception]
) -> None:
    pool = BlockPool(9, enable_events=True)
    pool.touch_blocks([1, 2])
    with pytest.raises(error):
        pool.cache_blocks([1, 2], block_hashes, block_size=16, group_idx=group_idx)
    assert pool.block_keys([1, 2]) == [(), ()]
    assert pool.take_events() == []


def test_events_name_blocks_in_the_order_of_the_changes() -> None:
    pool = BlockPool(5, enable_events=True)
    block_ids = pool.allocate_blocks(3)
    pool.cache_blocks(block_ids, [b"a", b"b", b"a"], block_size=16, group_idx=1, parent_hash=b"p")
    pool.cache_blocks([1, 2], [b"a", b"c"], block_size=32, group_idx=1)
    pool.cache_blocks([1], [b"a"], block_size=16, group_idx=1)  # a known hash: no event
    pool.free_blocks([3, 2, 1])
    pool.allocate_blocks(3)  # evicts block 3, then block 2 with both its hashes
    pool.evict_blocks([1, 4])
    pool.free_blocks([2, 3, 4])
    assert pool.reset_prefix_cache()
    assert pool.take_events() == [
        BlockStored([b"a", b"b", b"a"], b"p", 16, 1),
        BlockStored([b"c"], None, 32, 1),
        *(BlockRemoved([b"a"], 1), BlockRemoved([b"b"], 1), BlockRemoved([b"c"], 1)),
        BlockRemoved([b"a"], 1),
        AllBlocksCleared(),
    ]


# --- walks ---


def test_pool_6_after_a_reset_a_walk_skips_the_blocks_that_were_hashed() -> None:
    pool = make_pool(5001)
    assert pool.reset_prefix_cache()
    assert pool.allocate_blocks(2) == [1, 2]
    cache(pool, 1)
    pool.free_blocks([1])
    assert cost_of(lambda: list(pool.iter_free_block_ids_with_hash())).lines < 100


@pytest.mark.parametrize("num_unhashed", [0, 3, 8])
def test_pool_7_a_walk_continues_while_its_blocks_are_touched(num_unhashed: int) -> None:
    pool = make_pool()
    pool.free_blocks(pool.allocate_blocks(num_unhashed))
    view = pool.view()
    seen = []
    for block_id in view.iter_free_block_ids():
        seen.append(block_id)
        for _ in range(3):
            view.touch_blocks([block_id, 5])
            view.free_blocks([block_id, 5])
    assert seen == [1, 2, 3, 4, 6, 7, 8]


def test_pool_7_a_walk_starts_at_its_first_next() -> None:
    view = make_pool().view()
    walk = view.iter_free_block_ids()
    view.touch_blocks([1, 2])
    view.free_blocks([2])
    assert list(walk) == [3, 4, 5, 6, 7, 8, 2]


def test_dropped_walks_leave_nothing_behind() -> None:
    pool = make_pool()
    walk = pool.iter_free_block_ids()
    next(walk)
    assert len(pool._queue._walks) == 1
    del walk
    gc.collect()
    assert not pool._queue._walks


# --- memory ---


def test_a_block_costs_at_most_100_bytes_and_nothing_to_the_garbage_collector() -> None:
    gc.collect()
    before = len(gc.get_objects())
    tracemalloc.start()
    try:
        pool = BlockPool(200_000)
        size, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size <= peak <= 100 * pool.num_blocks
    assert len(gc.get_objects()) - before < 100
