"""The pool laws, one by one, on the reference pool and its view.

``test_pool_machine.py`` runs everything at once, against an oracle.
"""

from __future__ import annotations

import copy
import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import islice
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
    ViewClosedError,
    make_offload_key,
)
from kvview_reference import pool as pool_module
from kvview_reference import walks
from kvview_reference.pool import BlockPool
from kvview_reference.pool_view import BlockPoolView

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


@pytest.mark.parametrize("hashed", [False, True])
def test_pool_1_a_touched_block_is_not_allocated(hashed: bool) -> None:
    pool = make_pool(hashed=hashed)
    view = pool.view()
    view.touch_blocks([1, 5])
    assert view.num_free_blocks() == 6
    assert not view.is_free(1)
    assert list(view.iter_free_block_ids()) == [2, 3, 4, 6, 7, 8]
    assert pool.allocate_blocks(6) == [2, 3, 4, 6, 7, 8]
    with pytest.raises(NoFreeBlocksError):
        pool.allocate_blocks(1)
    view.free_blocks([5, 1])
    assert pool.allocate_blocks(2) == [5, 1]


def test_pool_1_a_touched_block_keeps_its_hash(pool: BlockPool, view: BlockPoolView) -> None:
    view.touch_blocks([1])
    pool.allocate_blocks(7)
    assert view.block_keys([1])[0] == (key(1),)
    assert view.find_cached_block(key(1)) == 1
    assert view.find_cached_block(key(2)) is None


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


def test_pool_2_n_touches_need_n_frees(pool: BlockPool, view: BlockPoolView) -> None:
    view.touch_blocks([3, 3])
    view.touch_blocks([3])
    assert view.held_blocks() == {3: 3}
    view.free_blocks([3])
    view.free_blocks([3])
    assert not view.is_free(3)
    view.free_blocks([3])
    assert view.is_free(3)
    assert view.held_blocks() == {}
    assert list(pool.iter_free_block_ids()) == [1, 2, 4, 5, 6, 7, 8, 3]


@pytest.mark.parametrize("hashed", [False, True])
def test_pool_2_repeats_in_one_call_queue_a_block_once_where_the_last_frees_it(
    hashed: bool,
) -> None:
    pool = make_pool(5, hashed=hashed)
    block_ids = pool.allocate_blocks(4)
    if hashed:
        cache(pool, *block_ids)
    pool.touch_blocks([1, 1, 2])
    pool.free_blocks([1, 2, 1, 3, 2, 1, 4])
    assert list(pool.iter_free_block_ids()) == [3, 2, 1, 4]
    assert pool.num_free_blocks() == 4
    assert pool.allocate_blocks(4) == [3, 2, 1, 4]


def test_pool_2_a_block_is_queued_once_however_often_it_changes_sides() -> None:
    pool = make_pool(5, hashed=False)
    for _ in range(3):
        pool.touch_blocks([2])
        pool.free_blocks([2])  # to the front
        pool.touch_blocks([2])
        cache(pool, 2)
        pool.free_blocks([2])  # to the back
        pool.touch_blocks([2])
        pool.evict_blocks([2])
        pool.free_blocks([2])  # and to the front again
    assert list(pool.iter_free_block_ids()) == [2, 1, 3, 4]
    assert pool.allocate_blocks(4) == [2, 1, 3, 4]


# --- POOL-3 and POOL-4 ---


@pytest.mark.parametrize("bad", NO_IDS, ids=repr)
@pytest.mark.parametrize("method", ["touch_blocks", "free_blocks"])
def test_pool_3_4_an_id_that_is_no_block_raises_and_nothing_changed(method: str, bad: Any) -> None:
    pool = make_pool(events=True)
    view = pool.view()
    view.touch_blocks([1, 2, 2])
    before = state(pool, view)
    for block_ids in ([bad], [0, 1, 2, bad], [bad, 1], [2, bad, bad], (2, 1, bad, 0)):
        with pytest.raises(UnknownBlockError, match="POOL-4"):
            getattr(view, method)(block_ids)
        assert state(pool, view) == before


