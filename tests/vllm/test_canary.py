"""The canary around right and wrong connectors of vLLM, under the simulation.

A right connector stays clean only if CANARY-1, CANARY-2, CANARY-3, CANARY-4, CANARY-6 and CANARY-7
hold; CANARY-5 and CANARY-8 to CANARY-10 have tests of their own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from kvview.testing.connector import generate_scenario, simulate
from kvview.testing.connector.scenario.scenario import Scenario
from kvview_vllm.canary import CanaryConnector, CanaryOneGroupConnector
from kvview_vllm.canary.blocks.digests import digest
from kvview_vllm.canary.blocks.known_digests import KnownDigests
from kvview_vllm.canary.blocks.sampling import Sampler
from kvview_vllm.canary.call_laws import CallLaws
from kvview_vllm.canary.incidents import IncidentFolder
from kvview_vllm.canary.watched_pool import watched_pool
from kvview_vllm.canary.wrapper.canary_messages import SampledBlock
from kvview_vllm.canary.wrapper.canary_metrics import COUNTERS, CanaryPromMetrics, CanaryStats
from kvview_vllm.metrics.connector_metrics import PREFIX
from kvview_vllm.recorder import Recorder
from kvview_vllm.recorder.incident import read_incident
from kvview_vllm.releases import installed
from kvview_vllm.releases.build import samples
from kvview_vllm.simulation import VLLMEngines
from kvview_vllm.simulation.raw.transfer_config import registered
from kvview_vllm.simulation.scheduler import capabilities
from tests.vllm.canary_connectors import (
    ForgetsTheHits,
    LoadsABatch,
    ReusesPages,
    ShortKeys,
    StoresTheTail,
)
from tests.vllm.raw_connectors import Copies, GroupsConnector, HostConnector, faults, load_fault

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
        self,
        kind: type,
        scenario: int | Scenario,
        wrapper: type = CanaryOneGroupConnector,
        **extra: Any,
    ) -> Any:
        entry = {"connector": kind.__name__, "sample": 1, "incidents": str(self.folder)}
        options = {"canary": entry | extra.pop("canary", {}), **extra}
        if isinstance(scenario, int):
            scenario = generate_scenario(scenario)
        with registered(kind):
            return simulate(wrapper, scenario, options, engines=self.engines)

    def incidents(self) -> list[dict[str, Any]]:
        files = sorted(
            self.folder.glob("incident-*.json"), key=lambda file: file.stat().st_mtime_ns
        )
        return [json.loads(file.read_text()) for file in files]


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
    num_wrong = len(incident["tensors"]) * (2 if name == "LoadsOneLayer" else 1)
    assert num_wrong == len(incident["digest"])


@pytest.mark.parametrize(
    "kind", [ShortKeys, ReusesPages, LoadsABatch, ForgetsTheHits, StoresTheTail]
)
def test_faults_by_an_author_who_had_not_read_the_canary_are_incidents(
    kind: type, canary: Canary
) -> None:
    for seed in range(12):
        failure = canary.run(kind, seed).failure
        if failure is not None and failure.law == "XFER-1":
            assert canary.incidents()[0]["law"] == "XFER-1"
            return
    pytest.fail("no seed shows the fault")


def loading_scenario(canary: Canary, **changes: Any) -> Scenario:
    """Return the first scenario in which a connector that loads one of two layers is found."""
    for seed in range(8):
        scenario = replace(generate_scenario(seed), **changes)
        if canary.run(load_fault("LoadsOneLayer"), scenario).failure is not None:
            return scenario
    pytest.fail("no seed loads")


@pytest.mark.skipif(not capabilities.has_two_runners(), reason="no Model Runner V2")
@pytest.mark.parametrize("is_other", [False, True])
def test_wrong_bytes_are_an_incident_in_both_model_runners(is_other: bool, canary: Canary) -> None:
    scenario = loading_scenario(canary, other_runner=is_other)
    assert canary.incidents()[0]["law"] == "XFER-1"
    assert canary.run(HostConnector, scenario).failure is None


def test_an_incident_of_a_worker_makes_the_scheduler_write_its_calls(canary: Canary) -> None:
    scenario = loading_scenario(canary, worker_half="in_a_process")
    assert {one["half"] for one in canary.incidents()} == {"rank0"}
    (path, *_) = canary.folder.glob("recorded-scheduler-*.json")
    incident = read_incident(path)
    assert incident.law == "XFER-1"
    assert any(record.received for record in incident.records)
    assert canary.run(HostConnector, scenario).failure is None


@pytest.mark.skipif(not installed().connector.failed_blocks, reason="no reports of failed loads")
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_recompute_repairs_wrong_blocks(seed: int, canary: Canary) -> None:
    kind, scenario = load_fault("LoadsOneLayer"), generate_scenario(seed)
    assert canary.run(kind, scenario).failure is not None
    options: dict[str, Any]
    options = {"canary": {"on_difference": "recompute"}, "kv_load_failure_policy": "recompute"}
    failure = canary.run(kind, scenario, **options).failure
    assert failure is None, failure


def test_stop_ends_the_server(canary: Canary) -> None:
    scenario = loading_scenario(canary)
    canary_options = {"on_difference": "stop"}
    failure = canary.run(load_fault("LoadsOneLayer"), scenario, canary=canary_options).failure
    assert "on_difference is 'stop'" in str(failure)


def test_a_full_disk_and_an_own_exception_never_reach_the_server(
    canary: Canary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    canary.folder.write_text("a file in the place of the folder")

    def fail(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Sampler, "on_step", fail)
    monkeypatch.setattr(Recorder, "on_promise", fail)
    result = canary.run(HostConnector, 1)
    assert result.failure is None, result.failure
    assert {"Sampler is off", "Recorder is off"} <= {
        record.getMessage().removeprefix("canary: ").partition(",")[0] for record in caplog.records
    }
    IncidentFolder(str(canary.folder), "rank0").write("incident", {})
    assert "could not write" in caplog.records[-1].getMessage()


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


def child(kind: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": kind, "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize("is_around", [True, False], ids=["around", "inside"])
def test_canaries_around_and_inside_of_a_multi_connector(is_around: bool, canary: Canary) -> None:
    """Inside, each canary also receives the reports of the other connector's transfers."""
    multi = import_module(f"{V1}.multi_connector").MultiConnector
    for kind in (HostConnector, load_fault("LoadsTheNextBlock")):
        with registered(kind):
            name = kind.__name__
            if is_around:
                children = [child(name), child(name, delay=5)]
                result = canary.run(multi, 1, CanaryOneGroupConnector, connectors=children)
            else:
                entry = {"connector": name, "sample": 1, "incidents": str(canary.folder)}
                inner = child("CanaryOneGroupConnector", canary=entry)
                inner["kv_connector_module_path"] = "kvview_vllm.canary"
                # vLLM loads from the first child that has the blocks.
                others = [child(name, delay=5)]
                children = [*others, inner] if kind is HostConnector else [inner, *others]
                options = {"connectors": children}
                result = simulate(multi, generate_scenario(1), options, engines=canary.engines)
        is_right = kind is HostConnector
        assert (result.failure is None) == is_right, result.failure
        assert {one["law"] for one in canary.incidents()} == ({*()} if is_right else {"XFER-1"})
    recorded = canary.folder.glob("recorded-*.json")
    assert {json.loads(file.read_text())["law"] for file in recorded} == {"XFER-1"}


