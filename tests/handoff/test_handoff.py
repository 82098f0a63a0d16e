"""The contract of handoffs, and its check as a command."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import settings

from kvview import CacheGeometry, RequestInfo
from kvview.cli.commands import cli
from kvview.errors import HandoffError
from kvview.handoff import Handoff, Offers, Peer, layout_of
from kvview.testing.handoff import HandoffConformance
from kvview_reference.engine.request import chain_hashes
from kvview_reference.handoff.pull import PullConnector

GEOMETRY = CacheGeometry.single(4)
LAYOUT = layout_of(GEOMETRY, [64])
HASHES = chain_hashes(range(3))
REQUEST = RequestInfo("r", 13, HASHES)
ME = Peer("P", "life 1", "tcp://p:1")
HANDOFF = Handoff("P", "life 1", "tcp://p:1", 0, 8, HASHES[1].hex(), LAYOUT)


class TestPullConnector(HandoffConformance):
    connector = PullConnector
    settings = settings(max_examples=10)


def test_parameters_survive_a_router_that_adds_entries() -> None:
    params = json.loads(json.dumps({**HANDOFF.to_params(), "router": ["r1"]}))
    assert Handoff.from_params(params) == HANDOFF


@pytest.mark.parametrize("field", [*HANDOFF.to_params()])
@pytest.mark.parametrize("value", [None, [], True, 1.0])
def test_incomplete_parameters_are_refused(field: str, value: Any) -> None:
    with pytest.raises(HandoffError, match=f"HAND-1: entry '{field}'"):
        Handoff.from_params({**HANDOFF.to_params(), field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "other"}, "pages of layout other"),
        ({"num_tokens": 0}, "does not end at a block boundary"),
        ({"num_tokens": -4}, "does not end at a block boundary"),
        ({"num_tokens": 6}, "does not end at a block boundary"),
        ({"num_tokens": 16}, "not a prefix"),
        ({"prefix": HASHES[0].hex()}, "not a prefix"),
    ],
)
def test_the_handoff_of_another_request_is_refused(changes: Any, message: str) -> None:
    HANDOFF.require_for(REQUEST, GEOMETRY, LAYOUT)
    with pytest.raises(HandoffError, match=f"HAND-6: .*{message}"):
        replace(HANDOFF, **changes).require_for(REQUEST, GEOMETRY, LAYOUT)


def test_engines_that_split_the_kv_differently_have_different_layouts() -> None:
    splits = "", "tensor 2, pipeline 1", "tensor 1, pipeline 2"
    assert len({layout_of(GEOMETRY, [64], split) for split in splits}) == 3


def test_an_offer_has_one_reader_and_ends_after_its_reads() -> None:
    offers = Offers[str](ME)
    offers.add(HANDOFF, "blocks", deadline=10.0)
    assert offers.begin_read(HANDOFF, "D", now=1.0) == "blocks"
    with pytest.raises(HandoffError, match="HAND-5: handoff 0 is read by D, not by E"):
        offers.begin_read(HANDOFF, "E", now=1.0)
    offers.close(HANDOFF, "E")
    assert offers.take_ended(now=9.0) == []
    assert offers.take_ended(now=10.0) == []  # it is being read
    offers.end_read(HANDOFF)
    assert offers.take_ended(now=10.0) == [("blocks", False)]
    with pytest.raises(HandoffError, match="HAND-5"):
        offers.begin_read(HANDOFF, "D", now=1.0)


def test_an_offer_may_be_returned_before_it_is_planned() -> None:
    offers = Offers[str](ME)
    assert offers.begin_read(HANDOFF, "D", now=0.0) is None
    offers.close(HANDOFF, "D")
    offers.add(HANDOFF, "blocks", deadline=10.0)
    assert offers.take_ended(now=0.0) == [("blocks", True)]
    later = replace(HANDOFF, handoff_id=1)
    offers.close(replace(later, prefix="00"), "D")  # a damaged number, of another prompt
    offers.add(later, "blocks", deadline=10.0)
    assert offers.take_ended(now=0.0) == []


@pytest.mark.parametrize("changes", [{"life": "life 0"}, {"engine_id": "Q"}, {"prefix": "00"}])
def test_a_foreign_handoff_reads_and_ends_nothing(changes: Any) -> None:
    offers = Offers[str](ME)
    offers.add(HANDOFF, "blocks", deadline=10.0)
    foreign = replace(HANDOFF, **changes)
    with pytest.raises(HandoffError, match="HAND-6"):
        offers.begin_read(foreign, "D", now=0.0)
    offers.close(foreign, "D")
    assert offers.take_ended(now=0.0) == []


@pytest.mark.parametrize(
    ("target", "code", "text"),
    [
        ("kvview_reference.handoff.pull:PullConnector", 0, "10 passed"),
        ("tests.mutants.handoff:NeverConfirms", 1, "HAND-3"),
        ("kvview_reference.store_connector:StoreConnector", 2, "makes a HandoffScheduler"),
    ],
)
def test_the_command_checks_a_connector(target: str, code: int, text: str) -> None:
    result = CliRunner().invoke(cli, ["check", target, "--pd", "--seeds", "6"])
    assert (result.exit_code, text in result.output) == (code, True), result.output