@pytest.mark.parametrize("bad", [b for b in NO_IDS if not isinstance(b, (bool, np.integer))])
def test_the_engines_own_calls_are_all_or_nothing_too(pool: BlockPool, bad: Any) -> None:
    pool.touch_blocks([1, 2, 2])
    before = state(pool)
    calls: list[Callable[[list[Any]], object]] = [
        pool.touch_blocks,
        pool.free_blocks,
        pool.evict_blocks,
        lambda block_ids: pool.cache_blocks(block_ids, [b"x"] * len(block_ids), block_size=1),
    ]
    for call in calls:
        if isinstance(bad, float) and bad == 0 and call in calls[:2]:
            continue  # equal to the null block
        if isinstance(bad, torch.Tensor) and bad.ndim == 0 and call in calls[:2]:
            continue  # an index, like numpy's
        with pytest.raises(UnknownBlockError):
            call([1, 2, bad])
        assert state(pool) == before


@pytest.mark.parametrize("bad", NO_IDS, ids=repr)
def test_pool_4_queries_of_an_id_that_is_no_block_raise(view: BlockPoolView, bad: Any) -> None:
    with pytest.raises(UnknownBlockError):
        view.is_free(bad)
    with pytest.raises(UnknownBlockError):
        view.block_keys([bad])[0]


@pytest.mark.parametrize("block_ids", [[1], [2, 1], [2, 2], [2, 2, 0], [0, 3, 2]])
def test_pool_3_4_what_the_view_does_not_hold_cannot_be_freed(
    pool: BlockPool, view: BlockPoolView, block_ids: list[int]
) -> None:
    pool.touch_blocks([1, 2, 3])
    view.touch_blocks([2])
    before = state(pool, view)
    with pytest.raises(BlockNotHeldError, match=r"POOL-4.*'test'"):
        view.free_blocks(block_ids)
    assert state(pool, view) == before


def test_pool_4_an_unknown_id_is_named_also_behind_one_that_is_not_held(
    view: BlockPoolView,
) -> None:
    with pytest.raises(UnknownBlockError):
        view.free_blocks([1, -1])


def test_pool_4_two_views_cannot_free_each_others_holds(pool: BlockPool) -> None:
    ours, theirs = pool.view("ours"), pool.view("theirs")
    ours.touch_blocks([1, 2])
    theirs.touch_blocks([2, 3])
    with pytest.raises(BlockNotHeldError, match="ours"):
        ours.free_blocks([2, 3])
    with pytest.raises(BlockNotHeldError, match="theirs"):
        theirs.free_blocks([1])
    ours.free_blocks([2])
    assert not ours.is_free(2)
    theirs.free_blocks([2])
    assert ours.is_free(2)
    assert (ours.held_blocks(), theirs.held_blocks()) == ({1: 1}, {3: 1})


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


def test_an_empty_call_changes_nothing(pool: BlockPool, view: BlockPoolView) -> None:
    before = state(pool, view)
    view.touch_blocks([])
    view.free_blocks([])
    assert state(pool, view) == before


# --- POOL-5 ---


def test_pool_5_the_null_block_is_skipped(pool: BlockPool, view: BlockPoolView) -> None:
    view.touch_blocks([0, 1, 0])
    assert view.held_blocks() == {1: 1}
    view.free_blocks([0, 0, 1, 0])
    pool.touch_blocks([0])
    pool.free_blocks([0, 0])
    assert pool.ref_cnt(0) == 0
    assert not view.is_free(0)
    assert pool.num_free_blocks() == 8
    assert 0 not in list(view.iter_free_block_ids())


def test_pool_5_the_null_block_is_never_cached(pool: BlockPool, view: BlockPoolView) -> None:
    pool.touch_blocks([1])
    pool.cache_blocks([0, 1], [b"x", b"y"], block_size=16)
    pool.free_blocks([1])
    assert view.block_keys([0])[0] == ()
    assert view.find_cached_block(key("x")) is None
    assert 0 not in dict(view.iter_free_block_ids_with_hash())
    pool.evict_blocks([0])


# --- POOL-6 and POOL-7 ---


def test_pool_6_the_walk_yields_hashed_free_blocks_next_victim_first(pool: BlockPool) -> None:
    pool.allocate_blocks(3)
    cache(pool, 2)
    pool.free_blocks([1, 2, 3])
    view = pool.view()
    expected = [(b, key(b)) for b in (4, 5, 6, 7, 8, 2)]
    assert list(view.iter_free_block_ids_with_hash()) == expected
    assert list(view.iter_free_block_ids()) == [1, 3, 4, 5, 6, 7, 8, 2]


