"""The guard: its laws over a pool that checks, and over one that does not."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvview import (
    BlockNotHeldError,
    ConfigError,
    GPUBlockPoolView,
    GuardedView,
    KVViewError,
    Lease,
    NotCopyableError,
    OffloadKey,
    PinBudgetExceeded,
    SupportsBlockKeys,
    SupportsFreeCount,
    SupportsGiveBack,
    SupportsHolds,
    SupportsLeases,
    SupportsPinBudget,
    SupportsPoolSize,
    SupportsResumableWalk,
    SupportsReuseNotice,
    UnknownBlockError,
    ViewClosedError,
    WrongThreadError,
)
from kvview.guard import GuardedLease
from kvview_reference.pool import BlockPool, BlockPoolView
from tests.guard.trusting_pool import Clock, TrustingPool, key


def test_a_guard_is_a_view_and_has_the_queries_of_the_view_under_it(pool: BlockPool) -> None:
    guard = GuardedView(pool.view())
    assert isinstance(guard, GPUBlockPoolView)
    assert isinstance(guard, SupportsBlockKeys)
    assert isinstance(guard, SupportsFreeCount)
    assert isinstance(guard, SupportsPoolSize)
    assert isinstance(guard, SupportsHolds)
    bare = GuardedView(TrustingPool())
    assert not isinstance(bare, SupportsBlockKeys)
    assert not isinstance(bare, SupportsFreeCount)
    assert isinstance(bare, SupportsLeases)
    assert not isinstance(bare, SupportsPinBudget)
    assert isinstance(GuardedView(TrustingPool(), pin_budget=0.5), SupportsPinBudget)
    lease = bare.lease([1])
    assert isinstance(lease, Lease)
    assert isinstance(lease, GuardedLease)
    lease.release()
    assert guard.block_keys([3])[0] == (key("h3"),)


def test_guard_11_each_refused_call_is_counted_once(pool: BlockPool) -> None:
    below = GuardedView(pool.view(), pin_budget=0.5)
    guard = GuardedView(below)
    ended = guard.lease([1])
    ended.release()
    walk = guard.walk_free_blocks()
    walk.close()
    calls: list[Callable[[], object]] = [
        *(lambda: guard.lease([99]), lambda: guard.lease([99], expected_keys=[key("h")])),
        *(lambda: guard.lease([1], expected_keys=[]), lambda: guard.lease([1], ttl=0)),
        lambda: guard.lease([1], expected_keys=[OffloadKey(b"a block hash")]),
        *(ended.__enter__, lambda: ended.renew(5), lambda: guard.lease([1]).renew(-1)),
        *(lambda: guard.is_free(99), lambda: guard.block_keys([99])),
        *(lambda: guard.primary_keys([-1]), lambda: guard.find_cached_block(OffloadKey(b"hash"))),
        *(lambda: guard.give_back_blocks([1]), lambda: guard.touch_blocks([*range(1, 8)])),
        *(lambda: walk.take(1), walk.restart),
    ]
    for number, call in enumerate(calls, start=1):
        with pytest.raises(KVViewError):
            call()
        assert (guard.stats.refused, below.stats.refused) == (number, 0)


def test_pool_4_queries_of_an_unchecked_view_refuse_what_is_no_block() -> None:
    class Answering(TrustingPool):
        def is_free(self, block_id: int) -> bool:
            return self.ref_cnt[block_id] == 0

        def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
            return [(key(f"h{range(self.num_blocks)[block_id]}"),) for block_id in block_ids]

        def primary_keys(self, block_ids: Sequence[int]) -> list[OffloadKey]:
            return [keys[0] for keys in self.block_keys(block_ids)]

    guard = GuardedView(Answering())
    assert guard.lease([9], expected_keys=[key("h9")]).release()
    assert guard.is_free(9)
    for wrong in (-1, 10, True):
        with pytest.raises(UnknownBlockError, match="POOL-4"):
            guard.is_free(wrong)
        for query in (guard.block_keys, guard.primary_keys):
            with pytest.raises(UnknownBlockError, match="POOL-4"):
                query([1, wrong])
        with pytest.raises(UnknownBlockError, match="POOL-4"):
            guard.lease([wrong], expected_keys=[key("h9")])


def test_refusals_name_budget_and_holds(pool: BlockPool) -> None:
    guard = GuardedView(pool.view(), pin_budget=0.5)
    guard.lease([1, 2])
    with pytest.raises(PinBudgetExceeded, match="budget is 5 of 10"):
        guard.touch_blocks([3, 4, 5, 6])
    with pytest.raises(BlockNotHeldError, match="beside 1 leased"):
        guard.free_blocks([1])
    with pytest.raises(ConfigError, match="share"):
        GuardedView(pool.view(), pin_budget=1.5)


def test_guard_4_a_later_thread_with_the_same_ident_is_another_thread(pool: BlockPool) -> None:
    made: list[tuple[int, GuardedView]] = []
    answers: list[str] = []

    def make() -> None:
        made.append((threading.get_ident(), GuardedView(pool.view())))

    def call() -> None:
        ident, guard = made[0]
        if threading.get_ident() == ident:
            try:
                guard.touch_blocks([1])
                answers.append("touched")
            except WrongThreadError as error:
                answers.append(str(error))

    for work in (make, *[call] * 50):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    if not answers:
        pytest.skip("this system reuses no ident")
    assert all(answer.startswith("GUARD-4") and "same ident" in answer for answer in answers)
    assert pool.num_free_blocks() == 9


def test_leak_report_names_owner_job_age_and_line(pool: BlockPool) -> None:
    clock = Clock()
    guard = GuardedView(pool.view(), owner="my connector", clock=clock, trace=True)
    guard.touch_blocks([1, 2])
    clock.time = 5
    guard.lease([3], job=42)
    clock.time = 6
    plain, leased = guard.leaks()
    assert (plain.owner, plain.job, plain.block_ids, plain.age) == ("my connector", None, (1, 2), 6)
    assert (leased.job, leased.block_ids, leased.age) == (42, (3,), 1)
    assert "test_guard.py" in str(plain)
    assert "test_leak_report" in str(leased)
    assert guard.leaks(older_than=3) == [plain]


# --- one ledger ---


def test_a_guard_adds_no_second_count_to_a_view_that_counts(
    pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[int]] = []
    touch = pool.touch_blocks

    def note(block_ids: Sequence[int]) -> None:
        calls.append(list(block_ids))
        touch(block_ids)

    monkeypatch.setattr(pool, "touch_blocks", note)
    view = pool.view()
    parent = GuardedView(view, owner="parent")
    child = GuardedView(parent, owner="child")
    child.touch_blocks([0, 1, 2])
    assert calls == [[1, 2]]
    assert view.held_blocks() == parent.held_blocks() == child.held_blocks() == {1: 1, 2: 1}
    assert [leak.owner for leak in parent.leaks()] == ["child"]
    for other in (view, parent):
        with pytest.raises(BlockNotHeldError, match="beside 1 leased or held"):
            other.free_blocks([1])
    assert view.close() == {1: 1, 2: 1}
    for guard in (parent, child):
        with pytest.raises(ViewClosedError, match="POOL-10"):
            guard.touch_blocks([3])


def test_a_view_that_overrides_a_call_is_still_asked(pool: BlockPool) -> None:
    seen: list[list[int]] = []

    class Noting(BlockPoolView):
        def touch_blocks(self, block_ids: Sequence[int]) -> None:
            seen.append(list(block_ids))
            super().touch_blocks(block_ids)

    class Forwarding:
        def __init__(self, view: BlockPoolView) -> None:
            self._view = view

        def __getattr__(self, name: str) -> Any:
            return getattr(self._view, name)

        def touch_blocks(self, block_ids: Sequence[int]) -> None:
            seen.append(list(block_ids))
            self._view.touch_blocks(block_ids)

    for view in (Noting(pool, "noting"), Forwarding(pool.view())):
        guard = GuardedView(view)
        guard.touch_blocks([4])
        guard.free_blocks([4])
    assert seen == [[4], [4]]


class AllMovesPool(TrustingPool):
    """A pool that does not check, with the moves that only some views have."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int]]] = []
        self.on_reuse: Callable[[int], None] | None = None

    def give_back_blocks(self, block_ids: Sequence[int]) -> None:
        self.calls.append(("give_back", list(block_ids)))
        self.free_blocks(block_ids)

    def free_blocks_with_notice(
        self, block_ids: Sequence[int], on_reuse: Callable[[int], None]
    ) -> None:
        self.calls.append(("notice", list(block_ids)))
        self.on_reuse = on_reuse
        self.free_blocks(block_ids)

    def walk_free_blocks(self) -> AllMovesPool:
        return self

    def take(self, max_blocks: int) -> list[tuple[int, OffloadKey]]:
        return list(self.iter_free_block_ids_with_hash())[:max_blocks]

    def restart(self) -> None:
        self.calls.append(("restart", []))

    def close(self) -> dict[int, int]:
        return {}


