"""Leases of a guard: how they end, and how they expire."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvview import (
    BlockNotHeldError,
    ConfigError,
    GuardedView,
    StaleBlockError,
    ViewClosedError,
)
from kvview_reference.pool import BlockPool
from tests.guard.trusting_pool import Clock, TrustingPool


@pytest.fixture
def pool() -> BlockPool:
    pool = BlockPool(10)
    block_ids = pool.allocate_blocks(9)
    pool.cache_blocks(block_ids, [f"h{i}".encode() for i in block_ids], block_size=16)
    pool.free_blocks(block_ids)
    return pool


def test_a_lease_ends_once_on_every_path(pool: BlockPool) -> None:
    guard = GuardedView(pool.view())
    with guard.lease([1, 0, 2, 1]) as lease:
        assert guard.held_blocks() == {1: 2, 2: 1}
        assert (guard.stats.leases, guard.stats.active_leases) == (1, 1)
        assert lease.release() is True
        assert (guard.stats.leases, guard.stats.active_leases) == (1, 0)
    assert lease.release() is False
    with pytest.raises(ZeroDivisionError), guard.lease([3]):
        raise ZeroDivisionError
    assert guard.held_blocks() == {}
    assert pool.num_free_blocks() == 9


@pytest.mark.parametrize("end", ["close", "close below", "close the view", "free_all"])
def test_a_lease_of_a_closed_view_is_not_active(end: str, pool: BlockPool) -> None:
    view = pool.view()
    below = GuardedView(view)
    guard = GuardedView(below)
    lease = guard.lease([1], ttl=5)
    ends: dict[str, Callable[[], object]] = {
        "close": guard.close,
        "close below": below.close,
        "close the view": view.close,
        "free_all": below.free_all,
    }
    ends[end]()
    assert not lease.is_active
    assert lease.release() is False
    with pytest.raises(ViewClosedError), lease:
        pytest.fail("the block ran")
    if end == "free_all":
        assert (guard.leaks(), guard.deadlines, guard.stats.active_leases) == ([], [], 0)


def test_leased_references_can_not_be_freed_as_plain_ones(pool: BlockPool) -> None:
    guard = GuardedView(pool.view())
    lease = guard.lease([1])
    with pytest.raises(BlockNotHeldError, match="beside 1 leased"):
        guard.free_blocks([1])
    guard.touch_blocks([1])
    lease.release()
    guard.free_blocks([1])
    assert pool.num_free_blocks() == 9


def test_leases_expire_in_deadline_order_whatever_the_order_of_insertion(pool: BlockPool) -> None:
    clock = Clock()
    guard = GuardedView(pool.view(), clock=clock)
    long = guard.lease([1], job="long", ttl=100)
    guard.lease([2], job="short", ttl=1)
    renewed = guard.lease([3], job="renewed", ttl=2)
    guard.lease([4], job="for ever")
    renewed.renew(50)
    clock.time = 10
    assert [leak.job for leak in guard.release_expired()] == ["short"]
    assert guard.held_blocks() == {1: 1, 3: 1, 4: 1}
    clock.time = 60
    guard.touch_blocks([9])  # any call releases what has expired
    assert guard.held_blocks() == {1: 1, 4: 1, 9: 1}
    with pytest.raises(BlockNotHeldError, match="renewed"):
        renewed.renew(5)
    long.renew(1)
    clock.time = 70
    assert [leak.job for leak in guard.release_expired()] == ["long"]
    assert guard.stats.expired == 3


def test_a_query_of_a_guard_above_finds_what_expired_below_free(pool: BlockPool) -> None:
    clock = Clock()
    below = GuardedView(pool.view(), clock=clock)
    guard = GuardedView(below, clock=clock)
    below.lease([1, 2], ttl=1)
    clock.time = 1
    assert guard.is_free(2)
    assert guard.num_free_blocks() == 9


def test_a_lease_of_what_was_seen_refuses_a_reused_block(pool: BlockPool) -> None:
    guard = GuardedView(pool.view())
    seen = dict(guard.iter_free_block_ids_with_hash())
    guard.lease([1, 2], expected_keys=[seen[1], seen[2]]).release()
    pool.free_blocks(pool.allocate_blocks(3))  # evicts the victims 1, 2 or 3
    free_before = pool.num_free_blocks()
    victims = [block_id for block_id in seen if not pool.block_keys([block_id])[0]]
    with pytest.raises(StaleBlockError, match="does not hold"):
        guard.lease(victims[:1], expected_keys=[seen[victims[0]]])
    assert pool.num_free_blocks() == free_before
    with pytest.raises(ConfigError, match="one key a block"):
        guard.lease([5], expected_keys=[])


def test_guard_7_an_ended_lease_is_not_entered(pool: BlockPool) -> None:
    clock = Clock()
    guard = GuardedView(pool.view(), clock=clock)
    released, expired = guard.lease([1], job="one"), guard.lease([2], job="two", ttl=1)
    released.release()
    clock.time = 2
    for lease in (released, expired):
        with pytest.raises(BlockNotHeldError, match="GUARD-7: the lease of job"), lease:
            pytest.fail("the block ran")


def test_guard_8_a_failed_expiry_is_logged_once_and_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusting, clock = TrustingPool(), Clock()
    guard = GuardedView(trusting, owner="me", clock=clock)
    lease = guard.lease([1, 2], job=7, ttl=1)

    def fail(block_ids: Sequence[int]) -> None:
        raise RuntimeError("no")

    free = trusting.free_blocks
    guard._lease_view._free = fail  # type: ignore[union-attr]
    for seconds in (2, 4, 6):
        clock.time = seconds
        guard.touch_blocks([3])
    assert not lease.is_active
    assert lease.release() is False
    assert [record.getMessage()[:7] for record in caplog.records] == ["GUARD-8"]
    assert {leak.job for leak in guard.leaks()} == {7, None}
    guard._lease_view._free = free  # type: ignore[union-attr]
    clock.time = 100
    assert guard.release_expired() == []  # it ended before; its blocks come back now
    assert guard.held_blocks() == {3: 3}
    assert guard.stats.expired == 1
    assert guard.deadlines == []


@pytest.mark.parametrize("end", ["release", "renew"])
def test_what_has_ended_leaves_the_heap(end: str, pool: BlockPool) -> None:
    guard = GuardedView(pool.view())
    keep = guard.lease([1], ttl=1e6)
    for _ in range(2000):
        if end == "release":
            guard.lease([2], ttl=1e6).release()
        else:
            keep.renew(1e6)
    assert len(guard.deadlines) < 100
    keep.release()
    assert guard.deadlines == []
