"""The profile of Dynamo's router, compared with the router for every event."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest

pytest.importorskip(
    "dynamo.indexer", reason="pip install --no-deps -r tests/vllm/requirements-clients.txt"
)

from kvview.events.channel import Listener, Publisher
from kvview.events.formats import WIRE_FORMATS, WireFormat, find_format
from kvview.events.recording import Message
from kvview.events.wire import (
    AnyEvent,
    Batch,
    EventDecoder,
    StoredEvent,
    WireEvent,
    codec,
    encode,
)
from kvview.testing.events.consumers import Reception, find_consumer
from kvview.testing.events.stream_fold import StreamFold
from kvview_reference.connector import OffloadConnector
from kvview_reference.replay.publish import EventFeed
from kvview_reference.replay.run import ReplayConfig, make_geometry, replay
from kvview_reference.replay.workload import generate_trace
from tests.events.cases import BLOCK_SIZE, REMOVALS, REMOVED, STORED, STORES
from tests.events.dynamo_indexer import DynamoIndexer, Worker, wait_until

BEFORE_1_6 = version("ai-dynamo-runtime").startswith("1.5.")
PROFILE = find_consumer("dynamo-1.5" if BEFORE_1_6 else "dynamo")
REPLAYED_SIZE = 512
SAME_BATCH, AFTER = 555, 666
NEWEST = find_format("vllm-0.33")
AT_THE_END = encode(
    Batch(
        1.0,
        [
            codec(NEWEST).make(
                "BlockStored",
                **STORED
                | {
                    "block_hashes": [AFTER],
                    "token_ids": [1] * REPLAYED_SIZE,
                    "block_size": REPLAYED_SIZE,
                },
            )
        ],
        0,
        NEWEST,
    )
)


@pytest.fixture(scope="module")
def indexer() -> Iterator[DynamoIndexer]:
    with DynamoIndexer() as indexer:
        yield indexer


class Trial:
    """One event, sent through its own worker."""

    numbers = itertools.count(1)

    def __init__(self, indexer: DynamoIndexer, wire_format: WireFormat, case: str) -> None:
        self.case, self._codec = case, codec(wire_format)
        self.worker = Worker(indexer, next(self.numbers), BLOCK_SIZE)
        self.event = self._event()
        self.batch = Batch(1.0, [self.event], 0, wire_format)
        before: list[Any] = STORED["block_hashes"]
        if isinstance(self.event, StoredEvent):
            parent = self.event.parent_block_hash
            before = [] if parent is None else [parent]
        if before:
            self._send(self._good(before))
        self._send(self.event, self._good([SAME_BATCH]))
        self._send(self._good([AFTER]))

    def _event(self) -> WireEvent:
        if self.case in STORES:
            return self._codec.make("BlockStored", **STORED | STORES[self.case])
        if self.case in REMOVALS:
            return self._codec.make("BlockRemoved", **REMOVED | REMOVALS[self.case])
        return self._codec.make("AllBlocksCleared")

    def _good(self, hashes: list[Any]) -> WireEvent:
        tokens = [900 + hash(one) % 10_000 for one in hashes for _ in range(BLOCK_SIZE)]
        return self._codec.make(
            "BlockStored", **STORED | {"block_hashes": hashes, "token_ids": tokens}
        )

    def _send(self, *events: WireEvent) -> None:
        self.worker.send(encode(Batch(1.0, events, 0, self._codec.wire_format)))

    def reception(self, held: set[int]) -> Reception:
        """Return the outcome in the router; ACCEPTED if PARTLY looks the same."""
        if SAME_BATCH not in held:
            return Reception.BATCH_LOST
        hashes = getattr(self.event, "block_hashes", None) or ()  # the struct has None for none
        named = {one for one in hashes if isinstance(one, int)}
        if isinstance(self.event, StoredEvent):
            taken = len(named & held) / len(named) if named else 1.0
        else:  # it was there before
            gone = named or ({*STORED["block_hashes"]} if self.case == "cleared" else set())
            taken = len(gone - held) / len(gone) if gone else 1.0
        if taken == 1.0:
            return Reception.ACCEPTED
        return Reception.PARTLY if taken else Reception.REJECTED


@pytest.mark.parametrize("wire_format", WIRE_FORMATS, ids=lambda one: one.name)
def test_profile_and_router_agree(indexer: DynamoIndexer, wire_format: WireFormat) -> None:
    if not wire_format.has_rank:
        pytest.skip("every batch is lost, so its arrival cannot be seen")
    # The router is registered with one size; the profile takes each event's own.
    cases = [case for case in (*STORES, *REMOVALS, "cleared") if case != "tokens of another size"]
    trials = [Trial(indexer, wire_format, case) for case in cases]

    def held() -> dict[int, set[int]]:
        return {
            worker: {one for tier in tiers.values() for one in tier}
            for worker, tiers in indexer.held().items()
        }

    wait_until(
        lambda: all(AFTER in held().get(trial.worker.number, ()) for trial in trials),
        "the router has not read everything",
    )
    found = held()
    differs = {}
    for trial in trials:
        said = PROFILE.treat(trial.batch)[0].verdict
        did = trial.reception(found[trial.worker.number])
        if said is not did:
            differs[trial.case] = (said.text, did.text)
    assert differs == {}


def test_a_batch_without_a_rank_is_lost(indexer: DynamoIndexer) -> None:
    two = next(one for one in WIRE_FORMATS if not one.has_rank)
    three = next(one for one in WIRE_FORMATS if one.has_rank)
    trial = Trial(indexer, two, "first of a prompt")
    good = codec(three).make("BlockStored", **STORED)
    trial.worker.send(encode(Batch(1.0, [good], 0, three)))
    number = trial.worker.number
    wait_until(lambda: number in indexer.held(), "the router has read nothing")
    assert indexer.held()[number] == {"device": {*STORED["block_hashes"]}}
    verdicts = [one.verdict for one in PROFILE.treat(trial.batch)]
    assert verdicts == [Reception.BATCH_LOST]


def test_the_router_holds_what_a_replay_publishes(indexer: DynamoIndexer) -> None:
    """It holds all blocks of the tier, and more of the GPU's if removals of copies are dropped."""
    messages = replayed()
    plain, counted = (Worker(indexer, next(Trial.numbers), REPLAYED_SIZE) for _ in range(2))
    fold, counting = StreamFold(), EventDecoder()
    copies: Counter[int | bytes] = Counter()
    for message in messages:
        batch, found = fold.apply(message.sequence, message.payload)
        assert batch is not None
        assert not found
        plain.send(message.payload)
        kept = [event for event in batch.events if is_last_copy(event, copies)]
        counted.send(encode(replace(counting.decode(message.payload), events=kept)))
    held = {medium: {key[0] for key in keys} for medium, keys in fold.held.items()}
    assert fold.num_copies_left > 0
    assert {*held} == {"GPU", "CPU"}
    for worker in (plain, counted):
        worker.send(AT_THE_END)
    wait_until(
        lambda: all(
            AFTER in indexer.held().get(worker.number, {}).get("device", ())
            for worker in (plain, counted)
        ),
        "the router has not read everything",
    )
    of_plain, of_counted = (indexer.held()[worker.number] for worker in (plain, counted))
    assert of_plain["host_pinned"] == of_counted["host_pinned"] == held["CPU"]
    # The router also drops a block whose parent was removed.
    assert of_plain["device"] < of_counted["device"] <= held["GPU"] | {AFTER}


def replayed() -> list[Message]:
    """Record the events of the default connector's engine for a generated workload."""
    config = ReplayConfig(300, 64, 4, "full", {"cpu_blocks": 400, "enable_events": True})
    rows = generate_trace(num_requests=60, seed=0, block_size=REPLAYED_SIZE)
    any_port = "tcp://127.0.0.1:*"
    with Publisher(any_port, any_port) as publisher:
        feed = EventFeed(publisher, make_geometry("full", REPLAYED_SIZE), NEWEST)
        report = replay(rows, REPLAYED_SIZE, OffloadConnector, config, on_step=feed.publish)
        assert report.is_clean
        with Listener(publisher.endpoint, publisher.replay_endpoint) as listener:
            return [*listener.replay(0)]


def is_last_copy(event: AnyEvent, copies: Counter[int | bytes]) -> bool:
    """False for the removal of a GPU block that another one still holds the key of."""
    if getattr(event, "medium", None) != "GPU":
        return True
    hashes = event.block_hashes  # type: ignore[union-attr]
    if isinstance(event, StoredEvent):
        copies.update(hashes)
        return True
    copies.subtract(hashes)
    assert len(hashes) == 1
    return not copies[hashes[0]]
