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
        put, lost = set[bytes](), set[bytes]()  # in flight, and evicted meanwhile
        for _ in range(60):
            keys = dice.sample([A, B, C], dice.randint(1, 3))
            flags = [dice.random() < 0.7 for _ in keys]
            good = {key for key, flag in zip(keys, flags, strict=True) if flag}
            match dice.randrange(4):
                case 0 if put:
                    events.ended(sorted(put), [key in good for key in sorted(put)], is_get=False)
                    stored |= put & good - lost
                    put.clear()
                    lost.clear()
                case 0:
                    events.began(keys)
                    put.update(keys)
                case 1:
                    events.ended(keys, flags, is_get=True)
                    stored = (stored - {*keys}) | good
                case 2:
                    events.evicted(keys)
                    stored -= {*keys}
                    lost |= put & {*keys}
                case _:
                    events.gone(keys[0])
                    stored.discard(keys[0])
            told += events.take()
            assert held(told) == stored  # fold_events raises when they do not take turns


def test_every_counter_of_the_guard_is_exported() -> None:
    assert [*TIER_COUNTERS] == [field.name for field in fields(TierStats)]
