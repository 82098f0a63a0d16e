"""The canary around right and wrong connectors of vLLM, under the simulation."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvview.testing.connector import generate_scenario, simulate
from kvview_vllm.canary import CanaryConnector, CanaryOneGroupConnector
from kvview_vllm.simulation import VLLMEngines
from kvview_vllm.simulation.raw.transfer_config import registered
from kvview_vllm.simulation.scheduler import capabilities
from tests.vllm.raw_connectors import GroupsConnector, HostConnector, load_fault

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SEEDS = range(3)
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
WRONG_BYTES = ("LoadsTheNextBlock", "LoadsOneLayer", "FreesBeforeItStores", "ReportsLoadsAtOnce")


class Canary:
    """Runs connectors under the canary, and collects its incidents.

    Args:
        folder: Folder of the incidents.
        engines: Engines of the installed vLLM.
    """

    def __init__(self, folder: Path, engines: VLLMEngines) -> None:
        self.folder = folder
        self.engines = engines

    def run(
        self, kind: type, seed: int, wrapper: type = CanaryOneGroupConnector, **extra: Any
    ) -> Any:
        entry = {"connector": kind.__name__, "sample": 1, "incidents": str(self.folder)}
        options = {"canary": entry | extra.pop("canary", {}), **extra}
        with registered(kind):
            return simulate(wrapper, generate_scenario(seed), options, engines=self.engines)

    def incidents(self) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("*.json"))]


@pytest.fixture
def canary(tmp_path: Path, engines: VLLMEngines) -> Canary:
    return Canary(tmp_path / "incidents", engines)


@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [(HostConnector, CanaryOneGroupConnector), (GroupsConnector, CanaryConnector)],
)
def test_a_right_connector_stays_clean(kind: type, wrapper: type, canary: Canary) -> None:
    for seed in SEEDS:
        result = canary.run(kind, seed, wrapper)
        assert result.failure is None, result.failure
    assert canary.incidents() == []


@pytest.mark.parametrize("name", WRONG_BYTES)
def test_wrong_bytes_are_an_incident(name: str, canary: Canary) -> None:
    fault = load_fault(name)
    assert any(canary.run(fault, seed).failure is not None for seed in range(8))
    incident, *_ = canary.incidents()
    assert incident["law"] == "XFER-1"
    assert incident["connector"] == name
    assert incident["num_compared"] < 100
    num_wrong = len(incident["tensors"]) * (2 if name == "LoadsOneLayer" else 1)
    assert num_wrong == len(incident["digest"])


@pytest.mark.skipif(not capabilities.can_reset_connectors(), reason="no reset reaches a connector")
@pytest.mark.skipif(
    not hasattr(HostConnector, "bind_gpu_block_pool"), reason="the canary gets no pool"
)
def test_kv_of_before_a_reset_is_an_incident(canary: Canary) -> None:
    assert canary.run(load_fault("KeepsItsKeys"), 1).failure is not None
    assert canary.incidents()[0]["law"] == "CONN-11"


def test_every_hook_of_the_release_reaches_the_connector() -> None:
    base = import_module(f"{V1}.base").KVConnectorBase_V1
    hooks = {name for name in dir(base) if not name.startswith("_")}
    passed_on = {name for kind in CanaryConnector.__mro__[:-1] for name in vars(kind)}
    assert hooks <= passed_on
    assert not CanaryConnector.__abstractmethods__
