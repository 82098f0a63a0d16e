"""Walks over the real free queue while the engine moves blocks, which the kit's search rarely does.

``test_conformance.py`` has the laws. Each test here fails for a fault of ``kvview_vllm.pool.walks``
that the search does not find.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from test_conformance import TestVLLMPool as Suite  # type: ignore[import-not-found]
from test_conformance import VLLMPool

from kvview import SupportsGiveBack
from kvview.testing.effort import Effort
from kvview.testing.suites.conformance import find_failures
from kvview_vllm.pool.walks import ResumedWalk


class Engine(VLLMPool):  # type: ignore[misc]
    """The real pool with the moves of an engine, and some free blocks that have a key."""

    def __init__(self, num_blocks: int, num_cached: int) -> None:
        super().__init__(num_blocks)
        self.order = self.allocate(num_cached)
        self.cache_all(self.order)
        self.release(self.order)

    def cache_all(self, block_ids: list[int]) -> None:
        self.cache(block_ids, [b"%032d" % block_id for block_id in block_ids], 0)

    def walk(self) -> Any:
        return (block_id for block_id, _ in self.view.iter_free_block_ids_with_hash())


def taken(walk: Any, number: int) -> list[int]:
    return [block_id for block_id, _ in walk.take(number)]


def test_pool_7_freed_blocks_do_not_join_a_walk() -> None:
    engine = Engine(16, 6)
    walked = []
    for block_id in islice(engine.walk(), 100):
        walked.append(block_id)
        engine.view.touch_blocks([block_id])
        engine.view.free_blocks([block_id])  # to the tail, where an endless walk would find it
    assert walked == engine.order


@pytest.mark.parametrize("first", [19, 16, 10, 1])
@pytest.mark.parametrize("engine_first", [True, False])
def test_pool_7_blocks_that_the_engine_frees_do_not_join_a_walk(
    first: int, engine_first: bool
) -> None:
    engine = Engine(30, 20)
    (late,) = engine.allocate(1)
    engine.cache_all([late])
    walk = engine.walk()
    assert next(walk) == engine.order[0]
    if engine_first:
        engine.release([late])
    engine.view.touch_blocks(engine.order[first:])
    if not engine_first:
        engine.release([late])
    assert list(walk) == engine.order[1:first]


def test_pool_7_a_walk_continues_behind_blocks_that_the_engine_took() -> None:
    engine = Engine(100, 99)
    order = engine.order
    walk = engine.walk()
    assert list(islice(walk, 16)) == order[:16]
    assert engine.allocate(30) == order[:30]
    engine.share([order[50], order[-1]])
    assert list(walk) == [*order[30:50], *order[51:-1]]


def test_pool_7_a_walk_misses_no_block_when_the_engine_moves_its_neighbours() -> None:
    engine = Engine(41, 40)
    order = engine.order
    walk = engine.walk()
    walked = [next(walk)]
    moved = [order[15], order[16], order[39]]  # read last, read next, and the end of the walk
    engine.share(moved)
    engine.release(moved)
    walked += walk
    assert len(walked) == len(set(walked))
    assert set(walked) >= set(order) - set(moved)


def test_pool_13_a_run_that_the_engine_moved_as_a_whole_is_found_again() -> None:
    engine = Engine(40, 20)
    walk = engine.view.walk_free_blocks()
    found = taken(walk, 5)
    engine.share(engine.order[2:8])  # both sides of the place
    engine.release(engine.order[2:8])
    for _ in range(12):  # until as many blocks were read as are free
        found += taken(walk, 8)
        last = list(engine.walk())[-4:]
        engine.view.touch_blocks(last)
        engine.view.free_blocks(last)
    assert set(engine.order) <= set(found)


def test_pool_13_blocks_that_stayed_come_once_when_the_engine_took_the_place() -> None:
    engine = Engine(40, 20)
    order = engine.order
    walk = engine.view.walk_free_blocks()
    assert taken(walk, 5) == order[:5]
    engine.share(order[3:6])
    assert taken(walk, 3) == order[6:9]
    assert taken(walk, 99) == order[9:]


def test_pool_13_no_block_is_skipped_when_the_place_returns_at_the_tail() -> None:
    engine = Engine(40, 20)
    order = engine.order
    walk = engine.view.walk_free_blocks()
    assert taken(walk, 5) == order[:5]
    engine.share([order[4]])
    engine.release([order[4]])
    assert taken(walk, 15) == order[5:]


def test_pool_13_no_block_is_skipped_when_the_place_gets_another_key() -> None:
    engine = Engine(40, 20)
    order = engine.order
    walk = engine.view.walk_free_blocks()
    assert taken(walk, 5) == order[:5]
    engine.allocate(39)
    engine.cache(order, [b"%032d" % (100 + block_id) for block_id in order], 0)
    engine.release(order)
    assert set(taken(walk, 99)) == set(order)


def test_pool_12_blocks_given_back_to_the_head_are_not_part_of_an_open_walk() -> None:
    engine = Engine(12, 5)
    pool_view: Any = engine.view
    if not isinstance(pool_view, SupportsGiveBack):
        pytest.skip("this release cannot release blocks to the head")
    order = engine.order
    engine.view.touch_blocks(order[:2])
    walk = engine.walk()
    assert next(walk) == order[2]
    pool_view.give_back_blocks(order[:2])
    assert list(walk) == order[3:]
    assert list(engine.walk()) == order


def test_pool_13_the_search_finds_a_restart_without_an_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Read at once after the restart, because other walks and later moves hide it.
    monkeypatch.setattr(ResumedWalk, "restart", lambda walk: walk.take(0) and None)
    assert {*find_failures(Suite, Effort(seeds=400, is_brief=True))} == {"POOL-13"}