def test_the_newer_moves_are_those_of_the_view_below_and_keep_the_ledger_right() -> None:
    bare = GuardedView(TrustingPool())
    for protocol in (SupportsGiveBack, SupportsReuseNotice, SupportsResumableWalk):
        assert not isinstance(bare, protocol)
    below = AllMovesPool()
    guard = GuardedView(below)
    for protocol in (SupportsGiveBack, SupportsReuseNotice, SupportsResumableWalk):
        assert isinstance(guard, protocol)
    lease = guard.lease([5])
    moves: list[Callable[[list[int]], None]] = [
        guard.give_back_blocks,
        lambda ids: guard.free_blocks_with_notice(ids, print),
    ]
    for move in moves:
        guard.touch_blocks([1, 2, 2, 3])
        for wrong, error in (([1, 5], BlockNotHeldError), ([1, -1], UnknownBlockError)):
            with pytest.raises(error, match="POOL-4"):
                move(wrong)
        move([2, 0, 1, 2])
        assert guard.held_blocks() == {3: 1, 5: 1}
        move([3])
    named = [("give_back", [1, 2]), ("give_back", [3]), ("notice", [1, 2]), ("notice", [3])]
    assert below.calls == named  # surplus mentions are plain frees, before
    assert below.on_reuse is print
    lease.release()
    assert sorted(below.queue) == list(range(1, 10))
    walk = guard.walk_free_blocks()
    assert [block_id for block_id, _ in walk.take(3)] == below.queue[:2]  # the null block is not
    walk.restart()
    guard.close()
    with pytest.raises(ViewClosedError, match="POOL-10"):
        walk.take(1)
    walk.close()


