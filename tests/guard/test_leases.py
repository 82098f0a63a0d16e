"""Leases of a guard: how they end, and how they expire."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvview import (
    GuardedView,
    ViewClosedError,
)
from kvview_reference.pool import BlockPool
from tests.guard.trusting_pool import Clock, TrustingPool


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


def test_a_query_of_a_guard_above_finds_what_expired_below_free(pool: BlockPool) -> None:
    clock = Clock()
    below = GuardedView(pool.view(), clock=clock)
    guard = GuardedView(below, clock=clock)
    below.lease([1, 2], ttl=1)
    clock.time = 1
    assert guard.is_free(2)
    assert guard.num_free_blocks() == 9


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
