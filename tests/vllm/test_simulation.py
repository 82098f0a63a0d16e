"""A few seeds of ``kvview check --engine vllm`` on this release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from examples.host_cache import HostCacheConnector
from examples.host_memory import HostMemoryConnector
from kvview import (
    CacheGeometry,
    Connector,
    ConnectorConfig,
    FullAttention,
    SlidingWindow,
)
from kvview.testing.connector import (
    Add,
    Fate,
    HoldBlocks,
    Scenario,
    Step,
    check_connector,
    generate_scenario,
    simulate,
)
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview_reference.store_connector import StoreConnector
from kvview_vllm.connector import connector
from kvview_vllm.connector.scheduler import SchedulerSide
from kvview_vllm.events import to_vllm_events
from kvview_vllm.releases import installed
from kvview_vllm.simulation import VLLMEngines
from kvview_vllm.simulation.kvview.kvview_engine import KVViewHarness
from kvview_vllm.simulation.scheduler import capabilities
from tests.mutants.connector.each_step import EachStep

SEEDS = 10


@pytest.fixture(scope="module")
def coverage(engines: VLLMEngines) -> Mapping[str, int]:
    report = check_connector(StoreConnector, seeds=SEEDS, engines=engines)
    assert not report.failures, report.failures[0].script
    return report.coverage


def test_the_runs_exercise_every_event(engines: VLLMEngines, coverage: Mapping[str, int]) -> None:
    # LOAD-1, LOAD-2, MSG-1, WORK-1, WORK-2
    names = {"loads", "stores", "failed loads", "failed stores", "hits", "preemptions", "resets"}
    names |= {"ids again", "aborted running", "aborted waiting"}
    if capabilities.can_load_between_steps():
        names.add("aborted loading")
    if not (capabilities.can_fail_loads() and capabilities.can_load_between_steps()):
        names.remove("failed loads")
    played = [engines.fit(generate_scenario(seed))[0] for seed in range(SEEDS)]
    assert any(scenario.ends_abruptly for scenario in played)
    if not any(name.startswith("left out: two connectors") for name in coverage):
        assert any(scenario.num_connectors > 1 for scenario in played)
    if not capabilities.refuses_several_groups():
        assert any(name.startswith("seeds/several/") for name in coverage)
    assert not {name for name in names if not coverage.get(name)}


def test_every_event_that_is_not_simulated_is_listed(
    engines: VLLMEngines, coverage: Mapping[str, int]
) -> None:
    # VSIM-2
    assert coverage["left out: decode steps of several tokens"] == SEEDS
    if not coverage.get("second hashes"):
        assert coverage["left out: a second hash of a block"]
    for seed in range(SEEDS):
        given = generate_scenario(seed)
        fitted, left_out = engines.fit(given)
        lost = [group for group in given.geometry.groups if group not in fitted.geometry.groups]
        assert len(lost) <= sum(" group: " in reason for reason in left_out)
        again, left_out_again = engines.fit(fitted)
        assert again == fitted, "a printed script plays the same"
        assert not [reason for reason in left_out_again if " group: " in reason]


@pytest.mark.parametrize("connector", [HostCacheConnector, EachStep, Connector])
def test_right_connectors_are_clean(engines: VLLMEngines, connector: type[Connector]) -> None:
    # BIND-1
    report = check_connector(connector, seeds=5, engines=engines)
    assert not report.failures, report.failures[0].script


def test_blocks_that_a_sibling_loads_within_a_step_are_not_computed_before_it(
    engines: VLLMEngines,
) -> None:
    """A connector that stores them in that step would read them before they are loaded."""
    prompt, evict = Add("first", 1, 17), (HoldBlocks(20), HoldBlocks(0))
    scenario = Scenario(
        CacheGeometry.single(4),
        num_gpu_blocks=20,
        events=(prompt, Step(8), *evict, replace(prompt, request_id="again"), Step(8)),
        fates=(Fate(outcome="none"), *[Fate()] * 20),  # the first connector lacks the pages
        max_tokens_per_step=32,
        num_connectors=2,
    )
    options = {"cpu_blocks": 20, "mode": "eager"}
    result = simulate(StoreConnector, scenario, options, engines=engines)
    assert result.failure is None, result.failure
    assert result.coverage["loads"] == 1


def test_a_load_within_a_step_that_fails_after_a_preemption(engines: VLLMEngines) -> None:
    """SCHED-5: up to 0.17 this seed read blocks that were never loaded."""
    result = simulate(StoreConnector, generate_scenario(47), engines=engines)
    assert result.failure is None


def test_a_load_beside_a_hit_of_several_groups(engines: VLLMEngines) -> None:
    """SCHED-5: from 0.14 to 0.23 the last request got one block in two tables."""
    scenario = Scenario(
        CacheGeometry(2, 2, (FullAttention(2), SlidingWindow(2, 6))),
        32,
        (
            *(Add("r35", 1, 7), Add("r7", 1, 12, 3), Add("r39", 2, 7), Step(), HoldBlocks(45)),
            *(Add("r40", 1, 3), Add("r41", 1, 3), Step(), Add("r56", 1, 9), Add("r57", 1, 5)),
            Step(3),
        ),
        (Fate(), Fate(), Fate(report_after=4)),
        decode_tokens=1,
    )
    assert simulate(HostCacheConnector, scenario, engines=engines).failure is None


def test_blocks_of_a_window_are_counted_before_they_are_allocated(engines: VLLMEngines) -> None:
    """0.20.0 and 0.20.1 end the engine where others preempt, even with an idle connector."""
    given = Scenario(
        CacheGeometry(4, 4, (FullAttention(4), SlidingWindow(4, 8))),
        42,
        (),
        decode_tokens=1,
        max_tokens_per_step=16,
    )
    fitted, left_out = engines.fit(given)
    is_defect = installed().connector.uncounted_window_blocks
    assert any("with windows or chunks" in reason for reason in left_out) == is_defect
    assert play_long_requests(engines, fitted).startswith("preempted")
    found = play_long_requests(engines, replace(fitted, max_tokens_per_step=16))
    assert ("ValueError Cannot get 1 free blocks from the pool" in found) == is_defect, found


def play_long_requests(engines: VLLMEngines, scenario: Scenario) -> str:
    """Decode until the pool is full and longer, and return the result."""
    connector = Connector(ConnectorConfig(scenario.geometry))
    engine = engines.build(scenario, [connector], owner="")
    assert isinstance(engine, KVViewHarness)
    for serial, request_id in enumerate(("one", "two", "three")):
        engine.add(Add(request_id, serial, 40, 40), serial)
    try:
        while engine.has_work():
            engine.step()
    except InvariantBroken as error:
        return str(error)
    return f"preempted {engine.stats.preemptions} times" if engine.stats.preemptions else "done"


def test_a_seed_gives_the_same_run_twice(engines: VLLMEngines) -> None:
    others = VLLMEngines()
    for seed in range(2):
        scenario = generate_scenario(seed)
        first = simulate(StoreConnector, scenario, engines=engines)
        assert first == simulate(StoreConnector, scenario, engines=others)
        as_in_a_script = simulate(StoreConnector, first.scenario, engines=engines)
        assert as_in_a_script.timeline == first.timeline
        for snapshot in first.timeline:
            blocks = snapshot.free + snapshot.engine + snapshot.held
            assert blocks == first.scenario.num_gpu_blocks - 1


def test_an_error_of_vllm_is_not_attributed_to_the_connector(engines: VLLMEngines) -> None:
    # VSIM-1
    scenario, _ = engines.fit(replace(generate_scenario(0), steps_in_flight=1))
    connector = Connector(ConnectorConfig(scenario.geometry))
    engine = engines.build(scenario, [connector], owner="")
    assert isinstance(engine, KVViewHarness)
    engine.add(Add("r", 1, 9, 20), 1)
    engine.step()
    pool = engine.scheduler.pool
    pool.free_blocks([pool.blocks[block] for block in engine.engine_refs()])
    engine.abort("r")  # frees them again
    with pytest.raises(InvariantBroken, match=r"ENGINE: squeezing raised AssertionError .*\(vllm"):
        engine.squeeze(engine.num_blocks)


def test_no_request_hits_blocks_that_a_failed_load_left_unfilled(engines: VLLMEngines) -> None:
    """SCHED-6: the request that was to compute them is aborted or preempted before it does."""
    if capabilities.can_load_between_steps() or not capabilities.can_fail_loads():
        pytest.skip("no load fails within a step in this release")
    report = check_connector(
        HostCacheConnector, first_seed=8, seeds=1, engines=engines, max_shrink_runs=0
    )
    assert not report.failures, report.failures[0].script
    assert report.coverage["failed loads"]


@pytest.mark.newest
def test_a_block_that_filling_misses_is_seen(
    engines: VLLMEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hash that comes later, and blocks that were hit while they were written."""
    steps_that_fill = SchedulerSide._steps_that_fill
    seen = Counter[str]()

    def forget_late(side: SchedulerSide, output: Any) -> Any:
        steps = steps_that_fill(side, output)
        side._unshown = set()
        seen.update(shown=len(steps), scheduled=len(output.num_scheduled_tokens))
        return steps

    monkeypatch.setattr(SchedulerSide, "_steps_that_fill", forget_late)
    runs = (simulate(HostCacheConnector, generate_scenario(s), engines=engines) for s in range(4))
    failures = [run.failure for run in runs if run.failure]
    assert {failure.law for failure in failures} == {"ENGINE"}
    assert "became full" in failures[0].message
    assert 0 < seen["shown"] < seen["scheduled"]


def test_a_connector_need_not_know_a_waiting_request(engines: VLLMEngines) -> None:
    """A request that waits has a prompt whose description the adapter forgot (EVENT-2)."""
    report = check_connector(HostMemoryConnector, first_seed=11, seeds=1, engines=engines)
    assert not report.failures, report.failures[0].script


def without_content(events: Iterable[Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
    kwargs["descriptions"] = None
    return to_vllm_events(events, *args, **kwargs)


def with_another_parent(events: Iterable[Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
    for event in to_vllm_events(events, *args, **kwargs):
        if getattr(event, "parent_block_hash", None):
            event.parent_block_hash = event.block_hashes[0]
        yield event


def without_removals(events: Iterable[Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
    return to_vllm_events([event for event in events if not event.removed], *args, **kwargs)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("wrong", "law"),
    [(without_content, "EVENT-2"), (with_another_parent, "EVENT-2"), (without_removals, "EVENT-3")],
)
def test_wrong_events_are_found(
    engines: VLLMEngines, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any], law: str
) -> None:
    monkeypatch.setattr(connector, "to_vllm_events", wrong)
    options = {"enable_events": True}
    result = simulate(StoreConnector, generate_scenario(1), options, engines=engines)
    assert result.failure is not None
    assert result.failure.law == law
