"""Connectors that have never heard of kvview, under the simulation."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(  # a submodule: this very folder is named vllm
    "vllm.version",
    reason="needs vLLM's Python sources: tests/vllm/sources.py",
    exc_type=ImportError,
)

from kvview import CacheGeometry, ConfigError, FullAttention, SlidingWindow
from kvview.targets import load_target
from kvview.testing.connector import (
    Add,
    ConnectorRuns,
    Reset,
    Scenario,
    Squeeze,
    Step,
    check_connector,
    generate_scenario,
    load_engines,
    simulate,
)
from kvview.testing.connector.scenario import Fate
from kvview_vllm.releases import calls
from kvview_vllm.releases.calls import ended_requests_take_no_output
from kvview_vllm.simulation import VLLMEngines
from kvview_vllm.simulation import scheduler as cpu_scheduler
from kvview_vllm.simulation.raw import RawRun
from kvview_vllm.simulation.raw.fit import can_load_in_groups

with warnings.catch_warnings():  # of torch, as vLLM imports it
    warnings.simplefilter("ignore")
    from tests.vllm.raw_connectors import (
        FAULTS,
        FAULTS_OF_GROUPS,
        FAULTS_OF_STEPS_AND_PROCESSES,
        FAULTS_WITH_A_POOL,
        TAKES_CONFIG,
        DoesNothing,
        ForgetsAStore,
        GroupsConnector,
        HashesWhatIsScheduled,
        HostConnector,
        PromisesAllTokens,
        Raises,
        WantsDelivery,
    )

    loads_in_groups = can_load_in_groups()

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
SEEDS = range(8)
EXAMPLE = Path(__file__).parents[2] / "examples" / "raw_host_cache.py"
has_pool = pytest.mark.skipif(
    not hasattr(HostConnector, "bind_gpu_block_pool"),
    reason="no connector is given the pool in this release",
)
has_groups = pytest.mark.skipif(not loads_in_groups, reason="one group is played in this release")


@pytest.fixture(scope="module")
def engines() -> VLLMEngines:
    return VLLMEngines()


@pytest.fixture(scope="module")
def runs(engines: VLLMEngines) -> ConnectorRuns:
    return check_connector(HostConnector, seeds=len(SEEDS), engines=engines)


def test_a_right_connector_is_green_and_has_loaded(runs: ConnectorRuns) -> None:
    assert runs.is_clean, runs.summary()
    assert runs.coverage["with the worker half in_a_process"]
    if ended_requests_take_no_output():
        assert runs.coverage["with steps in flight"]
    assert runs.coverage["loads"] > 50
    assert runs.coverage["loads beside a GPU hit"] > 10


def test_what_kvview_new_writes_is_green_and_has_loaded(engines: VLLMEngines) -> None:
    if not TAKES_CONFIG:
        pytest.skip("it is written to 0.11.1 and later, which give the KVCacheConfig")
    target = load_target(f"{EXAMPLE}:HostCacheConnector")
    runs = check_connector(target, seeds=4, options={"host_blocks": 20}, engines=engines)
    assert runs.is_clean, runs.summary()
    assert runs.coverage["loads"] > 10


def test_vsim_2_what_is_not_played_is_named(runs: ConnectorRuns) -> None:
    left_out = {name for name in runs.coverage if name.startswith("left out: ")}
    assert "left out: an end with transfers in flight" in left_out
    assert ("left out: several steps in flight" in left_out) != ended_requests_take_no_output()
    assert ("left out: resets of the connector" in left_out) != cpu_scheduler.can_reset_connectors()


def test_loads_within_a_step_are_right_too(engines: VLLMEngines) -> None:
    for seed in SEEDS[:3]:
        result = simulate(
            HostConnector, generate_scenario(seed), {"within_step": True}, engines=engines
        )
        assert result.failure is None, result.failure
        assert result.coverage["loads within a step"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: type, engines: VLLMEngines) -> None:
    if fault is Raises and not cpu_scheduler.can_load_between_steps():
        pytest.skip("loads end within a step")
    assert any(_failure(fault, seed, engines) is not None for seed in SEEDS)


@pytest.mark.parametrize("fault", FAULTS_OF_STEPS_AND_PROCESSES, ids=lambda fault: fault.__name__)
def test_what_only_steps_in_flight_and_processes_show(fault: type, engines: VLLMEngines) -> None:
    if fault is HashesWhatIsScheduled and not ended_requests_take_no_output():
        pytest.skip("one step in flight is played")
    failed = [(seed, f) for seed in SEEDS if (f := _failure(fault, seed, engines)) is not None]
    assert failed
    seed, _ = failed[0]
    scenario = replace(
        generate_scenario(seed), steps_in_flight=1, worker_half="job_by_job", compute_lags=False
    )
    assert simulate(fault, scenario, engines=engines).failure is None, "alone it is hidden"


@has_groups
def test_a_right_connector_of_several_groups_is_green(engines: VLLMEngines) -> None:
    coverage: Counter[str] = Counter()
    for seed in range(10):
        result = simulate(GroupsConnector, generate_scenario(seed), engines=engines)
        assert result.failure is None, result.failure
        coverage.update(result.coverage)
    assert coverage["with several groups"], "the release keeps them apart"
    assert coverage["loads"]


@has_groups
def test_a_connector_of_one_group_gets_one(engines: VLLMEngines) -> None:
    result = simulate(HostConnector, generate_scenario(4), engines=engines)
    assert result.failure is None, result.failure
    assert not result.coverage["with several groups"]
    assert "left out: several KV-cache groups: the connector takes one" in result.coverage


@has_groups
@pytest.mark.parametrize("fault", FAULTS_OF_GROUPS, ids=lambda fault: fault.__name__)
def test_a_fault_of_several_groups_is_found(fault: type, engines: VLLMEngines) -> None:
    assert any(_failure(fault, seed, engines) is not None for seed in range(20))


@has_groups
def test_offloading_stores_what_left_the_window_when_it_was_reset(engines: VLLMEngines) -> None:
    """Its blocks are others' by then; with one group, or no reset, or a right one, all is well."""
    from importlib import import_module

    connector = import_module(f"{V1}.offloading_connector").OffloadingConnector
    options = {"cpu_bytes_to_use": 1_000_000, "num_cpu_blocks": 30}
    before = (Add("long", 1, 81, 44), Step(34), Add("other", 2, 94, 12), Step(3))
    after = (Step(40), *_evicted(), Add("again", 1, 81, 2), Step(10))
    scenario = Scenario(
        CacheGeometry(16, 16, (FullAttention(16), SlidingWindow(16, 24))),
        num_gpu_blocks=24,
        events=(*before, Reset(), *after),
        max_tokens_per_step=64,
    )
    failure = simulate(connector, scenario, options, engines=engines).failure
    assert failure is not None
    assert failure.law == "XFER-1"
    assert "of request 'other'" in failure.message
    for control, kind in (
        (replace(scenario, events=(*before, *after)), connector),
        (replace(scenario, geometry=CacheGeometry.single(16), num_gpu_blocks=20), connector),
        (scenario, GroupsConnector),
    ):
        given = options if kind is connector else {}
        assert simulate(kind, control, given, engines=engines).failure is None


