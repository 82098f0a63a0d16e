"""The canary around right and wrong connectors of vLLM, under the simulation.

A right connector stays clean only if CANARY-1, CANARY-2, CANARY-3, CANARY-4, CANARY-6 and CANARY-7
hold; CANARY-5 and CANARY-8 to CANARY-10 have tests of their own.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvview.testing.connector import generate_scenario, simulate
from kvview_vllm.canary import CanaryConnector, CanaryOneGroupConnector
from kvview_vllm.canary.blocks.digests import digest
from kvview_vllm.canary.blocks.known_digests import KnownDigests
from kvview_vllm.canary.call_laws import CallLaws
from kvview_vllm.canary.watched_pool import watched_pool
from kvview_vllm.canary.wrapper.canary_messages import SampledBlock
from kvview_vllm.canary.wrapper.canary_metrics import CanaryPromMetrics, CanaryStats
from kvview_vllm.releases.build import samples
from kvview_vllm.simulation import VLLMEngines
from kvview_vllm.simulation.raw.transfer_config import registered
from kvview_vllm.simulation.scheduler import capabilities
from tests.vllm.raw_connectors import GroupsConnector, HostConnector, load_fault

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SEEDS = (0, 1, 3)
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


def example_connector() -> Any:
    try:
        return import_module(f"{V1}.example_connector").ExampleConnector
    except ImportError:
        return import_module(f"{V1}.shared_storage_connector").SharedStorageConnector


def test_the_wrapped_connector_keeps_its_verdict(canary: Canary) -> None:
    """OffloadingConnector is right in 0.33, and its bugs in older releases stay visible."""
    kind = import_module(f"{V1}.offloading_connector").OffloadingConnector
    sizes = {"cpu_bytes_to_use": 1_000_000, "num_cpu_blocks": 30}
    for seed in SEEDS:
        bare = simulate(kind, generate_scenario(seed), sizes, engines=canary.engines)
        result = canary.run(kind, seed, CanaryConnector, **sizes)
        laws = [one and one.law for one in (bare.failure, result.failure)]
        assert laws[0] == laws[1], (bare.failure, result.failure)
        assert bool(canary.incidents()) <= (bare.failure is not None)


@pytest.mark.skipif(
    not hasattr(HostConnector, "bind_gpu_block_pool"), reason="kvview needs the pool"
)
def test_a_connector_of_kvview_stays_clean(canary: Canary) -> None:
    kind = import_module("kvview_vllm.connector").KVViewConnector
    target = f"{Path(__file__).parents[2]}/examples/host_memory.py:HostMemoryConnector"
    options = {"connector": target, "options": {"cpu_blocks": 30}}
    for seed in SEEDS:
        result = canary.run(kind, seed, CanaryConnector, **options)
        assert result.failure is None, result.failure
        assert result.coverage["loads"]
    assert canary.incidents() == []


def test_wrong_kv_of_the_example_connector_of_vllm_is_an_incident(
    canary: Canary, tmp_path: Path
) -> None:
    """It addresses its files by a prompt's tokens, so that a part of a block may be missing."""
    kind = example_connector()
    seeds = (1, 5)
    found = [canary.run(kind, seed, shared_storage_path=f"{tmp_path}/{seed}") for seed in seeds]
    is_wrong = any(one.failure is not None and one.failure.law == "XFER-1" for one in found)
    assert is_wrong == any(one["law"] in ("XFER-1", "CONN-11") for one in canary.incidents())


def plant(damage: str) -> type:
    """Return HostConnector with one fault in the 8th block that it stores or loads."""

    class Planted(HostConnector):
        num_loads = 0

        def load(self, copies: Any) -> None:
            for copy in copies:
                self.num_loads += 1
                if self.num_loads == 8:
                    key, block_id = copy
                    if damage == "host memory":
                        page = self.host[key][-1]
                        page[(0,) * page.dim()] += 1
                    elif damage == "wrong page":
                        key = next(one for one in self.host if one != key)
                    copy = (key, block_id)
                super().load([copy])

    return Planted


@pytest.mark.parametrize("damage", ["host memory", "wrong page"])
def test_one_planted_corruption_is_seen_once_and_first(damage: str, canary: Canary) -> None:
    assert canary.run(plant(damage), 1).failure is not None
    first = canary.incidents()[0]
    assert first["law"] == "XFER-1"
    assert first["num_compared"] <= 8
    assert ("the KV of block hash" in first["message"]) == (damage == "wrong page")
    assert len(first["tensors"]) < len(first["digest"]) or damage == "wrong page"


