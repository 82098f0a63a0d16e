"""Walks over the real free queue while the engine moves blocks, which the kit's search rarely does.

``test_conformance.py`` has the laws. Each test here fails for a fault of ``kvview_vllm.pool.walks``
that the search does not find.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from test_conformance import VLLMPool  # type: ignore[import-not-found]

from kvview import SupportsGiveBack


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
