"""Steps in flight on vLLM's asynchronous scheduler: no false alarms, and faults are found."""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.version", reason="needs a vLLM release", exc_type=ImportError)

from examples.host_cache import HostCacheConnector
from kvview import (
    CacheGeometry,
    CanonicalKVCaches,
    Connector,
    FullAttention,
    Mamba,
    WorkerConnector,
)
from kvview.testing.connector import Add, Fate, Scenario, Step, generate_scenario, simulate
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.connector.run.compute_stream import StepStream
from kvview.testing.connector.run.engine import SimulatedEngine
from kvview_reference.store_connector import StoreConnector
from kvview_vllm.connector.scheduler import SchedulerSide
from kvview_vllm.releases import installed
from kvview_vllm.simulation import VLLMEngines
from kvview_vllm.simulation.kvview.kvview_engine import KVViewHarness
from kvview_vllm.simulation.scheduler.requests import PlannedRequest
from tests.mutants.connector import load_named

SEEDS = 6
"""Of each connector, depth and lag; ``--seeds`` of the command runs as many as one likes."""


class Engines(VLLMEngines):
    """Keeps the engine that it built last, to be asked."""

    last: KVViewHarness

    def build(
        self,
        scenario: Scenario,
        connectors: Sequence[Connector],
        *,
        owner: str,
        stream: StepStream | None = None,
    ) -> SimulatedEngine:
        built = super().build(scenario, connectors, owner=owner, stream=stream)
        assert isinstance(built, KVViewHarness)
        self.last = built
        return built


@pytest.fixture(scope="module")
def engines() -> Engines:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, while it is imported
        return Engines()


def in_flight(seed: int, steps: int, *, lags: bool = False) -> Scenario:
    """The scenario of a seed, with steps in flight; every third request ends unforeseen."""
    scenario = generate_scenario(seed)
    events = tuple(
        replace(event, stops_after=1 + number % event.num_output_tokens)
        if isinstance(event, Add) and number % 3 == 0 and event.num_output_tokens
        else event
        for number, event in enumerate(scenario.events)
    )
    return replace(scenario, events=events, steps_in_flight=steps, compute_lags=lags)


@pytest.mark.parametrize("steps", [2, 3])
def test_no_false_alarm(engines: Engines, steps: int) -> None:
    most = Counter[int]()
    resets = 0
    for seed in range(SEEDS):
        result = simulate(StoreConnector, in_flight(seed, steps), engines=engines)
        assert result.failure is None, (seed, result.failure)
        most[engines.last.stats.most_in_flight] += 1
        resets += engines.last.stats.running_resets
    expected = steps if installed().connector.stale_outputs else 2
    assert most == {expected: SEEDS}, "a batch was in flight in each run"
    assert resets


class Deferring(Engines):
    """As 0.33.0 with HiSparse: a load begins when the steps before it have ended (SCHED-7)."""

    num_deferred = 0

    def build(self, *args: Any, **options: Any) -> SimulatedEngine:
        built = super().build(*args, **options)
        scheduler = self.last.scheduler.real
        start = scheduler._drain_deferred_loads

        def drain() -> None:
            waiting = len(scheduler.deferred_loads)
            start()
            self.num_deferred += waiting - len(scheduler.deferred_loads)

        scheduler.defer_async_loads, scheduler._drain_deferred_loads = True, drain
        return built


class Eager(StoreConnector):
    """Stores each block in the step after its computation, so that many are loaded."""

    defaults: ClassVar[Mapping[str, Any]] = {"mode": "eager"}


