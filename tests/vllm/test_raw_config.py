"""The classes, constructors and configurations of raw connectors that vLLM accepts or refuses."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvview import CacheGeometry, ConfigError
from kvview.testing.connector import Scenario, Step, generate_scenario, load_engines, simulate
from kvview_vllm.simulation import VLLMEngines
from kvview_vllm.simulation.raw.transfer_config import classes_of, split_options
from tests.vllm.raw_connectors import HostConnector

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


def _refuses_old_constructors() -> bool:
    factory = import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    text = Path(str(factory.__file__)).read_text(encoding="utf-8")
    return "2-argument" in text and "raise ValueError" in text


def test_the_reference_engine_refuses_a_raw_connector_in_one_line() -> None:
    scenario = Scenario(CacheGeometry.single(4), 8, (Step(1),))
    with pytest.raises(ConfigError, match="pass --engine vllm"):
        simulate(HostConnector, scenario, engines=load_engines())


class NeedsADraftModel(HostConnector):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("a draft model is required")


def test_a_connector_that_refuses_the_settings_does_not_run(engines: VLLMEngines) -> None:
    """Not red, because no law is broken (hs-connectors 0.9.0)."""
    with pytest.raises(ConfigError, match="NeedsADraftModel refuses these settings: a draft model"):
        simulate(NeedsADraftModel, generate_scenario(1), engines=engines)


class TakesTwoArguments(HostConnector):
    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)


def test_a_constructor_of_two_arguments_runs_where_vllm_accepts_it(engines: VLLMEngines) -> None:
    """Not ENGINE, although the run without the connector needs its class too (kachedb 0.3.0)."""
    scenario = generate_scenario(1)
    if _refuses_old_constructors():
        with pytest.raises(ConfigError, match=r"does not accept this connector: .*2-argument"):
            simulate(TakesTwoArguments, scenario, engines=engines)
        return
    result = simulate(TakesTwoArguments, scenario, engines=engines)
    assert result.failure is None, result.failure
    assert result.coverage["loads"]


def test_a_wrong_transfer_config_is_refused(engines: VLLMEngines) -> None:
    scenario = Scenario(CacheGeometry.single(4), 8, (Step(1),))
    options = {"kv_transfer_config": {"kv_role": "nobody"}}
    with pytest.raises(ConfigError, match="kv_transfer_config"):
        simulate(HostConnector, scenario, options, engines=engines)


@pytest.mark.parametrize(
    "connectors",
    ["text", 3, None, {"a": 1}, ["a"], [{"x": 1}], [{"kv_connector": "Nope"}]],
    ids=str,
)
def test_wrong_children_of_a_multi_connector_are_refused(connectors: Any) -> None:
    multi = import_module(f"{V1}.multi_connector").MultiConnector
    of_child = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    for config in (
        {"connectors": connectors},
        {"connectors": [of_child | {"kv_connector_extra_config": {"connectors": connectors}}]},
    ):
        with pytest.raises(ConfigError, match="connectors"):
            classes_of(multi, split_options(config))


def test_an_option_named_connectors_of_another_connector_is_its_own() -> None:
    assert classes_of(HostConnector, split_options({"connectors": "text"})) == [HostConnector]