def test_digests_in_a_folder_survive_the_server(canary: Canary, tmp_path: Path) -> None:
    place, digests = SampledBlock(b"h" * 32, 0, 5), tmp_path / "digests" / "rank0.txt"
    KnownDigests(10, digests, "model").add(place, (1, 2))
    with digests.open("a") as lines:
        lines.write("6868 0")  # of a server that was killed
    again = KnownDigests(10, digests, "model")
    assert again.compare(place, (1, 2)) is None
    difference = again.compare(place, (1, 3))
    assert difference is not None
    assert [*difference.layers] == [1]
    assert KnownDigests(10, digests, "another model").compare(place, (1, 3)) is None


def test_a_digest_depends_on_every_byte_and_its_place() -> None:
    pages = torch.arange(4 * 96, dtype=torch.int64).to(torch.int8).view(4, 96)
    ids = torch.tensor([2])
    before = digest(pages, ids)
    for byte in range(96):
        for bit in (1, -128):
            pages[2, byte] ^= bit
            assert digest(pages, ids) != before
            pages[2, byte] ^= bit
    pages[2] = pages[2].roll(8)
    assert digest(pages, ids) != before


CALLS = ("touch", "free", "load", "load report", "end", "sent")


@given(st.lists(st.sampled_from(CALLS), max_size=30))
def test_laws_count_holds_and_reports(calls: list[str]) -> None:
    """The model is a counter for each kind of call."""
    broken: list[str] = []
    laws = CallLaws(lambda law, message: broken.append(law))
    request = SimpleNamespace(request_id="r", num_tokens=65)
    held = loads = kept = 0
    expected: list[str] = []
    for call in calls:
        if call == "touch":
            laws.hold([3], "here")
            held += 1
        elif call == "free":
            laws.release([3], "here")
            expected += ["POOL-4"] * (not held)
            held -= held > 0
        elif call == "load":
            laws.on_promise(request, 0, (16, True))
            laws.on_allocated("r", 16)
            loads = 1
        elif call == "load report":
            laws.on_output(["r"], [])
            expected += ["CONN-3"] * (not loads)
            loads = 0
        elif call == "end":
            laws.on_finished("r", keeps_blocks=True, keeps_load=True)
            kept = 1
        else:
            laws.on_output([], ["r"])
            expected += ["CONN-4"] * (not kept)
            kept = 0
    assert broken == expected


def test_late_loads_ends_and_holds_are_reported_once() -> None:
    broken: list[str] = []
    now = [0.0]
    laws = CallLaws(lambda law, message: broken.append(law), lambda: now[0])
    request = SimpleNamespace(request_id="r", num_tokens=65)
    laws.on_promise(request, 0, (16, True))
    laws.on_allocated("r", 16)
    laws.on_finished("s", keeps_blocks=True, keeps_load=True)
    laws.on_promise(request, 0, (None, False))
    laws.hold([7], "here")
    now[0] = 61.0
    for _ in range(3000):
        laws.on_step(60.0)
    assert broken == ["CONN-3", "CONN-4", "CONN-2", "CONN-4"]


def test_a_watched_pool_is_the_pool_and_notes_calls() -> None:
    broken: list[str] = []
    laws = CallLaws(lambda law, message: broken.append(law))
    scheduler = import_module("vllm.v1.core.sched.scheduler").Scheduler
    pool = samples.make_scheduler(scheduler, 8, 1, None).kv_cache_manager.block_pool
    watched = watched_pool(pool, laws)
    blocks = watched.get_new_blocks(2)
    assert pool.get_num_free_blocks() == watched.get_num_free_blocks() == 5
    watched.free_blocks(blocks)
    assert not broken
    taken = pool.get_new_blocks(1)
    watched.free_blocks(taken)
    assert broken == ["POOL-4"]


def test_canary_5_a_learnt_block_that_changes_is_only_counted() -> None:
    known, place = KnownDigests(10), SampledBlock(b"h" * 32, 0, 5)
    assert [known.compare(place, digest) for digest in ((1,), (1,), (2,))] == [None] * 3
    assert (known.num_learnt, known.num_changed, known.num_compared) == (1, 1, 0)


def test_canary_9_every_series_starts_at_zero() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()

    def counter(*args: Any) -> Any:
        return client.Counter(*args, registry=registry)

    metrics = CanaryPromMetrics("Mine", None, {client.Counter: counter}, ["engine"], {0: ["0"]})
    name = "vllm:kvview_canary_incidents_total"
    labels = {"engine": "0", "connector": "Mine"}
    assert registry.get_sample_value(name, labels) == 0
    first, second = (CanaryStats(("Mine", None), {"canary_incidents": 1}) for _ in range(2))
    metrics.observe(first.aggregate(second).data)
    assert registry.get_sample_value(name, labels) == 2