def test_pool_6_a_block_with_several_hashes_yields_each(pool: BlockPool) -> None:
    pool.touch_blocks([1])
    pool.cache_blocks([1, 1, 1], [b"a", b"b", b"a"], block_size=16)
    pool.cache_blocks([1], [b"a"], block_size=16, group_idx=1)
    pool.free_blocks([1])
    assert list(pool.iter_free_block_ids_with_hash())[-4:] == [
        *((1, key(1)), (1, key("a")), (1, key("b")), (1, key("a", 1)))
    ]


def test_pool_13_a_dropped_walk_is_forgotten(pool: BlockPool, view: BlockPoolView) -> None:
    walk = view.walk_free_blocks()
    assert len(pool._walks) == 1
    del walk
    gc.collect()
    assert not pool._walks


def test_pool_14_views_of_two_owners_are_both_told(pool: BlockPool) -> None:
    told: list[tuple[str, int]] = []
    for name in ("a", "b"):
        view = pool.view(name)
        view.touch_blocks([1])
        view.free_blocks_with_notice([1], lambda block_id, name=name: told.append((name, block_id)))  # type: ignore[misc]
    pool.allocate_blocks(pool.num_free_blocks())
    assert told == [("a", 1), ("b", 1)]


def steps(call: Callable[[], object]) -> int:
    """Lines of the pool that a call runs through: its cost, without a clock."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in (pool_module.__file__, walks.__file__):
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


@pytest.mark.parametrize("walk", ["iter_free_block_ids_with_hash", "iter_free_block_ids"])
def test_pool_6_taking_k_items_costs_k_not_the_pool(walk: str) -> None:
    pool = make_pool(5001)
    view = pool.view()

    def take(num_items: int) -> int:
        return steps(lambda: list(islice(getattr(view, walk)(), num_items)))

    assert take(1) < 100
    assert take(100) < 100 + 100 * 10
    # The blocks behind the first victim are taken: the first walk that comes
    # across them pays for it, and no other.
    view.touch_blocks(range(2, 4001))
    take(2)
    assert take(2) < 2 * walks._ENTRIES_PER_LOOK[0] * 10
    assert list(islice(view.iter_free_block_ids(), 3)) == [1, 4001, 4002]


def test_pool_6_after_a_reset_a_walk_does_not_pass_what_was_hashed() -> None:
    pool = make_pool(5001)
    assert pool.reset_prefix_cache()
    assert pool.allocate_blocks(2) == [1, 2]
    cache(pool, 1)
    pool.free_blocks([1])
    assert steps(lambda: list(pool.iter_free_block_ids_with_hash())) < 100
    assert list(pool.iter_free_block_ids_with_hash()) == [(1, key(1))]


@pytest.mark.parametrize("per_look", [1, 2, 3, 256])
def test_pool_7_touching_and_freeing_while_walking(
    pool: BlockPool, view: BlockPoolView, monkeypatch: pytest.MonkeyPatch, per_look: int
) -> None:
    monkeypatch.setattr(walks, "_ENTRIES_PER_LOOK", (per_look, 256))
    seen = []
    for block_id, block_hash in view.iter_free_block_ids_with_hash():
        assert view.is_free(block_id)
        assert block_hash in view.block_keys([block_id])[0]
        seen.append(block_id)
        view.touch_blocks([block_id])
        if block_id == 2:
            view.touch_blocks([3, 6])
        if block_id == 4:
            view.free_blocks([1, 2, 3])  # they join behind the walk
    assert seen == [1, 2, 4, 5, 7, 8]
    assert list(view.iter_free_block_ids()) == [1, 2, 3]


@pytest.mark.parametrize("num_unhashed", [0, 3, 8])
def test_pool_7_the_walk_goes_on_while_entries_are_moved_together(
    pool: BlockPool, monkeypatch: pytest.MonkeyPatch, num_unhashed: int
) -> None:
    monkeypatch.setattr(pool_module, "_MAX_ZEROS", 0)
    monkeypatch.setattr(pool_module, "_FEWEST_MOVED", 1)
    pool.free_blocks(pool.allocate_blocks(num_unhashed))
    view = pool.view()
    seen = []
    for block_id in view.iter_free_block_ids():
        seen.append(block_id)
        for _ in range(3):
            view.touch_blocks([block_id, 5])
            view.free_blocks([block_id, 5])
    assert seen == [1, 2, 3, 4, 6, 7, 8]


@pytest.mark.parametrize("hashed", [False, True])
def test_pool_7_allocation_eviction_and_reset_while_walking(hashed: bool) -> None:
    pool = make_pool(hashed=hashed)
    walk = pool.iter_free_block_ids()
    hashes = pool.iter_free_block_ids_with_hash()
    assert next(walk) == 1
    assert next(hashes, None) == ((1, key(1)) if hashed else None)
    assert pool.allocate_blocks(3) == [1, 2, 3]
    pool.free_blocks([1, 2, 3])  # they join again, on top of where the walk stands
    assert next(walk) == 4
    pool.evict_blocks([4, 5])
    assert next(hashes, None) == ((6, key(6)) if hashed else None)
    assert next(walk) == 5
    assert pool.reset_prefix_cache()
    assert list(walk) == [6, 7, 8]
    assert list(hashes) == []
    assert list(pool.iter_free_block_ids()) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("change", ["nothing", "freed anew", "evicted"])
def test_pool_7_a_block_that_changes_between_its_hashes_leaves_the_walk(
    pool: BlockPool, change: str
) -> None:
    pool.touch_blocks([1])
    pool.cache_blocks([1, 1], [b"other", b"third"], block_size=16)
    pool.free_blocks([1])
    walk = pool.iter_free_block_ids_with_hash()
    assert list(islice(walk, 9))[-2:] == [(1, key(1)), (1, key("other"))]
    if change == "freed anew":
        pool.touch_blocks([1])
        pool.free_blocks([1])
    elif change == "evicted":
        pool.evict_blocks([1])
    assert list(walk) == ([(1, key("third"))] if change == "nothing" else [])


def test_pool_7_nested_walks_do_not_disturb_each_other(pool: BlockPool) -> None:
    pairs = [
        (outer, inner)
        for outer, _ in pool.iter_free_block_ids_with_hash()
        for inner in pool.iter_free_block_ids()
    ]
    assert pairs == [(a, b) for a in range(1, 9) for b in range(1, 9)]


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


def test_pool_9_a_reset_is_refused_while_a_view_holds_blocks(
    pool: BlockPool, view: BlockPoolView
) -> None:
    view.touch_blocks([1])
    before = state(pool, view)
    assert not pool.reset_prefix_cache()
    assert state(pool, view) == before
    assert view.held_blocks() == {1: 1}
    view.free_blocks([1])
    assert pool.reset_prefix_cache()
    assert view.find_cached_block(key(1)) is None
    assert list(view.iter_free_block_ids()) == [2, 3, 4, 5, 6, 7, 8, 1]


def test_pool_10_close_reports_what_was_held_and_every_call_raises(
    pool: BlockPool, view: BlockPoolView
) -> None:
    view.touch_blocks([1, 1, 2])
    walks: list[Iterator[object]] = [
        *(view.iter_free_block_ids(), view.iter_free_block_ids_with_hash()),
        *(view.iter_free_block_ids(), view.iter_free_block_ids_with_hash()),
    ]
    list(islice(walks[0], 6))  # at its end, but not told so
    next(walks[1])
    other = pool.iter_free_block_ids()
    next(other)
    assert view.close() == {1: 2, 2: 1}
    assert view.close() == {}
    assert list(other) == [4, 5, 6, 7, 8]
    calls: list[Callable[[], object]] = [
        *(lambda: view.touch_blocks([]), lambda: view.free_blocks([])),
        *(view.num_free_blocks, view.held_blocks),
        *(lambda: view.is_free(0), lambda: view.block_keys([0])[0]),
        lambda: view.find_cached_block(key(1)),
        *(lambda: next(view.iter_free_block_ids_with_hash()), lambda: next(walks[0])),
        *(lambda walk=walk: next(walk) for walk in walks[1:]),
    ]
    assert (view.num_blocks, view.null_block_id) == (9, 0), "facts, no calls"
    for call in calls:
        with pytest.raises(ViewClosedError, match=r"POOL-10.*'test'"):
            call()
    assert pool.ref_cnt(1) == 2
    assert not pool._walks


def test_pool_11_hashed_blocks_are_evicted_in_the_order_freed(
    pool: BlockPool, view: BlockPoolView
) -> None:
    view.touch_blocks([5, 1, 7, 3])
    view.free_blocks([7, 1])
    view.free_blocks([3, 5])
    assert list(view.iter_free_block_ids()) == [2, 4, 6, 8, 7, 1, 3, 5]


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