# --- budgets ---


@pytest.mark.parametrize(
    ("share", "size", "blocks"),
    [(0.29, 100, 29), (0.05, 10, 1), (0.57, 100, 57), (1.0, 10, 10), (0.25, 10, 2), (0.1, 2, 1)],
)
def test_guard_5_a_budget_is_rounded_down_to_blocks_and_to_one_at_least(
    share: float, size: int, blocks: int
) -> None:
    assert GuardedView(BlockPool(size).view(), pin_budget=share).num_pinnable_blocks() == blocks


def test_guard_9_what_is_dropped_while_it_holds_is_told(
    pool: BlockPool, caplog: pytest.LogCaptureFixture
) -> None:
    guard = GuardedView(pool.view(), owner="me")
    guard.lease([1], job=3)
    guard.touch_blocks([2])
    del guard
    gc.collect()
    lease, dropped = (record.getMessage() for record in caplog.records)
    assert lease.startswith("GUARD-9: a lease of 'me' was dropped")
    assert "job 3" in lease
    assert dropped.startswith("GUARD-9: the guard of 'me' was dropped and still holds 2 blocks")
    caplog.clear()
    guard = GuardedView(pool.view())
    lost = guard.lease([3])
    guard.close()
    del lost, guard
    guard = GuardedView(BlockPool(4).view())
    guard.touch_blocks([1])
    del guard  # and the pool with it: there is nothing left to give back to
    gc.collect()
    assert caplog.records == []


def test_a_guard_that_is_dropped_leaves_nothing_behind_in_the_view(pool: BlockPool) -> None:
    view = pool.view()
    for _ in range(3):
        guard = GuardedView(view)
        guard.lease([1]).release()
        del guard
        gc.collect()
    assert list(view.tree()) == [view]


# --- copies and other processes ---


def test_guard_6_nothing_that_counts_is_copied(pool: BlockPool) -> None:
    view = pool.view()
    guard = GuardedView(view)
    lease = guard.lease([1])
    for thing in (view, guard, lease):
        for way in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(NotCopyableError, match="GUARD-6"):
                way(thing)
    assert lease.release()


def test_pool_14_a_guard_is_told_nothing_once_the_view_under_it_is_closed() -> None:
    pool = BlockPool(4)
    below = pool.view("engine")
    guard = GuardedView(below)
    told: list[int] = []
    guard.touch_blocks([1, 2])
    guard.free_blocks_with_notice([1], told.append)
    below.close()
    pool.allocate_blocks(1)
    assert told == []
