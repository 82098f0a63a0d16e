"""``kvview replay --publish``: the events match the cached blocks, and routers accept them."""

from __future__ import annotations

from collections import Counter

import pytest

from kvview import CacheGeometry, OffloadKey, get_offload_group_idx
from kvview.events.channel import Listener, Publisher
from kvview.events.formats import find_format
from kvview.testing.events.stream_fold import StreamFold
from kvview_reference.engine import Engine
from kvview_reference.replay.publish import EventFeed
from kvview_reference.replay.run import ReplayConfig, make_geometry, replay
from kvview_reference.replay.workload import generate_trace
from kvview_reference.store_connector import StoreConnector

BLOCK = 32
ANY_PORT = "tcp://127.0.0.1:*"


class Spy:
    """Publishes each step, and notes the blocks of the pool and the tier after it."""

    def __init__(self, publisher: Publisher, geometry: CacheGeometry) -> None:
        self.feed = EventFeed(publisher, geometry, find_format("vllm-0.33"))
        self.held: dict[int, dict[str, set[tuple[int, int]]]] = {}
        self.tier: set[OffloadKey] = set()
        self.number = 0

    def __call__(self, engine: Engine) -> None:
        before = self.feed.num_events
        take = engine.take_offloading_events

        def take_and_note() -> list[object]:
            taken = take()
            for event in taken:
                change = self.tier.difference_update if event.removed else self.tier.update
                change(event.keys)
            return list(taken)

        engine.take_offloading_events = take_and_note  # type: ignore[method-assign,assignment]
        self.feed.publish(engine)
        del engine.take_offloading_events
        if self.feed.num_events == before:
            return
        if self.number % 8 == 0:
            self.held[self.number] = self._held(engine)
        self.number += 1

    def _held(self, engine: Engine) -> dict[str, set[tuple[int, int]]]:
        pool = engine.kv_cache.pool
        keys = pool.block_keys(range(pool.num_blocks))
        manager = engine.scheduler_connector._manager  # type: ignore[attr-defined]
        assert all(manager.lookup(key, None) for key in self.tier)
        return {
            "GPU": {_named(key) for of_block in keys for key in of_block},
            "CPU": {_named(key) for key in self.tier},
        }


def _named(key: OffloadKey) -> tuple[int, int]:
    return int.from_bytes(key[:-4][-8:], "big"), get_offload_group_idx(key)


@pytest.mark.parametrize("groups", ["full", "full,window:64@2"])
def test_the_fold_is_the_cached_blocks_after_every_step(groups: str) -> None:
    geometry = make_geometry(groups, BLOCK)
    rows = generate_trace(num_requests=8, seed=3, block_size=BLOCK)
    config = ReplayConfig(2500, 64, 4, groups, {"cpu_blocks": 700, "enable_events": True})
    with Publisher(ANY_PORT, ANY_PORT) as publisher:
        spy = Spy(publisher, geometry)
        report = replay(rows, BLOCK, StoreConnector, config, on_step=spy)
        with Listener(publisher.endpoint, publisher.replay_endpoint) as listener:
            messages = [*listener.replay(0)]
    assert report.is_clean
    assert len(messages) == spy.number > 20
    fold = StreamFold()
    seen: Counter[str] = Counter()
    for message in messages:
        batch, found = fold.apply(message.sequence, message.payload)
        assert (found, fold.knows_all) == ([], True)
        assert batch is not None
        for medium, keys in spy.held.get(message.sequence, {}).items():
            assert set(fold.held.get(medium, ())) == keys
        seen.update(type(event).__name__ for event in batch.events)
    assert seen["BlockStored"]
    assert seen["BlockRemoved"]
    assert fold.held["CPU"]