@pytest.mark.parametrize("connector", [Eager, HostCacheConnector])
def test_a_promise_whose_blocks_come_later_is_asked_for_again(
    connector: type[Connector], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    if not hasattr(scheduler, "_drain_deferred_loads"):
        pytest.skip("no load is deferred in this release")
    ask, answers = SchedulerSide._promises_again, Counter[bool]()

    def counted(*args: Any) -> bool:
        answers[answer := ask(*args)] += 1
        return answer

    monkeypatch.setattr(SchedulerSide, "_promises_again", counted)
    deferring = Deferring()
    # A small tier, which loses promised pages.
    scenarios = [replace(in_flight(seed, 3), cpu_blocks=3) for seed in range(6 * SEEDS)]
    for seed, scenario in enumerate(scenarios):
        result = simulate(connector, scenario, engines=deferring)
        assert result.failure is None, (seed, result.failure)
    assert deferring.num_deferred > 10
    assert answers[True] > 3, answers
    assert answers[False], answers
    monkeypatch.setattr(SchedulerSide, "_promises_again", lambda *_: True)
    failures = (simulate(connector, scenario, engines=deferring).failure for scenario in scenarios)
    assert "ENGINE" in {failure.law for failure in failures if failure}, "nothing came between"


class NotOrdered(StoreConnector):
    """Its worker knows no compute stream: it copies what a step in flight has yet to write."""

    def make_worker(self) -> WorkerConnector:
        worker = super().make_worker()
        register = worker.register_kv_caches

        def without_stream(kv_caches: CanonicalKVCaches[Any]) -> None:
            register(replace(kv_caches, compute_stream=None))

        worker.register_kv_caches = without_stream  # type: ignore[method-assign]
        return worker


def test_a_worker_that_does_not_order_itself_is_found(engines: Engines) -> None:
    laws = Counter[str]()
    for seed in range(10):
        scenario = replace(in_flight(seed, 2), worker_half="whole_plans")
        at_once = replace(scenario, fates=(Fate(0, 0),) * 200)
        lags = replace(at_once, compute_lags=True)
        if not engines.fit(lags)[0].compute_lags:
            pytest.skip("a load within a step waits for compute")
        result = simulate(NotOrdered, at_once, engines=engines)
        assert result.failure is None, "with compute that has ended nothing is wrong"
        late = simulate(NotOrdered, lags, engines=engines).failure
        laws[late.law if late else ""] += 1
    assert laws["XFER-6"] >= 4, laws


def test_hashes_of_tokens_that_are_in_flight_are_missed(engines: Engines) -> None:
    reads = load_named("ReadsHashesOfTheStep")
    laws = Counter[str]()
    for seed in range(10):
        one, several = (
            simulate(reads, replace(in_flight(seed, steps), drafts=()), engines=engines).failure
            for steps in (1, 2)
        )
        assert one is None, "one step in flight does not show it"
        laws[several.law if several else ""] += 1
    assert laws["CONN-3"] >= 6


def test_what_vllm_delivers_is_compared() -> None:
    planned = PlannedRequest("r", [1, 2, 3], 5, 4, 2, 4)
    tokens = [planned.token(position) for position in (3, 4)]
    planned.request.append_output_token_ids(tokens[0])
    with pytest.raises(InvariantBroken, match=r"ENGINE: .* ended after only 1 of 2 tokens"):
        planned.check(has_ended=True)
    planned.request.append_output_token_ids(tokens[1])
    planned.check(has_ended=True)
    planned.request.append_output_token_ids(tokens[1])
    with pytest.raises(InvariantBroken, match=r"ENGINE: .* output 2 of 2"):
        planned.check(has_ended=True)


def test_mamba_groups_run_where_their_states_are_cached(engines: Engines) -> None:
    geometry = CacheGeometry(4, 4, (FullAttention(4), Mamba(4)))
    events = (Add("a", 1, 17, 6), Step(12), Add("b", 1, 17, 6), Step(12))
    scenario = Scenario(geometry, 40, events, decode_tokens=1, steps_in_flight=2)
    fitted, left_out = engines.fit(scenario)
    if Mamba(4) not in fitted.geometry.groups:
        assert any("Mamba group" in what for what in left_out)
        return
    result = simulate(StoreConnector, scenario, engines=engines)
    assert result.failure is None, result.failure
