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
from kvview.handoff import Handoff, Peer, layout_of
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


def test_a_check_without_a_wire_refuses_a_connector_for_handoffs() -> None:
    target = "kvview_reference.handoff.pull:PullConnector"
    result = CliRunner().invoke(cli, ["check", target, "--seeds", "6"])
    assert (result.exit_code, "kvview check --pd" in result.output) == (2, True), result.output
