"""The pool laws on the real BlockPool of whichever vLLM release can be imported.

The oracle is plain dicts and sets; the engine's moves go through the pool's own
public methods, as its scheduler makes them.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvview
from kvview import (
    BlockNotHeldError,
    UnknownBlockError,
    UnsupportedEngineError,
    ViewClosedError,
    make_offload_key,
)
from kvview_vllm import capabilities, pool, view
from kvview_vllm.pool import VLLMBlockPoolView

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    vllm = pytest.importorskip("vllm", reason="needs a vLLM release", exc_type=ImportError)
    block_pool = pytest.importorskip(
        "vllm.v1.core.block_pool", reason="needs a vLLM release", exc_type=ImportError
    )

BLOCK_SIZE = 16
NULL = 0
CHUNK_SIZES = (pool._FIRST_CHUNK, pool._LARGEST_CHUNK)


class Engine:
    """The real pool, moved as the scheduler moves it."""

    def __init__(self, num_blocks: int, *, enable_caching: bool = True) -> None:
        arguments = {}
        if "hash_block_size" in inspect.signature(block_pool.BlockPool).parameters:
            arguments["hash_block_size"] = BLOCK_SIZE
        self.pool: Any = block_pool.BlockPool(num_blocks, enable_caching, **arguments)
        self.flags = capabilities.probe_pool(self.pool)

    def blocks(self, block_ids: Sequence[int]) -> list[Any]:
        return [self.pool.blocks[block_id] for block_id in block_ids]

    def allocate(self, num_blocks: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(num_blocks)]

    def hit(self, block_ids: Sequence[int]) -> None:
        blocks = self.blocks(block_ids)
        self.pool.touch((blocks,) if "touch_nested" in self.flags else blocks)

    def free(self, block_ids: Sequence[int]) -> None:
        self.pool.free_blocks(self.blocks(block_ids))

    def cache(self, block_id: int, block_hash: bytes, group: int = 0) -> bytes:
        request = SimpleNamespace(block_hashes=[block_hash])
        self.pool.cache_full_blocks(request, self.blocks([block_id]), 0, 1, BLOCK_SIZE, group)
        return make_offload_key(block_hash, group)

    def cache_again(self, block_id: int, block_hash: bytes, group: int = 0) -> bytes:
        request = SimpleNamespace(block_hashes=[block_hash])
        block = self.pool.blocks[block_id]
        self.pool.cache_partial_block(request, block, BLOCK_SIZE, group, 2 * BLOCK_SIZE)
        return make_offload_key(block_hash, group)

    def queue(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def cached_and_free(self, num_blocks: int) -> dict[int, bytes]:
        """That many hashed blocks at the end of the free queue, in order."""
        block_ids = self.allocate(num_blocks)
        keys = {block_id: self.cache(block_id, b"%032d" % block_id) for block_id in block_ids}
        self.free(block_ids)
        return keys


@pytest.fixture
def engine() -> Engine:
    return Engine(16)


@pytest.fixture
def pool_view(engine: Engine) -> VLLMBlockPoolView:
    return view(engine.pool, owner="tester")


def reset(engine: Engine) -> bool:
    return bool(engine.pool.reset_prefix_cache())


# --- what the view is ---


@pytest.mark.parametrize("name", [name for name in kvview.__all__ if name.startswith("Supports")])
def test_view_has_every_pool_query(pool_view: VLLMBlockPoolView, name: str) -> None:
    protocol = getattr(kvview, name)
    if protocol.__module__ != "kvview.pool":
        pytest.skip("not a query of the pool")
    assert isinstance(pool_view, protocol)


def test_no_block_object_is_reachable_by_a_public_name(pool_view: VLLMBlockPoolView) -> None:
    public = [name for name in dir(pool_view) if not name.startswith("_")]
    answers = [getattr(pool_view, name) for name in public]
    assert not any(type(answer).__module__.startswith("vllm") for answer in answers)


def test_capabilities_are_where_the_table_says(engine: Engine) -> None:
    match = re.match(r"\d+\.\d+\.\d+", vllm.__version__)
    if match is None:
        pytest.skip(f"no release: {vllm.__version__}")

    def number(release: str) -> tuple[int, ...]:
        return tuple(map(int, release.split(".")))

    expected = {
        capability.name
        for capability in capabilities.CAPABILITIES
        if capability.seam == "pool"
        and number(capability.first_release) <= number(match[0])
        and number(match[0]) <= number(capability.last_release or capabilities.NEWEST_TESTED)
    }
    assert engine.flags == expected


def test_unknown_touch_is_refused() -> None:
    class Fork(block_pool.BlockPool):  # type: ignore[misc,name-defined]
        def touch(self, blocks: Any, deadline: float) -> None: ...

    forked = Engine(4).pool
    forked.__class__ = Fork
    with pytest.raises(UnsupportedEngineError) as caught:
        view(forked)
    for part in ("pool seam", vllm.__version__, "touch(blocks, deadline)", "0.11.0 - 0.33.0"):
        assert part in str(caught.value)


def test_what_is_no_pool_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"without blocks, null_block"):
        view(object())


def test_version_string_may_lie(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.dev1+fork")
    assert view(engine.pool).capabilities == engine.flags
    assert "outside the tested range" in caplog.text


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
    assert "kvview_vllm wraps an installed vLLM (0.11.0 - 0.33.0)" in answer.stdout


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
        pool_view.block_hashes(bad)


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
    if "several_hashes" not in engine.flags:
        pytest.skip("this release has one hash a block")
    first, second = engine.allocate(2)
    keys = [engine.cache(first, b"a" * 32)]
    keys += [engine.cache_again(first, b"c" * 32, 1), engine.cache_again(first, b"b" * 32)]
    other = engine.cache(second, b"d" * 32)
    engine.free([first, second])
    assert pool_view.block_hashes(first) == (keys[0], *sorted(keys[1:]))
    assert {pool_view.find_cached_block(key) for key in keys} == {first}
    items = [(first, key) for key in pool_view.block_hashes(first)]
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
    assert reset(engine)
    assert list(walk) == []


def test_dropped_walks_are_forgotten(pool_view: VLLMBlockPoolView) -> None:
    walks = [pool_view.iter_free_block_ids() for _ in range(3)]
    assert [next(walk) for walk in walks] == [1, 1, 1]
    assert len(pool_view._walks) == 3
    walks.clear()
    assert not pool_view._walks


def test_pool_8_hash_is_an_offload_key(engine: Engine, pool_view: VLLMBlockPoolView) -> None:
    (block_id,) = engine.allocate(1)
    assert pool_view.block_hashes(block_id) == ()
    key = engine.cache(block_id, b"k" * 32, 258)
    assert key == b"k" * 32 + b"\0\0\1\2"
    assert pool_view.block_hashes(block_id) == (key,)
    assert pool_view.find_cached_block(key) == block_id
    assert pool_view.find_cached_block(b"k" * 32 + b"\0\0\0\0") is None


# --- POOL-9 to POOL-11 ---


def test_pool_9_reset_is_refused_while_held(engine: Engine, pool_view: VLLMBlockPoolView) -> None:
    engine.cached_and_free(2)
    pool_view.touch_blocks([3])
    assert not reset(engine)
    assert pool_view.held_blocks() == {3: 1}
    pool_view.free_blocks([3])
    assert reset(engine)
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
    for block_ids in ([4], [NULL], [], [99], ["x"]):
        with pytest.raises(ViewClosedError, match="tester"):
            pool_view.touch_blocks(block_ids)  # type: ignore[arg-type]
        with pytest.raises(ViewClosedError):
            pool_view.free_blocks(block_ids)  # type: ignore[arg-type]
    for call in (
        lambda: next(walk),
        lambda: next(late_walk),
        lambda: next(pool_view.iter_free_block_ids_with_hash()),
        lambda: pool_view.num_blocks,
        lambda: pool_view.null_block_id,
        pool_view.num_free_blocks,
        pool_view.held_blocks,
        lambda: pool_view.is_free(1),
        lambda: pool_view.block_hashes(1),
        lambda: pool_view.find_cached_block(b"k" * 36),
    ):
        with pytest.raises(ViewClosedError):
            call()


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


# --- any sequence of moves ---


class Walked:
    """A walk of the view, and what the oracle knows of it."""

    def __init__(self, walk: Iterator[tuple[int, bytes]], order: list[tuple[int, bytes]]) -> None:
        self.walk = walk
        self.to_come = order
        self.gone: set[int] = set()
        self.yielded: set[tuple[int, bytes]] = set()
        self.engine_took = False
        """Whether the engine took free blocks since: then order is not promised."""


class PoolMachine(RuleBasedStateMachine):
    """The scheduler and two owners' views on one pool, against dicts and sets."""

    @initialize(
        num_blocks=st.integers(2, 40), share=st.sampled_from([0, 0.5, 1]), chunk=st.integers(1, 16)
    )
    def start(self, num_blocks: int, share: float, chunk: int) -> None:
        # Chunks smaller than the real ones, so that small pools fill several.
        pool._FIRST_CHUNK, pool._LARGEST_CHUNK = chunk, 2 * chunk
        self.engine = Engine(num_blocks)
        self.null_references = self.engine.pool.null_block.ref_cnt
        self.views = [view(self.engine.pool, owner=name) for name in ("first", "second")]
        self.held: list[Counter[int]] = [Counter(), Counter()]
        self.engine_held: Counter[int] = Counter()
        self.hashes: dict[int, list[bytes]] = {}
        self.walks: list[Walked] = []
        self.num_blocks = num_blocks
        self.num_hashes = 0
        keys = self.engine.cached_and_free(int(share * (num_blocks - 1)))
        self.hashes.update({block_id: [key] for block_id, key in keys.items()})

    def teardown(self) -> None:
        pool._FIRST_CHUNK, pool._LARGEST_CHUNK = CHUNK_SIZES

    def references(self, block_id: int) -> int:
        return self.engine_held[block_id] + self.held[0][block_id] + self.held[1][block_id]

    def is_free(self, block_id: int) -> bool:
        return block_id != NULL and not self.references(block_id)

    def pick(
        self, data: st.DataObject, block_ids: Sequence[int], min_size: int = 0, max_size: int = 40
    ) -> list[int]:
        if not block_ids:
            return []
        return data.draw(st.lists(st.sampled_from(block_ids), min_size=min_size, max_size=max_size))

    def leave(self, block_ids: Sequence[int], owner: int | None) -> None:
        """Free blocks leave the queue; the first view's walks are those watched."""
        for walked in self.walks:
            walked.gone.update(block_ids)
            walked.engine_took |= owner != 0 and any(map(self.is_free, block_ids))

    @rule(data=st.data())
    def engine_allocates(self, data: st.DataObject) -> None:
        free = [b for b in range(1, self.num_blocks) if self.is_free(b)]
        count = data.draw(st.integers(0, min(len(free), 8)))
        expected = self.engine.queue()[:count]
        self.leave(expected, None)
        assert self.engine.allocate(count) == expected
        for block_id in expected:
            self.engine_held[block_id] = 1
            self.hashes.pop(block_id, None)

    @rule(data=st.data())
    def engine_frees(self, data: st.DataObject) -> None:
        held = sorted(b for b, count in self.engine_held.items() if count)
        block_ids = list(dict.fromkeys(self.pick(data, held)))
        self.engine.free(block_ids)
        self.engine_held.subtract(block_ids)

    @rule(data=st.data())
    def engine_hits(self, data: st.DataObject) -> None:
        block_ids = list(dict.fromkeys(self.pick(data, sorted(self.hashes), max_size=6)))
        self.leave(block_ids, None)
        self.engine.hit(block_ids)
        self.engine_held.update(block_ids)

    @rule(data=st.data(), group=st.integers(0, 2))
    def engine_caches(self, data: st.DataObject, group: int) -> None:
        held = sorted(b for b, count in self.engine_held.items() if count)
        for block_id in dict.fromkeys(self.pick(data, held, max_size=8)):
            self.num_hashes += 1
            block_hash = b"%032d" % (self.num_hashes + self.num_blocks)
            if block_id not in self.hashes:
                self.hashes[block_id] = [self.engine.cache(block_id, block_hash, group)]
            elif "several_hashes" in self.engine.flags:
                self.hashes[block_id].append(self.engine.cache_again(block_id, block_hash, group))

    @rule(data=st.data())
    def engine_evicts(self, data: st.DataObject) -> None:
        if hasattr(self.engine.pool, "evict_blocks"):  # from 0.13
            block_ids = set(self.pick(data, sorted(self.hashes), max_size=2))
            self.engine.pool.evict_blocks(block_ids)
            for block_id in block_ids:
                del self.hashes[block_id]

    @rule()
    def engine_resets(self) -> None:
        nothing_held = all(map(self.is_free, range(1, self.num_blocks)))
        assert reset(self.engine) == nothing_held
        if nothing_held:
            self.hashes.clear()

    @rule(data=st.data(), owner=st.integers(0, 1))
    def touch(self, data: st.DataObject, owner: int) -> None:
        block_ids = self.pick(data, range(self.num_blocks), max_size=12)
        self.leave(block_ids, owner)
        self.views[owner].touch_blocks(block_ids)
        self.held[owner].update(b for b in block_ids if b != NULL)

    @rule(data=st.data(), owner=st.integers(0, 1))
    def free(self, data: st.DataObject, owner: int) -> None:
        block_ids = data.draw(st.permutations([*self.held[owner].elements(), NULL]))
        block_ids = block_ids[: data.draw(st.integers(0, len(block_ids)))]
        last_references = Counter(block_ids)
        freed = [
            b
            for b in list(dict.fromkeys(reversed(block_ids)))[::-1]
            if b in self.hashes and self.references(b) == last_references[b]
        ]
        self.views[owner].free_blocks(block_ids)
        self.held[owner] -= Counter(b for b in block_ids if b != NULL)
        hashed = [b for b in self.engine.queue() if b in self.hashes]
        assert hashed[len(hashed) - len(freed) :] == freed  # POOL-11

    @rule(data=st.data(), owner=st.integers(0, 1))
    def free_too_much(self, data: st.DataObject, owner: int) -> None:
        block_ids = self.pick(data, range(1, self.num_blocks), min_size=1, max_size=6)
        if Counter(block_ids) <= self.held[owner]:
            block_ids += [block_ids[0]] * self.held[owner][block_ids[0]]
        with pytest.raises(BlockNotHeldError):
            self.views[owner].free_blocks(block_ids)

    @rule(data=st.data(), owner=st.integers(0, 1), bad=st.sampled_from([-1, 40, True, 1.0]))
    def unknown_id(self, data: st.DataObject, owner: int, bad: Any) -> None:
        block_ids = [*self.pick(data, range(self.num_blocks), max_size=5), bad]
        for call in (self.views[owner].touch_blocks, self.views[owner].free_blocks):
            with pytest.raises(UnknownBlockError):
                call(data.draw(st.permutations(block_ids)))

    @precondition(lambda self: len(self.walks) < 3)
    @rule()
    def walk(self) -> None:
        order = [(b, h) for b in self.engine.queue() for h in self.in_order(b)]
        walked = Walked(self.views[0].iter_free_block_ids_with_hash(), order)
        self.walks.append(walked)
        self.walk_on(walked)

    @precondition(lambda self: self.walks)
    @rule(data=st.data(), count=st.integers(1, 12))
    def walk_some(self, data: st.DataObject, count: int) -> None:
        walked = data.draw(st.sampled_from(self.walks))
        for _ in range(count):
            if walked in self.walks:
                self.walk_on(walked)

    def in_order(self, block_id: int) -> list[bytes]:
        first, *others = self.hashes.get(block_id) or [b""]
        return [first, *sorted(others)] if first else []

    def walk_on(self, walked: Walked) -> None:
        def is_due(item: tuple[int, bytes]) -> bool:
            block_id, block_hash = item
            return block_id not in walked.gone and block_hash in self.in_order(block_id)

        walked.to_come = [item for item in walked.to_come if is_due(item)]
        item = next(walked.walk, None)
        if item is None:
            assert not walked.to_come  # nothing that stayed was missed
            self.walks.remove(walked)
            return
        assert item not in walked.yielded
        assert self.is_free(item[0])
        assert item[1] in self.in_order(item[0])
        if not walked.engine_took:
            assert item == walked.to_come[0]
        walked.yielded.add(item)
        walked.to_come = [due for due in walked.to_come if due != item]

    @rule()
    def walk_ids(self) -> None:
        assert list(self.views[1].iter_free_block_ids()) == self.engine.queue()

    @invariant()
    def pool_is_as_the_oracle_says(self) -> None:
        if not hasattr(self, "engine"):
            return
        real, pool_view = self.engine.pool, self.views[0]
        free = [b for b in range(1, self.num_blocks) if self.is_free(b)]
        assert sorted(self.engine.queue()) == free
        assert pool_view.num_free_blocks() == len(free)
        assert real.null_block.ref_cnt == self.null_references
        for owner in (0, 1):
            assert self.views[owner].held_blocks() == +self.held[owner]
        for block_id in range(self.num_blocks):
            assert pool_view.is_free(block_id) == self.is_free(block_id)
            assert pool_view.block_hashes(block_id) == tuple(self.in_order(block_id))
            assert block_id == NULL or real.blocks[block_id].ref_cnt == self.references(block_id)
        for block_id, hashes in self.hashes.items():
            assert {pool_view.find_cached_block(h) for h in hashes} == {block_id}


PoolMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
test_any_sequence_of_moves = PoolMachine.TestCase