DAMAGES = ("host memory", "disk", "wire", "wrong page", "wrong block")


def corrupt(page: torch.Tensor) -> None:
    page[(0,) * page.dim()] += 1


def plant(damage: str) -> type:
    """Return a connector with one fault in the 8th block that it loads."""
    on_disk = next(one for one in faults("faults of ranks") if one.name == "SharesFiles")
    base: Any = on_disk.load() if damage == "disk" else HostConnector

    class Planted(base):  # type: ignore[misc]
        num_loads = 0

        def load(self, copies: Copies) -> None:
            for key, block_id in copies:
                self.num_loads += 1
                if self.num_loads == 8:
                    self.load_wrongly(key, block_id)
                else:
                    super().load([(key, block_id)])

        def load_wrongly(self, key: bytes, block_id: int) -> None:
            if damage == "wrong page":
                key = next(one for one in self.host if one != key)
            elif damage == "wrong block":
                block_id += 1 if block_id == 1 else -1
            elif damage == "host memory":
                corrupt(self.host[key][-1])
            elif damage == "disk":
                pages = torch.load(f"{self.path}/{key.hex()}")
                corrupt(pages[-1])
                torch.save(pages, f"{self.path}/{key.hex()}")
            super().load([(key, block_id)])
            if damage == "wire":
                corrupt(self.blocks(self.layers[-1])[block_id])

    return Planted


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_planted_corruption_is_seen_first(damage: str, canary: Canary, tmp_path: Path) -> None:
    path = {"path": str(tmp_path)} if damage == "disk" else {}
    scenario = replace(generate_scenario(1), ranks=())  # because ranks would share the files
    assert canary.run(plant(damage), scenario, CanaryOneGroupConnector, **path).failure is not None
    first = canary.incidents()[0]
    if damage == "wrong block":  # which may hold the KV of its last owner, of before a reset
        assert first["law"] in ("XFER-1", "CONN-11")
    else:
        assert first["law"] == "XFER-1"
        assert ("the KV of block hash" in first["message"]) == (damage == "wrong page")
    assert (len(first["tensors"]) < len(first["digest"])) == (not damage.startswith("wrong"))


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


