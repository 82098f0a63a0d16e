"""The guard: random calls against its model, the laws of a pool, and the rest by hand."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings

from kvview import (
    ConfigError,
    GPUBlockPoolView,
    GuardedView,
    NotCopyableError,
    SupportsBlockKeys,
    SupportsFreeCount,
    SupportsHolds,
    SupportsPinBudget,
    SupportsPoolSize,
    UnknownBlockError,
    WrongThreadError,
)
from kvview_reference.harness import ReferencePool
from kvview_reference.pool import BlockPool, BlockPoolView
from tests.guard.machine import GuardMachine
from tests.guard.pools import GuardedPool, UncheckedView

TestGuards = GuardMachine.TestCase
TestGuards.settings = settings(stateful_step_count=40, deadline=None)


class TestGuardedPool(ReferencePool):
    """A guard satisfies the laws of a pool."""

    settings = settings(max_examples=12)
    engine_class = GuardedPool


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_guard_4_copies_are_refused(way: Callable[[object], object]) -> None:
    guard = GuardedView(BlockPool(10).view())
    with pytest.raises(NotCopyableError, match=r"^GUARD-4: "):
        way(guard)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.parametrize("method", ["touch_blocks", "free_blocks"])
def test_guard_4_a_forked_process_is_refused(method: str) -> None:
    guard = GuardedView(BlockPool(10).view())
    guard.touch_blocks([1])
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def call_in_the_child() -> None:
        try:
            theirs.send(repr(getattr(guard, method)([1])))
        except Exception as error:
            theirs.send(f"{type(error).__name__}: {error}")

    child = context.Process(target=call_in_the_child)
    child.start()
    got = ours.recv()
    child.join()
    assert got.startswith("WrongThreadError: GUARD-4: ")
    guard.free_blocks([1])


def test_guard_5_dropped_holds_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def num_logged() -> int:
        gc.collect()
        return sum("GUARD-5" in message for message in caplog.messages)

    guard = GuardedView(BlockPool(10).view())
    other = GuardedView(guard)
    other.touch_blocks([3])
    other.free_blocks([3])
    del other
    assert num_logged() == 0, "a guard without holds"
    other = GuardedView(guard)
    other.touch_blocks([3])
    del other
    assert num_logged() == 1
    ring: list[Any] = [BlockPool(10)]
    # The collector frees a cycle in one pass, and may free the guard before its pool.
    ring += [GuardedView(ring[0].view()), ring]
    ring[1].touch_blocks([1])
    del ring
    assert num_logged() == 1, "a guard that goes with its pool"


def test_guard_7_with_a_trace_a_leak_names_the_line_of_its_caller() -> None:
    guard = GuardedView(BlockPool(10).view(), trace=True)

    def take() -> None:
        guard.touch_blocks([1])

    take()
    code = take.__code__
    line = f"{code.co_filename}:{code.co_firstlineno + 1} in take"
    assert [leak.taken_at for leak in guard.leaks()] == [line]
    guard.free_blocks([1])


def test_a_guard_has_the_queries_of_the_view_below() -> None:
    guard = GuardedView(BlockPool(10).view())
    for protocol in (
        *(GPUBlockPoolView, SupportsBlockKeys, SupportsFreeCount),
        *(SupportsPoolSize, SupportsHolds),
    ):
        assert isinstance(guard, protocol)
    bare = GuardedView(UncheckedView(10, has_size=True))
    for missing in (SupportsFreeCount, SupportsPinBudget):
        assert not isinstance(bare, missing)
    limited = GuardedView(UncheckedView(10, has_size=True), pin_budget=0.5)
    assert isinstance(limited, SupportsPinBudget)


def test_a_guard_takes_arguments_by_their_names() -> None:
    below = BlockPool(4).view()
    for guard in (GuardedView(below), GuardedView(GuardedView(below))):
        guard.touch_blocks(block_ids=[1, 2])
        guard.give_back_blocks(block_ids=[1])
        assert guard.is_free(block_id=1)
        assert guard.block_keys(block_ids=[1, 2]) == [(), ()]
    with pytest.raises(UnknownBlockError):
        GuardedView(UncheckedView(4, has_size=True)).is_free(block_id=4)


def test_a_share_without_a_pool_or_beyond_it_is_refused() -> None:
    for wrong in (0.0, 1.5):
        with pytest.raises(ConfigError, match="share"):
            GuardedView(BlockPool(10).view(), pin_budget=wrong)
    with pytest.raises(ConfigError, match="num_blocks"):
        GuardedView(UncheckedView(10, has_size=False), pin_budget=0.5)


def test_guard_2_a_later_thread_with_the_same_ident_is_another_thread() -> None:
    pool = BlockPool(10)
    made: list[tuple[int, GuardedView]] = []
    refusals: list[str] = []

    def make() -> None:
        made.append((threading.get_ident(), GuardedView(pool.view())))

    def call() -> None:
        ident, guard = made[0]
        if threading.get_ident() == ident:
            with pytest.raises(WrongThreadError) as caught:
                guard.touch_blocks([1])
            refusals.append(str(caught.value))

    for work in (make, *[call] * 50):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    if not refusals:
        pytest.skip("this system reuses no ident")
    assert all(text.startswith("GUARD-2") and "same ident" in text for text in refusals)
    assert pool.num_free_blocks() == 9


def test_a_guard_adds_no_second_count_to_a_view_that_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = BlockPool(10)
    calls: list[list[int]] = []
    monkeypatch.setattr(pool, "touch_blocks", calls.append)
    view = pool.view()
    child = GuardedView(GuardedView(view))
    child.touch_blocks([0, 1, 2])
    assert calls == [[1, 2]]
    assert view.held_blocks() == child.held_blocks() == {1: 1, 2: 1}


def test_a_view_that_overrides_a_method_is_called() -> None:
    calls: list[list[int]] = []
    pool = BlockPool(10)

    class Overriding(BlockPoolView):
        def touch_blocks(self, block_ids: Sequence[int]) -> None:
            calls.append(list(block_ids))
            super().touch_blocks(block_ids)

    class Forwarding:
        def __getattr__(self, name: str) -> Any:
            return getattr(pool.view(), name)

        def touch_blocks(self, block_ids: Sequence[int]) -> None:
            calls.append(list(block_ids))

    for view in (Overriding(pool, "connector"), Forwarding()):
        GuardedView(view).touch_blocks([4])
    assert calls == [[4], [4]]


def test_repeated_mentions_reach_the_engine_in_a_call_before_the_last_ones() -> None:
    class Below(UncheckedView):
        def free_blocks(self, block_ids: Sequence[int]) -> None:
            calls.append(("free", list(block_ids)))
            super().free_blocks(block_ids)

        def give_back_blocks(self, block_ids: Sequence[int]) -> None:
            calls.append(("give back", list(block_ids)))
            super().give_back_blocks(block_ids)

    calls: list[tuple[str, list[int]]] = []
    guard = GuardedView(Below(10, has_size=True))
    guard.touch_blocks([1, 2, 2])
    guard.give_back_blocks([2, 0, 1, 2])
    assert calls == [("free", [2]), ("give back", [1, 2])]


@pytest.mark.parametrize(
    ("share", "size", "blocks"),
    [(0.29, 100, 29), (0.05, 10, 1), (0.57, 100, 57), (1.0, 10, 10), (0.25, 10, 2), (0.1, 2, 1)],
)
def test_guard_3_a_budget_is_rounded_down_to_blocks_and_is_at_least_one(
    share: float, size: int, blocks: int
) -> None:
    assert GuardedView(BlockPool(size).view(), pin_budget=share).num_pinnable_blocks() == blocks


def test_a_dropped_guard_leaves_nothing_behind_in_the_view() -> None:
    view = BlockPool(10).view()
    for _ in range(3):
        guard = GuardedView(view)
        guard.touch_blocks([1])
        guard.free_blocks([1])
        del guard
        gc.collect()
    assert list(view.tree()) == [view]
