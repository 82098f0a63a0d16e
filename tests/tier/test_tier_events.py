"""The keys that a tier advertises: stores and removals take turns, and each can be loaded."""

from __future__ import annotations

import random
from dataclasses import fields

from kvview import fold_events
from kvview.bridge import TIER_COUNTERS
from kvview.events import MEDIUM_STORAGE, OffloadingEvent
from kvview.tier import TierEvents, TierStats

A, B, C = b"a" * 36, b"b" * 36, b"c" * 36


def held(events: list[OffloadingEvent]) -> set[bytes]:
    return {bytes(key) for key in fold_events(events).get(MEDIUM_STORAGE, ())}


def test_a_key_that_was_evicted_while_its_put_was_in_flight_is_not_advertised() -> None:
    events = TierEvents()
    events.began([A, B])
    events.evicted([A])
    events.ended([A, B], [True, True], is_get=False)
    assert held(events.take()) == {B}
    events.began([A])
    events.ended([A], [True], is_get=False)
    assert held(events.take()) == {A}
    assert events.take() == []


def test_events_keep_their_order_and_come_in_batches() -> None:
    events = TierEvents()
    events.began([A, B, C])
    events.ended([A, B, C], [True, True, False], is_get=False)
    events.ended([B, C], [False, False], is_get=True)
    events.ended([B], [True], is_get=True)
    assert [(event.keys, event.removed) for event in events.take()] == [
        ((A, B), False),
        ((B,), True),
        ((B,), False),
    ]


def test_of_more_keys_than_are_remembered_the_oldest_are_withdrawn() -> None:
    events = TierEvents(max_keys=2)
    for key in (A, B, C):
        events.began([key])
        events.ended([key], [True], is_get=False)
    assert held(events.take()) == {B, C}


def test_any_calls_fold_to_the_contents_of_a_plain_model() -> None:
    for seed in range(200):
        dice, events, stored = random.Random(seed), TierEvents(), set[bytes]()
        told: list[OffloadingEvent] = []
        for _ in range(60):
            keys = dice.sample([A, B, C], dice.randint(1, 3))
            flags = [dice.random() < 0.7 for _ in keys]
            good = {key for key, flag in zip(keys, flags, strict=True) if flag}
            match dice.randrange(4):
                case 0:
                    events.began(keys)
                    events.ended(keys, flags, is_get=False)
                    stored |= good
                case 1:
                    events.ended(keys, flags, is_get=True)
                    stored = (stored - {*keys}) | good
                case 2:
                    events.evicted(keys)
                    stored -= {*keys}
                case _:
                    events.gone(keys[0])
                    stored.discard(keys[0])
            told += events.take()
            assert held(told) == stored  # fold_events raises when they do not take turns


def test_every_counter_of_the_guard_is_exported() -> None:
    assert [*TIER_COUNTERS] == [field.name for field in fields(TierStats)]
