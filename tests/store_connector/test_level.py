"""The index of one level: budgets, pins, sizes and events."""

from __future__ import annotations

from collections import Counter

from kvview_reference.store_connector.level import Level
from kvview_reference.store_connector.page_policy import Policy

from kvview import OffloadingEvent, OffloadKey, make_offload_key

A, B, C, D = (make_offload_key(name, 0) for name in (b"a", b"b", b"c", b"d"))


def make_level(budget: int, pins: Counter[OffloadKey], *, size: int = 1) -> Level:
    return Level("CPU", Policy(), budget, lambda keys: [size] * len(keys), pins, records=True)


def store(level: Level, key: OffloadKey) -> list[OffloadKey] | None:
    fitting, evicted = level.reserve([key])
    level.commit(fitting)
    return evicted if fitting else None


def test_the_least_recently_used_key_makes_room() -> None:
    level = make_level(2, Counter())
    assert store(level, A) == store(level, B) == []
    level.use([A])
    assert store(level, C) == [B]
    assert list(level.held) == [A, C]


def test_a_pinned_key_is_never_evicted() -> None:
    pins = Counter([A])
    level = make_level(2, pins)
    store(level, A)
    store(level, B)
    assert store(level, C) == [B]
    pins[C] += 1
    assert store(level, D) is None
    assert list(level.held) == [A, C]


def test_reserved_room_counts_until_it_is_cancelled() -> None:
    level = make_level(1, Counter())
    assert level.reserve([A]) == ([A], [])
    assert A not in level.held
    assert level.reserve([B]) == ([], [])
    level.cancel([A])
    assert level.reserve([A, B]) == ([A], [])


def test_a_page_that_became_smaller_leaves_room() -> None:
    level = make_level(200, Counter(), size=100)
    level.reserve([A, B])
    level.commit([A, B], 0.5)
    assert store(level, C) == []
    assert store(level, D) == [A, B]


def test_events_follow_the_order_of_the_changes() -> None:
    level = make_level(1, Counter())
    store(level, A)
    store(level, B)
    assert level.take_events() == [
        OffloadingEvent([A], "CPU", False),
        OffloadingEvent([A], "CPU", True),
        OffloadingEvent([B], "CPU", False),
    ]
    assert level.take_events() == []