def report(**names: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"finished_sending": None, "finished_recving": None} | names)


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
            laws.on_allocated(request, None, 16)
            loads = 1
        elif call == "load report":
            laws.on_output(report(finished_recving={"r"}))
            expected += ["CONN-3"] * (not loads)
            loads = 0
        elif call == "end":
            laws.on_finished(request, (True, None))
            kept = 1
        else:
            laws.on_output(report(finished_sending={"r"}))
            expected += ["CONN-4"] * (not kept)
            kept = 0
    assert broken == expected


def test_reports_of_siblings_are_no_incidents() -> None:
    broken: list[str] = []
    laws = CallLaws(lambda law, message: broken.append(law), has_siblings=True)
    laws.on_output(report(finished_recving={"r"}, finished_sending={"s"}))
    assert broken == []


def test_late_loads_ends_and_holds_are_reported_once() -> None:
    broken: list[str] = []
    now = [0.0]
    laws = CallLaws(lambda law, message: broken.append(law), clock=lambda: now[0])
    request = SimpleNamespace(request_id="r", num_tokens=65)
    laws.on_promise(request, 0, (16, True))
    laws.on_allocated(request, None, 16)
    laws.on_finished(SimpleNamespace(request_id="s"), (True, None))
    laws.on_promise(request, 0, (None, False))
    laws.hold([7], "here")
    now[0] = 61.0
    for _ in range(3000):
        laws.on_step(None)
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
    counts: Counter[str] = Counter()
    known, place = KnownDigests(counts), SampledBlock(b"h" * 32, 0, 5)
    assert [known.compare(place, digest) for digest in ((1,), (1,), (2,))] == [None] * 3
    assert counts == {"canary_learnt": 1, "canary_changed": 1}


def test_canary_9_every_series_starts_at_zero() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()

    def counter(*args: Any) -> Any:
        return client.Counter(*args, registry=registry)

    metrics = CanaryPromMetrics("Mine", None, {client.Counter: counter}, ["engine"], {0: ["0"]})
    page = (Path(__file__).parents[2] / "docs/canary.md").read_text("utf-8")
    assert {f"{PREFIX}{one}_total" for one in COUNTERS} == set(re.findall(r"vllm:\w+_total", page))
    name = "vllm:kvview_canary_incidents_total"
    labels = {"engine": "0", "connector": "Mine"}
    assert registry.get_sample_value(name, labels) == 0
    first, second = (CanaryStats(("Mine", None), {"canary_incidents": 1}) for _ in range(2))
    metrics.observe(first.aggregate(second).data)
    assert registry.get_sample_value(name, labels) == 2


def test_kv_of_before_any_reset_is_stale_also_if_its_hash_was_computed_again() -> None:
    known, place = KnownDigests(Counter()), SampledBlock(b"h" * 32, 0, 5)
    for old in ((1,), (2,)):
        known.add(place, old)
        known.reset()
    for again in (False, True):
        if again:
            known.add(place, (3,))
            assert known.compare(place, (3,)) is None
        for stale in ((1,), (2,)):
            wrong = known.compare(place, stale)
            assert wrong is not None
            assert wrong.law == "CONN-11"
