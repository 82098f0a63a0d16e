"""Raw connectors of vLLM, which do not know kvview, under the simulation."""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from kvview import CacheGeometry, FullAttention, SlidingWindow
from kvview.targets import load_target
from kvview.testing.connector import (
    Add,
    ConnectorRuns,
    HoldBlocks,
    Reset,
    Scenario,
    Step,
    check_connector,
    generate_scenario,
    simulate,
)
from kvview.testing.connector.scenario.generate import INVALID_CAPS
from kvview.testing.connector.scenario.scenario import Fate
from kvview.testing.results.report import Outcome
from kvview.testing.runner import run_checks
from kvview_vllm.releases.compat import calls
from kvview_vllm.releases.compat.calls import ended_requests_take_no_output
from kvview_vllm.releases.compat.shapes import find_class
from kvview_vllm.simulation import VLLMEngines
from kvview_vllm.simulation.raw import RawRun
from kvview_vllm.simulation.raw.raw_scenarios import can_load_in_groups
from kvview_vllm.simulation.scheduler import capabilities
from tests.mutants.edits import Variant
from tests.vllm.ported import After, Before
from tests.vllm.raw_connectors import (
    TAKES_CONFIG,
    AgreesOnSizes,
    DoesNothing,
    EventsConnector,
    FailsOnTheLastRank,
    GroupsConnector,
    HostConnector,
    OneRankReports,
    ReadsItsRanks,
    RecordsEvents,
    RefusesRanks,
    SavesInItsStep,
    WritesBehind,
    faults,
    load_fault,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
BASE: Any = import_module(f"{V1}.base").KVConnectorBase_V1
OFFLOADING: Any = import_module(f"{V1}.offloading_connector").OffloadingConnector
OFFLOADING_OPTIONS = {"cpu_bytes_to_use": 1_000_000, "num_cpu_blocks": 30}
SEEDS = range(8)
ROOT = Path(__file__).parents[2]
EVICTED = (HoldBlocks(100), HoldBlocks(0))
has_pool = pytest.mark.skipif(
    not hasattr(HostConnector, "bind_gpu_block_pool"),
    reason="this release passes the pool to no connector",
)
has_groups = pytest.mark.skipif(
    not can_load_in_groups(), reason="this release simulates one group only"
)


def failure_of(connector: type, seed: int, engines: VLLMEngines) -> Any:
    return simulate(connector, generate_scenario(seed), engines=engines).failure


def first_failure(connector: type, engines: VLLMEngines, seeds: range = SEEDS) -> Any:
    return next((f for seed in seeds if (f := failure_of(connector, seed, engines))), None)


@pytest.fixture(scope="module")
def runs(engines: VLLMEngines) -> ConnectorRuns:
    return check_connector(HostConnector, seeds=len(SEEDS), engines=engines)


def test_a_right_connector_is_clean_and_has_loaded(runs: ConnectorRuns) -> None:
    assert [*runs.failures, *runs.not_exercised] == []
    assert runs.coverage["loads"] > 50
    assert runs.coverage["loads next to a GPU hit"] > 10


def test_steps_in_flight_and_a_worker_half_in_a_process_are_played(engines: VLLMEngines) -> None:
    drawn = [generate_scenario(seed) for seed in SEEDS]
    process = next(one for one in drawn if one.worker_half == "whole_plans" and not one.ranks)
    ahead = next(one for one in drawn if one.steps_in_flight > 1)
    played = [simulate(HostConnector, one, engines=engines).scenario for one in (process, ahead)]
    assert played[0].worker_half == "in_a_process"
    assert (played[1].steps_in_flight > 1) == ended_requests_take_no_output()


@pytest.mark.skipif(not TAKES_CONFIG, reason="the template needs the KVCacheConfig of 0.11.1")
def test_the_template_of_kvview_new_is_clean_and_has_loaded(engines: VLLMEngines) -> None:
    target = load_target(f"{ROOT / 'examples' / 'raw_host_cache.py'}:HostCacheConnector")
    runs = check_connector(target, seeds=4, options={"host_blocks": 20}, engines=engines)
    assert [*runs.failures, *runs.not_exercised] == []
    assert runs.coverage["loads"] > 10


def test_vsim_2_every_event_that_is_not_simulated_is_listed(runs: ConnectorRuns) -> None:
    left_out = " ".join(runs.left_out)
    for part in (
        "decode-context and data parallelism",
        "layers with other names",
        "different lengths",
        "kv_load_tiers",
        "kvview partition",
    ):
        assert part in left_out
    assert "an end with transfers in flight, unless a rank is killed" in left_out
    assert ("several steps in flight" in left_out) != ended_requests_take_no_output()
    assert ("resets of the connector" in left_out) != capabilities.can_reset_connectors()


def test_loads_within_a_step_are_clean(engines: VLLMEngines) -> None:
    for seed in SEEDS[:3]:
        scenario = generate_scenario(seed)
        result = simulate(HostConnector, scenario, {"within_step": True}, engines=engines)
        assert result.failure is None, result.failure
        assert result.coverage["loads within a step"]


def each_of(family: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fault", faults(family), ids=lambda fault: fault.name)


NEEDS = {
    "Raises": capabilities.can_load_between_steps,
    "KeepsItsKeys": capabilities.can_reset_connectors,
    "RemovesTwice": capabilities.can_reset_connectors,
    "RequiresDelivery": lambda: False,  # it has a test
    "faults of sleep": capabilities.can_sleep,
    "faults of groups": can_load_in_groups,
    "faults of events": calls.can_name_groups,
}
"""The feature that shows a fault, or a family of faults."""


@pytest.mark.parametrize(
    "fault",
    [
        fault
        for family in ("faults", "faults of sleep", "faults of groups", "faults of events")
        for fault in faults(family)
    ],
    ids=lambda fault: fault.name,
)
def test_an_injected_fault_is_found(fault: Variant, engines: VLLMEngines) -> None:
    for name in (fault.name, fault.family):
        if name in NEEDS and not NEEDS[name]():
            pytest.skip(f"this release cannot show {name}")
    is_rare = fault.family == "faults of groups"
    failure = first_failure(fault.load(), engines, range(20) if is_rare else SEEDS)
    assert failure is not None
    if fault.name == "PromisesAllTokens":
        assert failure.law in ("CONN-2", "XFER-1", "CONN-3")
    if fault.family == "faults of events":
        assert failure.law == ("EVENT-1" if fault.name == "RemovesTwice" else "EVENT-2")


@each_of("faults of steps and processes")
def test_only_steps_in_flight_or_processes_show_some_faults(
    fault: Variant, engines: VLLMEngines
) -> None:
    if fault.name == "HashesScheduledBlocks" and not ended_requests_take_no_output():
        pytest.skip("one step in flight is simulated")
    connector = fault.load()
    seed = next(seed for seed in SEEDS if failure_of(connector, seed, engines) is not None)
    scenario = replace(
        generate_scenario(seed), steps_in_flight=1, worker_half="job_by_job", compute_lags=False
    )
    assert simulate(connector, scenario, engines=engines).failure is None, "hidden without them"


@pytest.mark.slow
@each_of("faults of late moments")
def test_the_first_seeds_reach_late_moments(fault: Variant, engines: VLLMEngines) -> None:
    if fault.name == "WritesOverAReset" and not capabilities.can_reset_connectors():
        pytest.skip("no reset reaches the connector")
    assert first_failure(fault.load(), engines, range(25)) is not None


@pytest.mark.newest
@pytest.mark.parametrize(("role", "is_reached"), [("kv_both", False), ("kv_producer", True)])
def test_only_a_producer_loses_the_blocks_of_a_last_step(
    role: str, is_reached: bool, engines: VLLMEngines
) -> None:
    """Otherwise vLLM preempts no request whose blocks a step in flight may write (#50297)."""
    ended = []

    class Records(HostConnector):
        def request_finished(self, request: Any, block_ids: Any) -> Any:
            ended.append((request.request_id, len(block_ids)))
            return super().request_finished(request, block_ids)

    scenario = Scenario(
        CacheGeometry.single(16),
        num_gpu_blocks=20,
        events=(Add("a", 1, 32, 3), Add("b", 2, 10, 1), Step(1), HoldBlocks(20), Step(4)),
        max_tokens_per_step=128,
        steps_in_flight=2,
    )
    options = {"kv_transfer_config": {"kv_role": role}}
    result = simulate(Records, scenario, options, engines=engines)
    assert result.failure is None, result.failure
    assert (("b", 0) in ended) == is_reached, ended


@each_of("faults of reports")
def test_a_wrong_report_is_the_connectors(fault: Variant, engines: VLLMEngines) -> None:
    if not capabilities.can_load_between_steps():
        pytest.skip("the load that is reported does not wait for a report")
    failure = first_failure(fault.load(), engines)
    assert failure.law == fault.law, failure


@pytest.mark.skipif(not capabilities.has_two_runners(), reason="the release has one model runner")
@each_of("faults of model runner V2")
def test_only_model_runner_v2_shows_some_faults(fault: Variant, engines: VLLMEngines) -> None:
    connector = fault.load()
    if fault.name == "TakesNoArguments" and not capabilities.loads_take_the_batch():
        pytest.skip("the hook gets no keyword arguments")
    options = {"within_step": fault.name in ("LoadsInLayers", "NeedsAttention")}

    def failure_in(runner: str, seed: int) -> Any:
        is_other = (runner == "V2") is not calls.gpus_use_runner_v2()
        scenario = replace(generate_scenario(seed), other_runner=is_other)
        return simulate(connector, scenario, options, engines=engines).failure

    assert any(failure_in("V2", seed) for seed in range(20))
    assert not any(failure_in("V1", seed) for seed in range(20))


KILLED = Scenario(  # the last rank, while it stores
    CacheGeometry.single(16),
    num_gpu_blocks=30,
    events=(Add("a", 1, 81, 2), Step(2)),
    max_tokens_per_step=128,
    ranks=(2, 2),
    ends_abruptly=True,
)


@pytest.mark.parametrize(
    "connector", [FailsOnTheLastRank, HostConnector, OneRankReports, SavesInItsStep, WritesBehind]
)
def test_a_right_connector_is_clean_on_several_ranks(connector: type, engines: VLLMEngines) -> None:
    assert simulate(connector, KILLED, engines=engines).failure is None
    for seed, ranks in ((1, (2, 2)), (3, (1, 1)), (5, (2, 2, 2)), (6, (1, 1, 1, 1))):
        scenario = replace(generate_scenario(seed), ranks=ranks)
        result = simulate(connector, scenario, engines=engines)
        assert result.failure is None, result.failure
        assert len(result.scenario.ranks) == len(ranks)
        assert result.coverage["loads"]


@pytest.mark.parametrize("ranks", [(2, 2, 2), (1, 1), (1, 1, 1, 1)])
def test_caches_model_and_process_groups_agree_on_several_ranks(
    ranks: tuple[int, ...], engines: VLLMEngines
) -> None:
    scenario = replace(generate_scenario(5), ranks=ranks)
    result = simulate(ReadsItsRanks, scenario, engines=engines)
    assert result.failure is None, result.failure


@pytest.mark.parametrize(
    ("connector", "why"),
    [
        (RefusesRanks, "the connector refuses them: one rank only"),
        (
            AgreesOnSizes,
            "the connector uses their process group, and the simulated ranks cannot communicate",
        ),
    ],
)
def test_a_connector_that_cannot_have_simulated_ranks_runs_in_one(
    connector: type, why: str, engines: VLLMEngines
) -> None:
    scenario = replace(generate_scenario(1), ranks=(2, 2))
    result = simulate(connector, scenario, engines=engines)
    assert result.failure is None, result.failure
    assert result.coverage["loads"]
    assert result.coverage[f"left out: several ranks: {why}"]


@pytest.mark.newest
def test_a_block_that_vllm_forgets_is_not_the_connectors(engines: VLLMEngines) -> None:
    options = {"within_step": True, "delay": 100}
    found = simulate(GroupsConnector, generate_scenario(6), options, engines=engines)
    assert found.failure is None, found.failure
    assert any(
        part.startswith("left out: loads within a step with Mamba") for part in found.coverage
    )


class TakesTime(HostConnector):
    """Its thread stores the blocks of a request for a second, as over a network."""

    def put(self, request_id: str, is_load: bool, copies: Any) -> None:
        if is_load:
            super().put(request_id, is_load, copies)
            return
        job = partial(super().put, request_id, is_load, copies)
        timer = threading.Timer(1.0, job)
        timer.daemon = True
        timer.start()


@pytest.mark.parametrize("half", ["job_by_job", "in_a_process"])
def test_a_store_may_take_a_second(engines: VLLMEngines, half: Any) -> None:
    scenario = replace(
        generate_scenario(0), events=(Add("a", 1, 40, 1), Step(2)), worker_half=half, ranks=()
    )
    result = simulate(TakesTime, scenario, engines=engines)
    assert result.failure is None, result.failure


class PinsMemory(HostConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.pinned = torch.zeros(4, pin_memory=True), torch.zeros(4).pin_memory()


def test_a_connector_may_pin_memory(engines: VLLMEngines) -> None:
    result = simulate(PinsMemory, generate_scenario(1), engines=engines)
    assert result.failure is None, result.failure


def test_a_connector_may_wait_for_cuda(engines: VLLMEngines) -> None:
    result = simulate(RecordsEvents, generate_scenario(1), engines=engines)
    assert result.failure is None, result.failure


LAWS_OF_RANKS = {
    "SharesFiles": "XFER-1",
    "OnlyTheFirstReports": "CONN-4",
    "NeedsAllReports": "CONN-4",
    "CountsOneRank": "CONN-3 CONN-4",
    "SharesFilesOfStages": "XFER-1",
    "CountsLayersOfTheModel": "XFER-1",
    "CountsTensorRanks": "CONN-3 CONN-4",
    "NeedsTheFirstRank": "CONN-3",
    "NeedsTheLastRank": "CONN-3",
    "ReportsTheFirstRank": "XFER-1 CONN-3",  # other bytes, or a page that does not exist yet
    "ReportsFailuresOfTheFirst": "XFER-1",
}


@pytest.mark.parametrize(
    "fault",
    [
        fault
        for kind in ("ranks", "stages", "late ranks", "failed loads")
        for fault in faults(f"faults of {kind}")
        if fault.name in LAWS_OF_RANKS
    ],
    ids=lambda fault: fault.name,
)
def test_only_ranks_show_some_faults(fault: Variant, engines: VLLMEngines) -> None:
    connector, options = fault.load(), {"path": "{tmp}"}
    ranks = (1, 1) if fault.family == "faults of stages" else (2, 2)
    drawn = [replace(generate_scenario(seed), ranks=ranks) for seed in (1, *range(3, 9))]
    for scenario in [KILLED] if fault.name == "NeedsAllReports" else drawn:
        failure = simulate(connector, scenario, options, engines=engines).failure
        alone = replace(scenario, ranks=(), worker_half="in_a_process", ends_abruptly=False)
        if failure and not simulate(connector, alone, options, engines=engines).failure:
            break
    else:
        pytest.fail("no seed fails with several ranks and passes with one")
    assert failure.law in LAWS_OF_RANKS[fault.name].split()


@each_of("faults of failed loads")
def test_a_wrong_report_of_a_failed_load_is_found(fault: Variant, engines: VLLMEngines) -> None:
    scenarios = (replace(generate_scenario(seed), ranks=(2, 2)) for seed in SEEDS[:4])
    found = (simulate(fault.load(), scenario, engines=engines).failure for scenario in scenarios)
    assert next(filter(None, found)).law in ("XFER-1", "CONN-3", "CONN-4")


# Its draft model writes a layer after the report of each step.
DRAFTS = replace(generate_scenario(18), ranks=())


def test_a_right_connector_saves_the_layers_of_a_draft_model(engines: VLLMEngines) -> None:
    for scenario in (DRAFTS, replace(DRAFTS, other_runner=True)):
        result = simulate(SavesInItsStep, scenario, engines=engines)
        assert result.failure is None, result.failure
        fitted = result.scenario
        has_layers = fitted.lookahead_tokens > 0 and capabilities.saves_after_drafts(fitted)
        assert result.coverage["with layers of a draft model"] == has_layers


@pytest.mark.skipif(
    not capabilities.saves_after_drafts(DRAFTS), reason="vLLM saves a step before its drafts"
)
@each_of("faults of drafts")
def test_layers_of_a_draft_model_show_some_faults(fault: Variant, engines: VLLMEngines) -> None:
    failure = simulate(fault.load(), DRAFTS, engines=engines).failure
    assert failure is not None
    assert failure.law in ("XFER-1", "CONN-3")
    without = replace(DRAFTS, drafts=(), lookahead_tokens=0, other_runner=True)
    if fault.name != "SavesAtTheLastHook":  # which V2 does not call for a step of decodes
        assert simulate(fault.load(), without, engines=engines).failure is None, "hidden"


@has_groups
def test_a_right_connector_of_several_groups_is_clean(engines: VLLMEngines) -> None:
    coverage: Counter[str] = Counter()
    for seed in (*range(10), 36, 46):  # with Mamba from 6, with chunks from 7, with four groups: 36
        result = simulate(GroupsConnector, generate_scenario(seed), engines=engines)
        assert result.failure is None, result.failure
        coverage.update(result.coverage)
    assert coverage["with several groups"]
    assert coverage["loads"]


@has_groups
def test_a_connector_of_one_group_gets_one(engines: VLLMEngines) -> None:
    result = simulate(HostConnector, generate_scenario(4), engines=engines)
    assert result.failure is None, result.failure
    assert not result.coverage["with several groups"]
    assert "left out: several KV-cache groups: the connector takes one" in result.coverage


@has_groups
def test_offloading_stores_blocks_that_left_the_window_before_a_reset(engines: VLLMEngines) -> None:
    """Other requests own these blocks by then. Controls: no reset, one group, a right connector."""
    before = (Add("long", 1, 81, 44), Step(34), Add("other", 2, 94, 12), Step(3))
    after = (Step(40), *EVICTED, Add("again", 1, 81, 2), Step(10))
    scenario = Scenario(
        CacheGeometry(16, 16, (FullAttention(16), SlidingWindow(16, 24))),
        num_gpu_blocks=24,
        events=(*before, Reset(), *after),
        max_tokens_per_step=64,
    )
    failure = simulate(OFFLOADING, scenario, OFFLOADING_OPTIONS, engines=engines).failure
    assert failure is not None
    assert failure.law == "XFER-1"
    assert "of request 'other'" in failure.message
    for control in (
        replace(scenario, events=(*before, *after)),
        replace(scenario, geometry=CacheGeometry.single(16), num_gpu_blocks=20),
    ):
        assert simulate(OFFLOADING, control, OFFLOADING_OPTIONS, engines=engines).failure is None
    assert simulate(GroupsConnector, scenario, engines=engines).failure is None


@has_pool
@each_of("faults of the pool")
def test_a_misuse_of_the_raw_pool_is_seen(fault: Variant, engines: VLLMEngines) -> None:
    failure = failure_of(fault.load(), 0, engines)
    assert failure is not None
    assert failure.law in ("CONN-4", "POOL-4")
    assert "update_state_after_alloc" in failure.message, "the call is named"
    assert "view." in failure.message, "the view's method is suggested"


@has_pool
def test_the_port_of_a_connector_fixes_its_leak(engines: VLLMEngines) -> None:
    runs = check_connector(Before, seeds=3, engines=engines, max_shrink_runs=12)
    assert {failure.law for failure in runs.failures} == {"CONN-4"}
    page = (ROOT / "docs" / "porting.md").read_text()
    for text in (
        "are held when everything has ended",
        "view.touch_blocks(ids) counts the",
    ):
        assert text in runs.failures[0].message
        assert text in page
    runs = check_connector(After, seeds=8, engines=engines)
    assert [*runs.failures, *runs.not_exercised] == []


def test_an_error_names_the_method_and_its_line(engines: VLLMEngines) -> None:
    message = first_failure(load_fault("Raises"), engines).message
    assert "update_connector_output raised KeyError" in message
    assert re.search(r"Raises_\d+\.py:", message)


@pytest.mark.skipif(not calls.can_name_groups(), reason="events are not simulated")
def test_events_of_a_right_connector_are_compared(engines: VLLMEngines) -> None:
    runs = check_connector(EventsConnector, seeds=2, engines=engines)
    assert [*runs.failures, *runs.not_exercised] == []
    assert runs.coverage["events"]


def test_laws_that_raw_runs_do_not_show_are_skipped(engines: VLLMEngines) -> None:
    report = run_checks(HostConnector, engine="vllm", seeds=2)
    passed = {one.check.law for one in report if one.outcome is Outcome.PASSED}
    assert passed.isdisjoint({"OFF-1", "CONN-13", *(f"EVENT-{n}" for n in range(1, 6))})
    assert {"XFER-1", "CONN-3", "CONN-4"} <= passed


def test_a_connector_that_does_nothing_is_not_clean(engines: VLLMEngines) -> None:
    runs = check_connector(DoesNothing, seeds=2, engines=engines)
    assert not runs.failures
    assert {gap.name for gap in runs.not_exercised} == {"hits", "loads", "stores"}


def test_vsim_6_a_failure_has_the_result_of_its_controls(engines: VLLMEngines) -> None:
    runs = check_connector(
        load_fault("ForgetsAStore"), seeds=1, engines=engines, max_shrink_runs=12
    )
    (failure,) = runs.failures
    assert failure.law == "CONN-4"
    assert "Without the connector the run is green" in failure.message
    assert "ForgetsAStore" in failure.script
    with pytest.raises(AssertionError, match="CONN-4"):
        exec(failure.script, {})


def test_vsim_6_a_failure_without_the_connector_is_the_engines(
    engines: VLLMEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = "kvview_vllm.simulation.raw.worker.token_bytes.TokenCompute.write"
    monkeypatch.setattr(target, lambda *args: None)
    (failure,) = check_connector(HostConnector, seeds=1, engines=engines).failures
    assert failure.law == "ENGINE"
    assert "without the connector too" in failure.message


def test_vsim_3_runs_without_a_connector_are_clean() -> None:
    for seed in SEEDS[:3]:
        result = RawRun(HostConnector, generate_scenario(seed), {}, without="connector").run()
        assert result.failure is None, result.failure


@pytest.mark.parametrize(
    ("seed", "where", "name"),
    [
        (69, "raw_engine", "aborted_loads_keep_blocks"),  # vLLM PR 32255
        (0, "raw_scenarios", "ended_requests_take_no_output"),  # vLLM PR 33377
    ],
)
def test_vsim_2_an_event_is_skipped_only_where_the_release_is_wrong(
    seed: int, where: str, name: str, engines: VLLMEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_right = getattr(calls, name)()
    monkeypatch.setattr(f"kvview_vllm.simulation.raw.{where}.{name}", lambda: True)
    failure = failure_of(HostConnector, seed, engines)
    assert (failure is None) == is_right, failure


def test_a_cache_that_requires_delivery_hangs_in_some_releases(engines: VLLMEngines) -> None:
    """vLLM #49674: blocks of preempted requests are freed later, so they compute in vain."""
    scheduler: Any = import_module("vllm.v1.core.sched.scheduler").Scheduler
    hangs = hasattr(BASE, "requires_kv_delivery") and not hasattr(
        scheduler, "_request_blocks_can_be_freed"
    )
    scenario = Scenario(
        CacheGeometry.single(16),
        num_gpu_blocks=9,
        events=(Add("one", 1, 76, 40), Add("two", 2, 76, 40), Step(60)),
        max_tokens_per_step=64,
        steps_in_flight=2,
    )
    alone = replace(scenario, steps_in_flight=1)
    delivers = load_fault("RequiresDelivery")
    assert simulate(HostConnector, scenario, engines=engines).failure is None
    assert simulate(delivers, alone, engines=engines).failure is None
    failure = simulate(delivers, scenario, engines=engines).failure
    assert (failure is not None) == hangs
    if failure is not None:
        assert failure.law == "ENGINE"
        assert "['one', 'two'] preempt each other forever" in failure.message


def test_caps_of_a_client_reach_the_connector(engines: VLLMEngines) -> None:
    """OffloadingConnector takes that of loads from 0.33 on (PR 55885), that of stores before."""
    scheduler = pytest.importorskip(f"{V1}.offloading.scheduler")
    text = Path(str(scheduler.__file__)).read_text()
    prompt = Add("first", 1, 65)
    again = replace(prompt, request_id="again")

    def promised(*adds: Add) -> int:
        events = [event for add in adds for event in (add, Step(12), *EVICTED)]
        scenario = Scenario(CacheGeometry.single(16), 20, tuple(events), max_tokens_per_step=128)
        result = simulate(OFFLOADING, scenario, OFFLOADING_OPTIONS, engines=engines)
        assert result.failure is None
        return result.coverage["tokens promised"]

    assert promised(prompt, again) == 64
    for cap, requests in {
        "max_load_tokens": (prompt, replace(again, max_load_tokens=40)),
        "max_offload_tokens": (replace(prompt, max_offload_tokens=40), again),
    }.items():
        assert promised(*requests) == (32 if cap in text else 64)
    for invalid in INVALID_CAPS:
        assert promised(prompt, replace(again, max_load_tokens=invalid)) == 64
        assert promised(replace(prompt, max_offload_tokens=invalid), again) == 64


def test_late_stores_of_preempted_requests_corrupt_releases_up_to_0_13(
    engines: VLLMEngines,
) -> None:
    """The worker is not notified, and OffloadingConnector copies reused blocks (PR 29870)."""
    three = tuple(Add(f"a{number}", number, 31, 8) for number in (1, 2, 3))
    scenario = Scenario(
        CacheGeometry.single(16),
        num_gpu_blocks=8,
        events=(*three, Add("b", 4, 49, 3), Step(20), *EVICTED, Add("again", 4, 49, 3), Step(8)),
        max_tokens_per_step=160,
        max_running=4,
        fates=(Fate(move_after=4),),
    )
    failure = simulate(OFFLOADING, scenario, OFFLOADING_OPTIONS, engines=engines).failure
    assert (failure is None) == hasattr(BASE, "handle_preemptions")
    if failure is not None:
        assert failure.law == "XFER-1"
        assert "of request 'a3'" in failure.message
    prompt = replace(scenario, fates=(Fate(move_after=1),))
    assert simulate(OFFLOADING, prompt, OFFLOADING_OPTIONS, engines=engines).failure is None


def test_vsim_3_preemptions_are_passed_as_the_release_passes_them(engines: VLLMEngines) -> None:
    """The signature of the connector does not count: it may be written for another release."""
    seen: set[str] = set()

    class NamesIt(HostConnector):
        def handle_preemptions(self, argument: object) -> None:
            seen.add(type(argument).__name__)

    drawn = generate_scenario(1)
    scenario = replace(drawn, worker_half="job_by_job", compute_lags=False, ranks=())
    assert simulate(NamesIt, scenario, engines=engines).failure is None
    if not hasattr(BASE, "handle_preemptions"):
        assert not seen
    elif "preempted_req_ids" in signature(BASE.handle_preemptions).parameters:
        assert seen <= {"set"}
    else:
        assert seen == {"Meta"}


def test_the_example_connector_loses_a_chunked_prefill(engines: VLLMEngines) -> None:
    """vLLM #16928, PR 53314: only the first chunk is saved, and loaded as if it were all."""
    first, again = (Add("first", 1, 75, 2), Step(6)), (Add("again", 1, 75, 2), Step(4))
    scenario = Scenario(
        CacheGeometry.single(16),
        num_gpu_blocks=40,
        events=(*first, *again),
        max_tokens_per_step=32,
    )
    options = {"shared_storage_path": "{tmp}"}
    failure = simulate(_example_connector(), scenario, options, engines=engines).failure
    assert failure is None, "a GPU hit needs no load"
    evicted = replace(scenario, events=(*first, *EVICTED, *again))
    failure = simulate(_example_connector(), evicted, options, engines=engines).failure
    assert failure is not None
    assert failure.law in ("XFER-1", "CONN-2", "CONN-3")


def _example_connector() -> Any:
    try:
        return import_module(f"{V1}.example_connector").ExampleConnector
    except ImportError:  # its name up to 0.12
        return import_module(f"{V1}.shared_storage_connector").SharedStorageConnector


def test_vsim_4_tensors_are_those_of_the_gpu_backend() -> None:
    scenario = replace(generate_scenario(3), worker_half="job_by_job", ranks=())
    run = RawRun(HostConnector, scenario, {})
    assert run.run().failure is None
    caches = run.harness.worker.caches
    assert len({tensor.data_ptr() for tensor in caches.tensors.values()}) == len(caches.slots)
    for tensor, slots in zip(caches.tensors.values(), caches.slots, strict=True):
        assert slots.shape[:2] == (caches.config.num_blocks, 16)
        assert slots.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert slots.numel() == tensor.numel()


def test_vsim_5_a_replaced_part_is_listed(engines: VLLMEngines) -> None:
    """Since 0.25 only CUDA's own operations are replaced, no part of the connector."""
    scenario = replace(generate_scenario(3), events=())
    result = simulate(OFFLOADING, scenario, OFFLOADING_OPTIONS, engines=engines)
    assert result.failure is None, result.failure
    is_listed = any(name.startswith("replaced: the copies of vLLM") for name in result.coverage)
    assert is_listed is (find_class("OffloadingHandler") is not None)  # up to 0.24
