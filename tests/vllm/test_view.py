"""The pool laws on the real BlockPool of whichever vLLM release can be imported.

The oracle is plain dicts and sets; the engine's moves go through the pool's own
public methods, as its scheduler makes them.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from pools import NULL, Engine, block_pool, vllm  # type: ignore[import-not-found]

import kvview
from kvview import (
    BlockNotHeldError,
    OffloadKey,
    SupportsGiveBack,
    UnknownBlockError,
    UnsupportedEngineError,
    ViewClosedError,
    make_offload_key,
)
from kvview_vllm import view, walks
from kvview_vllm.pool import VLLMBlockPoolView
from kvview_vllm.releases import TESTED

CHUNK_SIZES = (walks._FIRST_CHUNK, walks._LARGEST_CHUNK)


@pytest.fixture
def engine() -> Engine:
    return Engine(16)


@pytest.fixture
def pool_view(engine: Engine) -> VLLMBlockPoolView:
    return view(engine.pool, owner="tester")


# --- what the view is ---


@pytest.mark.parametrize("name", [name for name in kvview.__all__ if name.startswith("Supports")])
def test_view_has_every_pool_query(engine: Engine, pool_view: VLLMBlockPoolView, name: str) -> None:
    protocol = getattr(kvview, name)
    if protocol.__module__ != "kvview.pool.queries":
        pytest.skip("not a query of the pool")
    if name == "SupportsGiveBack":
        pytest.skip("POOL-12 is tested where it is built")
    if name == "SupportsReuseNotice":
        has_it = pool_view.release.reuse_watchers
        assert isinstance(pool_view, protocol) == has_it
    else:
        assert isinstance(pool_view, protocol)


def test_no_block_object_is_reachable_by_a_public_name(pool_view: VLLMBlockPoolView) -> None:
    public = [name for name in dir(pool_view) if not name.startswith("_")]
    answers = [getattr(pool_view, name) for name in public]
    assert not any(type(answer).__module__.startswith("vllm") for answer in answers)


def test_unknown_touch_is_refused() -> None:
    class Fork(block_pool.BlockPool):  # type: ignore[misc]
        def touch(self, blocks: Any, deadline: float) -> None: ...

    forked = Engine(4).pool
    forked.__class__ = Fork
    with pytest.raises(UnsupportedEngineError) as caught:
        view(forked)
    for part in ("pool seam", vllm.__version__, "touch(blocks, deadline)", TESTED):
        assert part in str(caught.value)


def test_what_is_no_pool_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"without blocks, .*null_block"):
        view(object())


def test_version_string_may_lie(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.1.dev1+fork")
    assert view(engine.pool).release == replace(engine.release, version="0.1.dev1+fork")
    assert "outside the tested range" in caplog.text


def test_a_release_of_the_future_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with pytest.raises(UnsupportedEngineError) as caught:
        view(engine.pool)
    for part in ("pool seam", "0.99.0", TESTED, "KVVIEW_ALLOW_UNTESTED_VLLM=1"):
        assert part in str(caught.value)
    monkeypatch.setenv("KVVIEW_ALLOW_UNTESTED_VLLM", "1")
    if engine.release.reuse_watchers:
        assert view(engine.pool).release == replace(engine.release, version="0.99.0")
        assert "outside the tested range" in caplog.text
    else:  # what the newest release has is not there: renamed, for all we know
        with pytest.raises(UnsupportedEngineError, match=r"unhashed_first|reuse_watchers"):
            view(engine.pool)


def test_without_vllm_use_says_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "import kvview_vllm\n"
        "try: kvview_vllm.view(object())\n"
        "except ImportError as error: print(error)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert f"kvview_vllm wraps an installed vLLM ({TESTED})" in answer.stdout


# --- POOL-1 to POOL-5 ---


def test_pool_1_touched_block_is_not_allocated(
    engine: Engine, pool_view: VLLMBlockPoolView
) -> None:
    pool_view.touch_blocks([3, 5])
    assert not pool_view.is_free(3)
    assert not {3, 5} & set(engine.allocate(13))
    pool_view.free_blocks([5, 3])
    assert set(engine.allocate(2)) == {3, 5}


def test_pool_2_repeated_ids_are_counted_and_queued_once(
    engine: Engine, pool_view: VLLMBlockPoolView
) -> None:
    pool_view.touch_blocks([4, 4, 7, 4])
    pool_view.free_blocks([4, 4])
    assert not pool_view.is_free(4)
    pool_view.touch_blocks((4,))
    pool_view.free_blocks([4, 7, 4])
    assert sorted(engine.queue()) == list(range(1, 16))
    assert len(engine.allocate(15)) == 15


def test_pool_2_engine_references_stay(engine: Engine, pool_view: VLLMBlockPoolView) -> None:
    (block_id,) = engine.allocate(1)
    pool_view.touch_blocks([block_id, block_id])
    pool_view.free_blocks([block_id, block_id])
    assert engine.pool.blocks[block_id].ref_cnt == 1
    with pytest.raises(BlockNotHeldError):
        pool_view.free_blocks([block_id])


@pytest.mark.parametrize("bad", [-1, 16, 10**30, True, False, 3.0, "3", None, b"\3"])
@pytest.mark.parametrize("method", ["touch_blocks", "free_blocks"])
def test_pool_3_and_4_unknown_id_changes_nothing(
    engine: Engine, pool_view: VLLMBlockPoolView, bad: Any, method: str
) -> None:
    pool_view.touch_blocks([2, 3, 3])
    before = engine.queue()
    for block_ids in ([bad], [2, 3, bad], [bad, 2], [2, 3, 3, 0, bad, 2]):
        with pytest.raises(UnknownBlockError, match="POOL-4"):
            getattr(pool_view, method)(block_ids)
    assert engine.queue() == before
    assert pool_view.held_blocks() == {2: 1, 3: 2}
    with pytest.raises(UnknownBlockError):
        pool_view.is_free(bad)
    with pytest.raises(UnknownBlockError):
        pool_view.block_keys([bad])[0]


def test_pool_4_numpy_ids_are_no_ids(pool_view: VLLMBlockPoolView) -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(UnknownBlockError):
        pool_view.touch_blocks(numpy.array([1, 2]))
    assert pool_view.held_blocks() == {}


def test_pool_3_and_4_free_of_what_is_not_held_changes_nothing(
    engine: Engine, pool_view: VLLMBlockPoolView
) -> None:
    other = view(engine.pool, owner="other")
    other.touch_blocks([2])
    pool_view.touch_blocks([3, 4])
    before = engine.queue()
    for block_ids in ([2], [3, 2], [3, 3], [4, 3, 4]):
        with pytest.raises(BlockNotHeldError, match="tester"):
            pool_view.free_blocks(block_ids)
    assert engine.queue() == before
    assert pool_view.held_blocks() == {3: 1, 4: 1}
    assert [engine.pool.blocks[b].ref_cnt for b in (2, 3, 4)] == [1, 1, 1]


def test_pool_5_null_block_is_skipped(engine: Engine, pool_view: VLLMBlockPoolView) -> None:
    references = engine.pool.null_block.ref_cnt
    pool_view.touch_blocks([NULL, 3, NULL])
    pool_view.free_blocks([NULL, NULL, NULL, 3])
    pool_view.touch_blocks([NULL])
    pool_view.free_blocks([NULL])
    pool_view.touch_blocks([])
    pool_view.free_blocks([])
    assert engine.pool.null_block.ref_cnt == references
    assert pool_view.held_blocks() == {}
    assert not pool_view.is_free(NULL)
    assert NULL not in list(pool_view.iter_free_block_ids())
    assert pool_view.null_block_id == NULL


# --- POOL-6 to POOL-8: walks ---


def test_pool_6_order_and_hashes(engine: Engine, pool_view: VLLMBlockPoolView) -> None:
    keys = engine.cached_and_free(4)
    assert list(pool_view.iter_free_block_ids_with_hash()) == list(keys.items())
    assert list(pool_view.iter_free_block_ids()) == engine.queue()


def test_pool_6_a_walk_reads_little_ahead() -> None:
    engine = Engine(5000)
    pool_view = view(engine.pool)
    engine.pool.blocks[200].next_free_block = object()  # a walk that comes here fails
    walk = pool_view.iter_free_block_ids()
    assert [next(walk) for _ in range(60)] == list(range(1, 61))


def test_pool_6_several_hashes(engine: Engine, pool_view: VLLMBlockPoolView) -> None:
    if not engine.release.several_hashes:
        pytest.skip("this release has one hash a block")
    first, second = engine.allocate(2)
    keys = [engine.cache(first, b"a" * 32)]
    keys += [engine.cache_again(first, b"c" * 32, 1), engine.cache_again(first, b"b" * 32)]
    other = engine.cache(second, b"d" * 32)
    engine.free([first, second])
    assert pool_view.block_keys([first])[0] == (keys[0], *sorted(keys[1:]))
    assert {pool_view.find_cached_block(key) for key in keys} == {first}
    items = [(first, key) for key in pool_view.block_keys([first])[0]]
    assert list(pool_view.iter_free_block_ids_with_hash()) == [*items, (second, other)]
    walk = pool_view.iter_free_block_ids_with_hash()
    assert next(walk) == items[0]
    pool_view.touch_blocks([first])
    assert list(walk) == [(second, other)]


@pytest.mark.parametrize("num_ahead", [1, 3, 40])
def test_pool_7_touching_what_a_walk_yields(num_ahead: int) -> None:
    engine = Engine(200)
    pool_view = view(engine.pool)
    keys = engine.cached_and_free(150)
    order = list(keys)
    walked = []
    for block_id, key in islice(pool_view.iter_free_block_ids_with_hash(), 200):
        assert keys[block_id] == key
        walked.append(block_id)
        at = order.index(block_id)
        pool_view.touch_blocks(order[at : at + num_ahead])
    assert walked == order[::num_ahead]
    assert set(pool_view.held_blocks()) == set(order)


def test_pool_7_freed_blocks_do_not_join_a_walk(
    engine: Engine, pool_view: VLLMBlockPoolView
) -> None:
    order = list(engine.cached_and_free(6))
    walked = []
    for block_id, _ in islice(pool_view.iter_free_block_ids_with_hash(), 100):
        walked.append(block_id)
        pool_view.touch_blocks([block_id])
        pool_view.free_blocks([block_id])  # goes to the tail, and would come for ever
    assert walked == order


def test_pool_7_the_last_block_may_leave_and_come_back(
    engine: Engine, pool_view: VLLMBlockPoolView
) -> None:
    order = list(engine.cached_and_free(5))
    walk = pool_view.iter_free_block_ids_with_hash()
    assert next(walk)[0] == order[0]
    pool_view.touch_blocks([order[-1], order[1]])
    pool_view.free_blocks([order[-1], order[1]])
    assert [block_id for block_id, _ in walk] == order[2:4]


def test_pool_7_a_walk_survives_the_engine() -> None:
    engine = Engine(100)
    pool_view = view(engine.pool)
    order = list(engine.cached_and_free(99))
    walk = pool_view.iter_free_block_ids_with_hash()
    assert [next(walk)[0] for _ in range(16)] == order[:16]
    assert engine.allocate(30) == order[:30]
    engine.hit([order[50], order[-1]])
    rest = [block_id for block_id, _ in walk]
    assert rest == [*order[30:50], *order[51:-1]]


@pytest.mark.parametrize("touched", [slice(19, 20), slice(16, 20), slice(10, 20), slice(1, 20)])
@pytest.mark.parametrize("engine_first", [True, False])
def test_pool_7_what_the_engine_frees_does_not_join_a_walk(
    touched: slice, engine_first: bool
) -> None:
    engine = Engine(30)
    pool_view = view(engine.pool)
    (late,) = engine.allocate(1)
    engine.cache(late, b"l" * 32)
    order = list(engine.cached_and_free(20))
    walk = pool_view.iter_free_block_ids_with_hash()
    assert next(walk)[0] == order[0]
    if engine_first:
        engine.free([late])
    pool_view.touch_blocks(order[touched])
    if not engine_first:
        engine.free([late])
    assert [block_id for block_id, _ in walk] == order[1 : touched.start]


def test_pool_6_a_walk_does_not_go_back() -> None:
    engine = Engine(100)
    pool_view = view(engine.pool)
    walk = pool_view.iter_free_block_ids()
    assert [next(walk) for _ in range(CHUNK_SIZES[0])] == list(range(1, 17))
    engine.pool.blocks[1].next_free_block = object()  # a walk that comes here fails
    pool_view.touch_blocks([17, 18])
    assert next(walk) == 19


def test_pool_7_nothing_is_missed_when_the_engine_moves_a_run() -> None:
    engine = Engine(41)
    pool_view = view(engine.pool)
    order = list(engine.cached_and_free(40))
    walk = pool_view.iter_free_block_ids_with_hash()
    walked = [next(walk)[0]]
    moved = [order[15], order[16], order[39]]  # read last, read next, and the end of the walk
    engine.hit(moved)
    engine.free(moved)
    walked += [block_id for block_id, _ in walk]
    assert len(walked) == len(set(walked))
    assert set(walked) >= set(order) - set(moved)


def test_pool_7_cache_reset_ends_a_walk(engine: Engine, pool_view: VLLMBlockPoolView) -> None:
    engine.cached_and_free(5)
    walk = pool_view.iter_free_block_ids_with_hash()
    next(walk)
    assert engine.reset()
    assert list(walk) == []


def test_dropped_walks_are_forgotten(pool_view: VLLMBlockPoolView) -> None:
    walks = [pool_view.iter_free_block_ids() for _ in range(3)]
    assert [next(walk) for walk in walks] == [1, 1, 1]
    assert len(pool_view.before_touch) == 3
    walks.clear()
    assert not pool_view.before_touch


def test_dropped_resumed_walks_are_forgotten(pool_view: VLLMBlockPoolView) -> None:
    walks_open = [pool_view.walk_free_blocks() for _ in range(2)]
    assert len(pool_view.before_touch) == 2
    walks_open[0].close()
    walks_open.clear()
    assert not pool_view.before_touch


def test_pool_13_a_run_that_moved_unseen_is_found_again() -> None:
    """The engine takes and gives back both sides of the place, in order, in one piece."""
    engine = Engine(40)
    pool_view = view(engine.pool)
    order = list(engine.cached_and_free(20))
    walk = pool_view.walk_free_blocks()
    taken = [block_id for block_id, _ in walk.take(5)]
    engine.hit(order[2:8])
    engine.free(order[2:8])
    for _ in range(12):  # steps of an engine, until as many were read as are free
        taken += [block_id for block_id, _ in walk.take(8)]
        block_ids = list(pool_view.iter_free_block_ids_with_hash())[-4:]
        pool_view.touch_blocks([block_id for block_id, _ in block_ids])
        pool_view.free_blocks([block_id for block_id, _ in block_ids])
    assert set(order) <= set(taken)


def test_pool_13_what_stayed_comes_once_when_the_engine_took_the_place() -> None:
    engine = Engine(40)
    pool_view = view(engine.pool)
    order = list(engine.cached_and_free(20))
    walk = pool_view.walk_free_blocks()
    assert [block_id for block_id, _ in walk.take(5)] == order[:5]
    engine.hit(order[3:6])
    assert [block_id for block_id, _ in walk.take(3)] == order[6:9]
    assert [block_id for block_id, _ in walk.take(99)] == order[9:]


def test_pool_13_nothing_is_skipped_when_the_place_comes_back_at_the_tail() -> None:
    engine = Engine(40)
    pool_view = view(engine.pool)
    order = list(engine.cached_and_free(20))
    walk = pool_view.walk_free_blocks()
    assert [block_id for block_id, _ in walk.take(5)] == order[:5]
    engine.hit([order[4]])
    engine.free([order[4]])
    assert [block_id for block_id, _ in walk.take(15)] == order[5:]


def test_pool_8_hash_is_an_offload_key(engine: Engine, pool_view: VLLMBlockPoolView) -> None:
    (block_id,) = engine.allocate(1)
    assert pool_view.block_keys([block_id])[0] == ()
    key = engine.cache(block_id, b"k" * 32, 258)
    assert key == b"k" * 32 + b"\0\0\1\2"
    assert pool_view.block_keys([block_id])[0] == (key,)
    assert pool_view.find_cached_block(OffloadKey(key)) == block_id
    assert pool_view.find_cached_block(make_offload_key(b"k" * 32, 0)) is None


# --- POOL-9 to POOL-11 ---


def test_pool_9_reset_is_refused_while_held(engine: Engine, pool_view: VLLMBlockPoolView) -> None:
    engine.cached_and_free(2)
    pool_view.touch_blocks([3])
    assert not engine.reset()
    assert pool_view.held_blocks() == {3: 1}
    pool_view.free_blocks([3])
    assert engine.reset()
    assert list(pool_view.iter_free_block_ids_with_hash()) == []


def test_pool_10_closed_view_refuses_everything(
    engine: Engine, pool_view: VLLMBlockPoolView
) -> None:
    engine.cached_and_free(3)
    pool_view.touch_blocks([4, 4, 5])
    walk = pool_view.iter_free_block_ids_with_hash()
    next(walk)
    late_walk = pool_view.iter_free_block_ids()
    assert pool_view.close() == {4: 2, 5: 1}
    assert pool_view.close() == {}
    assert (pool_view.num_blocks, pool_view.null_block_id) == (16, NULL), "facts stay"
    for block_ids in ([4], [NULL], [], [99], ["x"]):
        with pytest.raises(ViewClosedError, match="tester"):
            pool_view.touch_blocks(block_ids)  # type: ignore[arg-type]
        with pytest.raises(ViewClosedError):
            pool_view.free_blocks(block_ids)  # type: ignore[arg-type]
    for call in (
        lambda: next(walk),
        lambda: next(late_walk),
        lambda: next(pool_view.iter_free_block_ids_with_hash()),
        pool_view.num_free_blocks,
        pool_view.held_blocks,
        lambda: pool_view.is_free(1),
        lambda: pool_view.block_keys([1])[0],
        lambda: pool_view.find_cached_block(make_offload_key(b"k" * 32, 0)),
    ):
        with pytest.raises(ViewClosedError):
            call()


def test_pool_10_a_walk_of_a_closed_view_disturbs_no_other_view(
    engine: Engine, pool_view: VLLMBlockPoolView
) -> None:
    engine.cached_and_free(3)
    other = pool_view.open_view("other")
    walk = other.walk_free_blocks()
    walk.take(1)
    other.close()
    pool_view.touch_blocks([4])
    if isinstance(pool_view, SupportsGiveBack):
        pool_view.give_back_blocks([4])
    else:
        pool_view.free_blocks([4])
    assert pool_view.held_blocks() == {}
    with pytest.raises(ViewClosedError):
        walk.take(1)


@pytest.mark.parametrize("occurrences", [[0, 1, 2], [2, 0, 1], [1, 1, 0, 2], [0, 2, 1, 2]])
def test_pool_11_hashed_blocks_are_evicted_in_the_order_freed(
    engine: Engine, pool_view: VLLMBlockPoolView, occurrences: list[int]
) -> None:
    hashed = list(engine.cached_and_free(5))
    block_ids = [hashed[position] for position in occurrences]
    pool_view.touch_blocks(block_ids)
    pool_view.free_blocks(block_ids)
    by_last_occurrence = list(dict.fromkeys(reversed(block_ids)))[::-1]
    assert engine.queue()[-5:] == [*hashed[3:], *by_last_occurrence]


def test_views_of_two_owners_count_apart(engine: Engine, pool_view: VLLMBlockPoolView) -> None:
    other = view(engine.pool, owner="other")
    pool_view.touch_blocks([3])
    other.touch_blocks([3])
    pool_view.free_blocks([3])
    assert not pool_view.is_free(3)
    other.free_blocks([3])
    assert pool_view.is_free(3)


def test_caching_off() -> None:
    engine = Engine(8, enable_caching=False)
    pool_view = view(engine.pool)
    pool_view.touch_blocks([2, 3])
    pool_view.free_blocks([3, 2])
    assert sorted(engine.queue()) == list(range(1, 8))
    assert list(pool_view.iter_free_block_ids()) == engine.queue()


def test_pool12_only_what_the_release_can_do_is_offered() -> None:
    """0.23.0 puts freed blocks at the head; no other release does, short of dropping their KV."""
    engine = Engine(12)
    pool_view = view(engine.pool)
    assert isinstance(pool_view, SupportsGiveBack) is pool_view.release.free_prepend


def test_pool12_what_is_given_back_while_walking_is_not_part_of_the_walk() -> None:
    engine = Engine(12)
    pool_view = view(engine.pool)
    if not isinstance(pool_view, SupportsGiveBack):
        pytest.skip("this release cannot give back to the head")
    free = list(engine.cached_and_free(5))
    pool_view.touch_blocks(free[:2])
    walk = pool_view.iter_free_block_ids_with_hash()
    assert next(walk)[0] == free[2]
    pool_view.give_back_blocks(free[:2])
    assert engine.queue()[:2] == free[:2]
    assert [block_id for block_id, _ in walk] == free[3:]
    assert [block_id for block_id, _ in pool_view.iter_free_block_ids_with_hash()] == free
