"""The profile of Dynamo's router, compared with the router for every event."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from typing import Any

import pytest

pytest.importorskip(
    "dynamo.indexer", reason="pip install --no-deps -r tests/vllm/requirements-clients.txt"
)

from kvview.events.formats import WIRE_FORMATS, WireFormat
from kvview.events.wire import (
    Batch,
    StoredEvent,
    WireEvent,
    codec,
    encode,
)
from kvview.testing.events.consumers import Reception, find_consumer
from tests.events.cases import BLOCK_SIZE, REMOVALS, REMOVED, STORED, STORES
from tests.events.dynamo_indexer import DynamoIndexer, Worker, wait_until

BEFORE_1_6 = version("ai-dynamo-runtime").startswith("1.5.")
PROFILE = find_consumer("dynamo-1.5" if BEFORE_1_6 else "dynamo")
SAME_BATCH, AFTER = 555, 666


@pytest.fixture(scope="module")
def indexer() -> Iterator[DynamoIndexer]:
    with closing(DynamoIndexer()) as indexer:
        wait_until(indexer.is_up, "the indexer does not respond")
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
