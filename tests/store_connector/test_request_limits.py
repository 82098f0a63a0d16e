"""Limits that the client of a request sets on its loads and stores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvview import (
    CacheGeometry,
    ConnectorConfig,
    EngineFacts,
    RequestContent,
    RequestInfo,
    StepInfo,
)
from kvview.testing.connector import Add, HoldBlocks, Scenario, Step, simulate
from kvview.tier import Threaded
from kvview_reference.engine.request import chain_hashes
from kvview_reference.simulation import ReferenceEngines
from kvview_reference.store_connector import StoreConnector
from kvview_reference.store_connector.planning.request_prefix import NO_LIMITS, RequestLimits

GEOMETRY = CacheGeometry.single(16)


class EveryPage(Threaded):
    """A store that claims to have every page."""

    def has(self, key: bytes, /) -> bool:
        return True

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        return False

    def write(self, key: bytes, page: memoryview, /) -> bool:
        return True


@pytest.mark.parametrize(
    ("params", "limits"),
    [
        (None, NO_LIMITS),
        ({}, NO_LIMITS),
        ({"max_load_tokens": 0, "max_offload_tokens": 7}, RequestLimits(0, 7)),
        ({"max_load_tokens": -1, "max_offload_tokens": True}, NO_LIMITS),
        ({"max_load_tokens": "4", "kv_load_tiers": "CPU"}, NO_LIMITS),
        ({"kv_load_tiers": []}, RequestLimits(uses_store=False)),
        ({"kv_load_tiers": [{"medium": "cpu"}]}, RequestLimits(uses_store=False)),
        ({"kv_load_tiers": [{"medium": "cpu"}, {"medium": "Storage"}]}, NO_LIMITS),
        ({"kv_load_tiers": [{"locality": "REMOTE"}]}, NO_LIMITS),
        ({"kv_load_tiers": [{"medium": "CPU"}, {"medium": 7}]}, RequestLimits(uses_store=False)),
        ({"kv_load_tiers": [{"medium": "tape"}, 5]}, NO_LIMITS),
    ],
)
def test_wrong_values_limit_nothing(params: Any, limits: RequestLimits) -> None:
    assert RequestLimits.of(params) == limits


@pytest.mark.parametrize("mode", ["eager", "finish", "victim", "exclusive"])
def test_caps_on_tokens(mode: str) -> None:
    prompt = Add("first", 1, 65)
    again = replace(prompt, request_id="again")

    def promised(*adds: Add) -> int:
        evicted = (Step(12), HoldBlocks(20), Step(2), HoldBlocks(0))
        events = tuple(event for add in adds for event in (add, *evicted))
        scenario = Scenario(GEOMETRY, 20, events, max_tokens_per_step=128)
        options = {"cpu_blocks": 20, "mode": mode}
        result = simulate(StoreConnector, scenario, options, engines=ReferenceEngines())
        assert result.failure is None, result.failure
        return result.coverage["tokens promised"]

    assert promised(prompt, again) == 64
    assert promised(prompt, replace(again, max_load_tokens=40)) == 32
    assert promised(replace(prompt, max_offload_tokens=40), again) == 32
    assert promised(replace(prompt, max_offload_tokens=0), again) == 0


def test_a_request_that_allows_host_memory_alone_waits_for_no_store() -> None:
    hashes = chain_hashes(range(4))
    config = ConnectorConfig(GEOMETRY, {"store": f"{__file__}:EveryPage", "weights": "1"})
    half = StoreConnector(config).make_scheduler()
    half.on_engine_ready(EngineFacts(20, (8,), 4))

    def promised(params: Any) -> int | None:
        request = RequestInfo("r", 65, hashes, 0, RequestContent(transfer_params=params))
        answer = half.match_prefix(request, 0)
        while answer is None:
            half.plan_step(StepInfo())
            answer = half.match_prefix(request, 0)
        return answer

    assert promised(None) == 64
    assert promised({"max_load_tokens": 40}) == 32
    assert promised({"kv_load_tiers": [{"medium": "CPU"}]}) == 0
    half.shutdown()
