"""The connector seam of whichever vLLM release can be imported, and forks of it."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import pytest

from kvview import UnsupportedEngineError
from kvview_vllm.releases import capabilities
from kvview_vllm.releases.probes import ConnectorSurface, probe_connector

vllm = pytest.importorskip(  # a submodule: this very folder is named vllm
    "vllm.version",
    reason="needs vLLM's Python sources: tests/vllm/sources.py",
    exc_type=ImportError,
)


def number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


@pytest.fixture
def surface() -> ConnectorSurface:
    return ConnectorSurface.installed()


def test_capabilities_are_where_the_table_says(surface: ConnectorSurface) -> None:
    match = re.match(r"\d+\.\d+\.\d+", vllm.__version__)
    if match is None:
        pytest.skip(f"no release: {vllm.__version__}")
    expected = {
        capability.name
        for capability in capabilities.CAPABILITIES
        if capability.seam == "connector"
        and number(capability.first_release) <= number(match[0])
        and number(match[0]) <= number(capability.last_release or capabilities.NEWEST_TESTED)
    }
    assert probe_connector(surface) == expected == probe_connector()


def refused(surface: ConnectorSurface) -> str:
    with pytest.raises(UnsupportedEngineError) as caught:
        probe_connector(surface)
    for part in ("connector seam", vllm.__version__, "0.11.0 - 0.33.0", "upgrade kvview"):
        assert part in str(caught.value)
    return str(caught.value)


def test_a_method_with_another_signature_is_refused(surface: ConnectorSurface) -> None:
    class Fork(surface.base):  # type: ignore[misc,name-defined]
        def get_num_new_matched_tokens(self, request: Any, tokens: int, tier: str) -> Any: ...

    assert "get_num_new_matched_tokens(self, request, tokens, tier)" in refused(
        replace(surface, base=Fork)
    )


def test_a_method_that_must_be_written_is_refused(surface: ConnectorSurface) -> None:
    class Fork(surface.base):  # type: ignore[misc,name-defined]
        @abstractmethod
        def price_of_load(self) -> float: ...

    assert "requires price_of_load" in refused(replace(surface, base=Fork))


@pytest.mark.parametrize("name", ["SchedulerOutput", "CachedRequestData", "KVConnectorOutput"])
def test_a_field_that_is_gone_is_refused(surface: ConnectorSurface, name: str) -> None:
    fields = {**surface.fields, name: frozenset({"other"})}
    assert f"{name} without " in refused(replace(surface, fields=fields))