@has_pool
@pytest.mark.parametrize("fault", FAULTS_WITH_A_POOL, ids=lambda fault: fault.__name__)
def test_what_is_done_to_the_raw_pool_is_seen(fault: type, engines: VLLMEngines) -> None:
    failure = _failure(fault, 0, engines)
    assert failure is not None
    assert failure.law in ("CONN-4", "POOL-4")
    assert "update_state_after_alloc" in failure.message, "the call is named"
    assert "view." in failure.message, "the view's method is suggested"


def test_the_method_that_raises_is_named_with_its_line(engines: VLLMEngines) -> None:
    failure = next(f for seed in SEEDS if (f := _failure(Raises, seed, engines)))
    assert "update_connector_output raised KeyError" in failure.message
    assert "raw_connectors.py:" in failure.message


def test_a_promise_of_more_than_there_is_names_the_method(engines: VLLMEngines) -> None:
    failure = next(f for seed in SEEDS if (f := _failure(PromisesAllTokens, seed, engines)))
    assert failure.law in ("CONN-2", "XFER-1", "CONN-3")


def test_a_connector_that_did_nothing_is_not_green(engines: VLLMEngines) -> None:
    runs = check_connector(DoesNothing, seeds=2, engines=engines)
    assert not runs.failures
    assert not runs.is_clean
    assert {gap.name for gap in runs.not_exercised} == {"hits", "loads", "stores"}


