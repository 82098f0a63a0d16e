"""What docs/porting.md says of the connector before its port, and after."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

pytest.importorskip(  # a submodule, because this folder is named vllm too
    "vllm.version",
    reason="needs vLLM's Python sources: tests/vllm/sources.py",
    exc_type=ImportError,
)

from kvview.testing.connector import check_connector
from kvview_vllm.simulation import VLLMEngines

with warnings.catch_warnings():  # of torch, as vLLM imports it
    warnings.simplefilter("ignore")
    from tests.vllm.ported import After, Before
    from tests.vllm.raw_connectors import HostConnector

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(
        not hasattr(HostConnector, "bind_gpu_block_pool"),
        reason="no connector is given the pool in this release",
    ),
]
PAGE = Path(__file__).parents[2] / "docs" / "porting.md"


def test_before_the_port_the_leak_is_found_and_the_way_out_is_named() -> None:
    runs = check_connector(Before, seeds=3, engines=VLLMEngines(), max_shrink_runs=12)
    assert {failure.law for failure in runs.failures} == {"CONN-4"}
    message = runs.failures[0].message
    for told in (
        "are held when everything has ended",
        "view.touch_blocks(ids) and view.lease(ids)",
    ):
        assert told in message
        assert told in PAGE.read_text(), "the page says what the check said"


def test_after_the_port_it_is_green() -> None:
    runs = check_connector(After, seeds=8, engines=VLLMEngines())
    assert runs.is_clean, runs.summary()