def test_vsim_6_a_failure_says_what_the_controls_said(engines: VLLMEngines) -> None:
    runs = check_connector(ForgetsAStore, seeds=1, engines=engines, max_shrink_runs=12)
    (failure,) = runs.failures
    assert failure.law == "CONN-4"
    assert "Without the connector the run is green" in failure.message
    assert "ForgetsAStore" in failure.script
    namespace: dict[str, Any] = {}
    with pytest.raises(AssertionError, match="CONN-4"):
        exec(failure.script, namespace)


def test_vsim_6_what_fails_without_the_connector_is_the_engines(
    engines: VLLMEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = "kvview_vllm.simulation.raw.token_bytes.TokenCompute.write"
    monkeypatch.setattr(target, lambda *args: None)
    runs = check_connector(HostConnector, seeds=1, engines=engines)
    (failure,) = runs.failures
    assert failure.law == "ENGINE"
    assert "without the connector too" in failure.message


def test_vsim_3_without_a_connector_every_seed_is_green() -> None:
    for seed in SEEDS[:3]:
        result = RawRun(HostConnector, generate_scenario(seed), {}, without="connector").run()
        assert result.failure is None, result.failure


@pytest.mark.parametrize(
    ("seed", "where", "name"),
    [
        (69, "harness", "aborted_loads_keep_blocks"),  # vLLM PR 32255
        (0, "fit", "ended_requests_take_no_output"),  # vLLM PR 33377
    ],
)
def test_vsim_2_what_is_left_out_is_wrong_in_this_release(
    seed: int, where: str, name: str, engines: VLLMEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_right = getattr(calls, name)()
    monkeypatch.setattr(f"kvview_vllm.simulation.raw.{where}.{name}", lambda: True)
    failure = _failure(HostConnector, seed, engines)
    assert (failure is None) == is_right, failure


def test_a_cache_that_requires_delivery_hangs_in_some_releases(engines: VLLMEngines) -> None:
    """vLLM #49674: blocks of the preempted are free steps later, what they computed is dropped."""
    from importlib import import_module

    hangs = hasattr(import_module(f"{V1}.base").KVConnectorBase_V1, "requires_kv_delivery") and (
        not hasattr(
            import_module("vllm.v1.core.sched.scheduler").Scheduler, "_request_blocks_can_be_freed"
        )
    )
    scenario = Scenario(
        CacheGeometry.single(16),
        num_gpu_blocks=9,
        events=(Add("one", 1, 76, 40), Add("two", 2, 76, 40), Step(60)),
        max_tokens_per_step=64,
        steps_in_flight=2,
    )
    assert simulate(HostConnector, scenario, engines=engines).failure is None
    assert (
        simulate(WantsDelivery, replace(scenario, steps_in_flight=1), engines=engines).failure
        is None
    )
    failure = simulate(WantsDelivery, scenario, engines=engines).failure
    assert (failure is not None) == hangs
    if failure is not None:
        assert failure.law == "ENGINE"
        assert "['one', 'two'] preempt each other forever" in failure.message


def test_late_stores_of_preempted_requests_are_right_or_waited_for(engines: VLLMEngines) -> None:
    """Up to 0.13 nobody tells the worker of preemptions, and OffloadingConnector copies blocks of
    others (vLLM PR 29870)."""
    from importlib import import_module

    base = import_module(f"{V1}.base").KVConnectorBase_V1
    connector = import_module(f"{V1}.offloading_connector").OffloadingConnector
    three = tuple(Add(f"a{number}", number, 31, 8) for number in (1, 2, 3))
    scenario = Scenario(
        CacheGeometry.single(16),
        num_gpu_blocks=8,
        events=(*three, Add("b", 4, 49, 3), Step(20), *_evicted(), Add("again", 4, 49, 3), Step(8)),
        max_tokens_per_step=160,
        max_running=4,
        fates=(Fate(move_after=4),),
    )
    options = {"cpu_bytes_to_use": 1_000_000, "num_cpu_blocks": 30}
    failure = simulate(connector, scenario, options, engines=engines).failure
    assert (failure is None) == hasattr(base, "handle_preemptions")
    if failure is not None:
        assert failure.law == "XFER-1"
        assert "of request 'a3'" in failure.message
    prompt = replace(scenario, fates=(Fate(move_after=1),))
    assert simulate(connector, prompt, options, engines=engines).failure is None


def test_vsim_3_preemptions_are_told_as_the_release_tells_them(engines: VLLMEngines) -> None:
    """Not as the connector has it, which may have been written for another release."""
    from importlib import import_module

    told: list[object] = []

    class NamesIt(HostConnector):
        def handle_preemptions(self, whatever: object) -> None:
            told.append(type(whatever).__name__)

    scenario = replace(generate_scenario(1), worker_half="job_by_job", compute_lags=False)
    assert simulate(NamesIt, scenario, engines=engines).failure is None
    base = import_module(f"{V1}.base").KVConnectorBase_V1
    if not hasattr(base, "handle_preemptions"):
        assert not told
    elif "preempted_req_ids" in signature(base.handle_preemptions).parameters:
        assert {*told} <= {"set"}
    else:
        assert {*told} == {"Meta"}


def test_the_reference_engine_refuses_it_in_one_line() -> None:
    scenario = Scenario(CacheGeometry.single(4), 8, (Step(1),))
    with pytest.raises(ConfigError, match="give --engine vllm"):
        simulate(HostConnector, scenario, engines=load_engines())


def test_a_bad_transfer_config_is_told(engines: VLLMEngines) -> None:
    scenario = Scenario(CacheGeometry.single(4), 8, (Step(1),))
    with pytest.raises(ConfigError, match="kv_transfer_config"):
        simulate(
            HostConnector,
            scenario,
            {"kv_transfer_config": {"kv_role": "nobody"}},
            engines=engines,
        )


def test_vllms_example_connector_loses_what_a_chunked_prefill_left(
    engines: VLLMEngines,
) -> None:
    """Only the first chunk is saved (vLLM #16928, PR 53314), and loaded as if it were all."""
    scenario = Scenario(
        CacheGeometry.single(16),
        num_gpu_blocks=40,
        events=(
            Add("first", 1, 75, 2),
            Step(6),
            Add("again", 1, 75, 2),
            Step(4),
        ),
        max_tokens_per_step=32,
    )
    options = {"shared_storage_path": "{tmp}"}
    failure = simulate(_example_connector(), scenario, options, engines=engines).failure
    assert failure is None, "a GPU hit needs no load"
    events = (*scenario.events[:2], *_evicted(), *scenario.events[2:])
    failure = simulate(
        _example_connector(), replace(scenario, events=events), options, engines=engines
    ).failure
    assert failure is not None
    assert failure.law in ("XFER-1", "CONN-2", "CONN-3")


def test_vsim_4_tensors_are_those_of_the_gpu_backend() -> None:
    scenario = replace(generate_scenario(3), worker_half="job_by_job")
    run = RawRun(HostConnector, scenario, {})
    assert run.run().failure is None
    caches = run.harness.worker.caches
    assert len({tensor.data_ptr() for tensor in caches.tensors.values()}) == len(caches.slots)
    for tensor, slots in zip(caches.tensors.values(), caches.slots, strict=True):
        assert slots.shape[:2] == (caches.config.num_blocks, 16)
        assert slots.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert slots.numel() == tensor.numel()


def test_vsim_5_what_stands_in_for_cuda_is_named(engines: VLLMEngines) -> None:
    from importlib import import_module

    connector = import_module(f"{V1}.offloading_connector").OffloadingConnector
    options = {"cpu_bytes_to_use": 1_000_000, "num_cpu_blocks": 30}
    scenario = replace(generate_scenario(3), events=())
    result = simulate(connector, scenario, options, engines=engines)
    assert result.failure is None, result.failure
    assert any(name.startswith("replaced: the copies of vLLM") for name in result.coverage)


def _evicted() -> tuple[Any, ...]:
    return Squeeze(100), Squeeze(0)


def _example_connector() -> Any:
    from importlib import import_module

    try:
        return import_module(f"{V1}.example_connector").ExampleConnector
    except ImportError:  # its name up to 0.12
        return import_module(f"{V1}.shared_storage_connector").SharedStorageConnector


def _failure(connector_class: type, seed: int, engines: VLLMEngines) -> Any:
    return simulate(connector_class, generate_scenario(seed), engines=engines).failure
