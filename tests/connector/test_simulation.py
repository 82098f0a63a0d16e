"""The simulation: kills every wrong connector, leaves the right ones alone, replays and shrinks."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

import pytest

from examples.host_cache import HostCacheConnector
from kvview import (
    CacheGeometry,
    ConfigError,
    Connector,
    ConnectorConfig,
    FullAttention,
    OffloadingEvent,
    RequestInfo,
    SchedulerConnector,
    make_offload_key,
)
from kvview.testing import Mutant, run_checks
from kvview.testing.connector import (
    Add,
    ConnectorRuns,
    Fate,
    Scenario,
    SimulationResult,
    Squeeze,
    Step,
    check_connector,
    generate_scenario,
    replay_seed,
    simulate,
)
from kvview.testing.connector.aging import grows
from kvview.testing.connector.coverage import not_exercised, table_of_cells
from kvview.testing.connector.faults import FaultyWorker
from kvview.testing.connector.generate import steady_scenario
from kvview.testing.connector.invariants import (
    EventFold,
    InvariantBroken,
    check_conservation,
    check_free_list,
)
from kvview.testing.connector.watch import History
from kvview.testing.page import write_report
from kvview.urls import DOCS_URL
from kvview_reference.connector import LazyOffloadConnector, MultiConnector, OffloadConnector
from kvview_reference.engine import chain_hashes
from tests.connector.unusual import UNUSUAL
from tests.mutants import aging, example, several, tier, worker
from tests.mutants import connector as connectors
from tests.mutants.connector import (
    AtTheEnd,
    CountsFailedLoads,
    EagerConnector,
    FreesWhenPlanned,
    LeaksFailedStores,
    StoresTheLastToken,
    WalkingConnector,
)
from tests.mutants.example import PinsByRequest
from tests.mutants.leasing import (
    LeasesAndTouches,
    LeasesForAWhile,
    LeasesForEver,
    LeasesForLong,
    RenewsForEver,
)
from tests.mutants.several import Two
from tests.vllm.wrong_connectors import Flaky

MUTANTS = [
    *(*connectors.MUTANTS, *example.MUTANTS, *several.MUTANTS),
    *(*worker.MUTANTS, *tier.MUTANTS, *aging.MUTANTS),
]

LAZY = "kvview_reference.connector:LazyOffloadConnector"
EAGER = "kvview_reference.connector:OffloadConnector"
CHILDREN = [
    {"connector": EAGER, "options": {"cpu_blocks": 7, "enable_events": True}},
    {"connector": LAZY, "options": {"cpu_blocks": 40, "enable_events": True}},
]


# --- right connectors ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "connector",
    [
        *(OffloadConnector, LazyOffloadConnector, HostCacheConnector),
        *(WalkingConnector, EagerConnector, AtTheEnd, Two, Connector),
    ],
)
def test_no_false_alarm(connector: type[Connector]) -> None:
    report = check_connector(connector, seeds=24)
    assert not report.failures, report.failures[0].script
    assert report.num_seeds == 24


def test_a_connector_that_does_nothing_is_not_green() -> None:
    report = check_connector(Connector, seeds=5)
    assert not report.is_clean
    assert "nothing was ever stored" in report.summary()


@pytest.mark.slow
def test_no_false_alarm_for_a_multi_connector() -> None:
    report = check_connector(MultiConnector, seeds=24, options={"connectors": CHILDREN})
    assert report.is_clean, report.failures[0].script


@functools.cache
def default_run() -> ConnectorRuns:
    """The example, in as many seeds as by default."""
    return check_connector(HostCacheConnector, seeds=200)


@pytest.mark.slow
def test_everything_that_should_happen_happens() -> None:
    coverage = default_run().coverage
    for name in (
        "loads",
        "stores",
        "failed loads",
        "failed stores",
        "hits",
        "aborted loading",
        "aborted running",
        "aborted waiting",
        "preemptions",
        "ids again",
        "resets",
        "next turns",
    ):
        assert coverage[name] >= 8, name


# --- wrong connectors ---


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: str(mutant.name))
def test_every_mutant_is_killed_with_its_law(mutant: Mutant) -> None:
    broken = mutant.first_failure()
    assert broken is not None, "no seed showed it"
    assert broken.law == mutant.law, broken


def test_there_are_mutants_of_real_incidents() -> None:
    assert len(MUTANTS) >= 30
    assert len({mutant.incident for mutant in MUTANTS} - {None}) >= 15


# --- replay ---


@pytest.mark.slow
@pytest.mark.parametrize("connector", [OffloadConnector, Two, CountsFailedLoads])
def test_a_seed_gives_the_same_run_twice(connector: type[Connector]) -> None:
    for seed in range(12):
        first = simulate(connector, generate_scenario(seed))
        again = simulate(connector, generate_scenario(seed))
        # Threads of a worker half that is run as it is may be seen sooner or later.
        assert first == (again if runs_alone(first) else replace(again, coverage=first.coverage))
        for snapshot in first.timeline:
            blocks = snapshot.free + snapshot.engine + snapshot.held
            assert blocks == first.scenario.num_gpu_blocks - 1


def runs_alone(result: SimulationResult) -> bool:
    return result.scenario.worker_half != "as_it_is"


def test_a_seed_gives_the_same_run_in_another_process() -> None:
    code = (
        "from kvview.testing.connector import generate_scenario, simulate\n"
        "from kvview_reference.connector import OffloadConnector as C\n"
        "print([simulate(C, generate_scenario(seed)).timeline for seed in range(4)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1


@pytest.mark.slow
def test_a_failure_is_replayed_by_its_seed() -> None:
    report = check_connector(LeaksFailedStores, seeds=25, keep_going=True, max_shrink_runs=0)
    for failure in report.failures[:3]:
        again = replay_seed(LeaksFailedStores, failure.seed, max_shrink_runs=0)
        assert again == failure
    assert replay_seed(OffloadConnector, 3) is None


# --- shrinking ---


@pytest.mark.parametrize(
    ("connector", "law"),
    [(LeaksFailedStores, "CONN-4"), (FreesWhenPlanned, "CONN-6"), (PinsByRequest, "CONN-5")],
)
def test_the_first_failure_is_shrunk_to_a_script_that_fails(
    connector: type[Connector], law: str
) -> None:
    seed = next(s for s in range(60) if has_failed(connector, s))
    failure = replay_seed(connector, seed, max_shrink_runs=250)
    assert failure is not None
    assert failure.law == law
    assert failure.result is not None
    small, big = failure.result.scenario, generate_scenario(seed)
    assert len(small.events) <= 8 < len(big.events)
    assert len(small.fates) <= len(big.fates)
    with pytest.raises(AssertionError) as raised:
        exec(failure.script, {})  # what a person pastes
    assert f": {failure.message}" in str(raised.value) or law == "CONN-5"


def has_failed(connector: type[Connector], seed: int) -> bool:
    return bool(check_connector(connector, seeds=1, first_seed=seed, max_shrink_runs=0).failures)


def test_a_scenario_by_hand() -> None:
    scenario = replace(generate_scenario(0), events=(), fates=())
    assert simulate(OffloadConnector, scenario).failure is None
    small = Scenario(
        geometry=replace(scenario.geometry, groups=(FullAttention(4),)),
        num_gpu_blocks=12,
        events=(Add("a", 1, 20), Step(4), Squeeze(11), Squeeze(0), Add("a", 1, 20), Step(4)),
        fates=(Fate(is_lost=True),),
    )
    result = simulate(OffloadConnector, small)
    assert result.failure is None
    assert max(snapshot.held for snapshot in result.timeline) > 0


# --- the report ---


def test_a_report_says_what_a_person_needs() -> None:
    seen: list[tuple[int, int]] = []
    report = check_connector(
        FreesWhenPlanned,
        seeds=3,
        first_seed=5,
        keep_going=True,
        max_shrink_runs=30,
        on_progress=lambda done, failed: seen.append((done, failed)),
    )
    assert [done for done, _ in seen] == [1, 2, 3]
    assert not report.is_clean
    summary = report.summary()
    assert "3 seeds from 5" in summary
    assert f"seed {report.failures[0].seed}" in summary
    assert report.failures[0].script in summary
    assert set(report.by_law) >= {"CONN-6"}
    clean = check_connector(OffloadConnector, seeds=2).summary()
    assert "2 seeds from 0" in clean
    assert "no law broken" in clean


def test_ctrl_c_leaves_the_summary_so_far() -> None:
    def stop(done: int, failed: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    report = check_connector(OffloadConnector, seeds=9, on_progress=stop)
    assert report.is_interrupted
    assert report.num_seeds == 2
    assert not report.failures
    assert not report.is_clean
    assert "interrupted" in report.summary()


def test_the_page_is_one_file_with_a_picture(tmp_path: Path) -> None:
    report = run_checks(LeaksFailedStores, seeds=12, keep_going=True)
    write_report(tmp_path / "report.html", report)
    page = (tmp_path / "report.html").read_text()
    failure = report.failures[0].failure
    assert failure is not None
    assert ", ".join(map(str, failure.seeds)) in page
    assert "check_conn_4_in_simulated_runs" in page
    assert page.count("<svg") == 1, "one picture a law, not one a seed"
    assert "prefers-color-scheme: dark" in page
    assert 'class="hatch"' in page, "areas are told apart not by colour alone"
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert len(list(svg.iter("polygon"))) == 3
    assert page.count("http") == page.count(DOCS_URL), "links, and nothing that is loaded"
    assert "src=" not in page
    with pytest.raises(ConfigError, match="No such file or directory"):
        write_report(tmp_path / "none" / "report.html", report)


# --- the invariants alone ---


def test_invariants_name_the_law_and_the_blocks() -> None:
    with pytest.raises(InvariantBroken, match=r"POOL-2: blocks \[3\]"):
        check_free_list([3, 4, 3], {3: 0, 4: 0})
    with pytest.raises(InvariantBroken, match=r"POOL-1: .*\[4\] are queued and referred to"):
        check_free_list([3, 4], {3: 0, 4: 1})
    with pytest.raises(InvariantBroken, match="CONN-4: block 1 has 2 references: 1 of requests"):
        check_conservation({1: 2}, {1: 1}, {})
    assert EventFold().advertised == set()


class Crashes(OffloadConnector):
    def make_scheduler(self) -> None:  # type: ignore[override]
        raise OSError("no such host")


def test_what_a_connector_raises_is_a_failure_not_a_crash() -> None:
    failure = simulate(Crashes, generate_scenario(0)).failure
    assert failure is not None
    raised = "CONN-1: make_scheduler raised OSError no such host at .*test_simulation.py:[0-9]+ "
    assert re.fullmatch(raised + r"\(step 0\)", str(failure))


class NeverAnswers(OffloadConnector):
    def make_scheduler(self) -> SchedulerConnector:
        half = super().make_scheduler()
        half.match_prefix = lambda request, num_computed_tokens: None  # type: ignore[method-assign]
        return half


def test_a_connector_that_never_answers_is_not_the_engines_fault() -> None:
    failure = check_connector(NeverAnswers, seeds=3, max_shrink_runs=0).failures[0]
    assert failure.law == "CONN-2"
    assert "match_prefix never answers" in failure.message


# --- what was a false alarm once ---


def promised(history: History, request: RequestInfo, num_tokens: int) -> None:
    """A promise of what is stored and advertised."""
    keys = tuple(make_offload_key(h, 0) for h in request.block_hashes[: num_tokens // 4])
    history.stored.update(keys)
    history.events.apply([OffloadingEvent(keys, "CPU", removed=False)])
    history.on_promise(request, 0, num_tokens)


def forget(history: History) -> None:
    gone = tuple(history.events.advertised)
    history.events.apply([OffloadingEvent(gone, "CPU", removed=True)])
    history.forget()


def test_a_promise_ends_with_a_reset() -> None:
    history = History(CacheGeometry.single(4))
    promised(history, RequestInfo("a", 9, chain_hashes(range(2))), 4)
    forget(history)
    history.on_blocks_allocated("a")  # it starts without a load


def test_a_promise_ends_when_the_blocks_come() -> None:
    history = History(CacheGeometry.single(4))
    promised(history, RequestInfo("a", 9, chain_hashes(range(2))), 4)
    history.on_blocks_allocated("a")
    history.stored.clear()  # evicted since, and the load failed
    history.on_blocks_allocated("a")


def test_the_promises_of_several_requests_are_kept_apart() -> None:
    history = History(CacheGeometry.single(4))
    one, two = (RequestInfo(name, 9, chain_hashes([name, 1])) for name in "ab")
    promised(history, one, 8)
    promised(history, two, 8)
    history.stored.discard(make_offload_key(one.block_hashes[1], 0))
    history.on_blocks_allocated("b")
    with pytest.raises(InvariantBroken, match="CONN-2: match_prefix promised key"):
        history.on_blocks_allocated("a")


@pytest.mark.slow
@pytest.mark.parametrize("connector", [LeasesForAWhile, LeasesForLong])
def test_a_lease_with_a_deadline_gives_back_by_itself(connector: type[Connector]) -> None:
    report = check_connector(connector, seeds=24)
    assert not report.failures, report.failures[0].script


@pytest.mark.parametrize("connector", [LeasesForEver, LeasesAndTouches, RenewsForEver])
def test_a_hold_without_a_deadline_beside_it_is_found(connector: type[Connector]) -> None:
    report = check_connector(connector, seeds=10, max_shrink_runs=0)
    assert {failure.law for failure in report.failures} == {"CONN-4"}


# --- conversations ---


def test_a_turn_goes_on_where_the_last_one_ended() -> None:
    scenario = Scenario(
        geometry=CacheGeometry.single(4),
        num_gpu_blocks=20,
        events=(
            Add("b", 1, 4, 4, continues="a"),  # never came: left out
            Add("a", 1, 9, 7),
            Add("c", 1, 4, 4, continues="a"),  # has not ended: left out
            Step(6),
            Add("b", 1, 4, 4, continues="a"),
            Step(6),
            Add("b", 1, 4, 4, continues="b"),
        ),
        cpu_blocks=50,
    )
    result = simulate(LazyOffloadConnector, scenario)
    assert result.failure is None
    assert result.coverage["requests"] >= 3
    assert result.coverage["next turns"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("connector", UNUSUAL)
def test_no_false_alarm_for_what_is_unusual(connector: type[Connector]) -> None:
    report = check_connector(connector, seeds=16, first_seed=500)
    assert not report.failures, report.failures[0].script


@pytest.mark.slow
def test_every_cell_of_the_coverage_is_filled() -> None:
    coverage = default_run().coverage
    table = table_of_cells(coverage)
    assert len(table) == 1 + 12
    for row in table[1:]:
        assert min(map(int, row[2:])) >= 10, row
    assert not not_exercised(coverage)


def test_a_cell_that_stays_empty_is_named() -> None:
    cells = [f"several/mixed/mamba/{hit}/failed" for hit in ("no-gpu-hit", "gpu-hit")]
    coverage = {
        "stores": 9,
        "hits": 9,
        "loads": 9,
        f"seeds/{cells[0]}": 20,
        f"seeds/{cells[1]}": 20,
    }
    names = [gap.name for gap in not_exercised(coverage)]
    assert names == [f"loads/{cell}" for cell in cells]
    few = coverage | {f"seeds/{cells[1]}": 9}
    assert [gap.name for gap in not_exercised(few)] == names[:1]
    assert not not_exercised(coverage | dict.fromkeys(names, 2))


@pytest.mark.slow
def test_event2_is_asked_of_the_children_that_give_events() -> None:
    """What a silent child promises is advertised by nobody; a key of both may be removed."""
    for silent in (0, 1):
        children = [dict(child) for child in CHILDREN]
        children[silent]["options"] = {"cpu_blocks": 40}
        options = {"connectors": children}
        report = check_connector(MultiConnector, seeds=12, options=options, max_shrink_runs=0)
        assert not report.failures, report.failures[0].message
        assert report.coverage["loads"] > 50


@pytest.mark.parametrize("number", [3, 5])
def test_conn10_bad_luck_is_no_leak(number: int) -> None:
    """A medium that fails every third time: the faults of a lap must not lock those of the next."""
    result = simulate(Flaky, steady_scenario(number))
    assert result.failure is None
    assert sum(result.loads_of_laps) > 0


def test_conn10_memory_that_is_bounded_does_not_grow() -> None:
    assert grows([1_000, 9_000, 17_000], 40)
    assert not grows([1_000, 17_000, 17_500], 40)
    assert not grows([1_000, 5_000, 9_000], 40)  # a tier of 40 pages that is filling
    assert not grows([], 40)  # a raw connector


class OneGroupOnly(HostCacheConnector):
    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        if len(config.geometry.groups) > 1:
            raise ConfigError("one KV-cache group, please")


def test_a_geometry_that_is_refused_is_a_gap_not_a_crash() -> None:
    report = check_connector(OneGroupOnly, seeds=8)
    assert report.num_seeds == 8
    assert [gap.name for gap in report.not_exercised] == ["geometries"]


def test_a_long_run_goes_on_with_faults() -> None:
    short, long = generate_scenario(1), generate_scenario(1, steps=1000)
    assert long == replace(short, laps=long.laps)
    result = simulate(OffloadConnector, long)
    assert result.failure is None
    assert result.coverage["steps"] >= 1000
    assert len(result.loads_of_laps) == long.laps


@pytest.mark.slow
def test_there_are_turns_in_generated_scenarios() -> None:
    assert default_run().coverage["next turns"] >= 200


def test_wrong_tokens_die_at_the_load_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look at what a store reads, a later turn finds what was never computed."""
    monkeypatch.setattr(FaultyWorker, "_refuse_nameless", lambda self, job, blocks: None)
    options = {"enable_events": False}  # which would tell at once
    report = check_connector(StoresTheLastToken, seeds=40, options=options, max_shrink_runs=0)
    assert {failure.law for failure in report.failures} == {"CONN-2"}


class WritesIntoItsFolder(OffloadConnector):
    """Keeps something on disk, which must not outlive its run, nor be that of another connector."""

    folders: ClassVar[list[Path]] = []

    def __init__(self, config: ConnectorConfig) -> None:
        options = dict(config.options)
        self.folder = Path(options.pop("folder"))
        super().__init__(replace(config, options=options))

    def make_scheduler(self) -> SchedulerConnector:
        assert not any(self.folder.iterdir())
        (self.folder / "mine").touch()
        self.folders.append(self.folder)
        return super().make_scheduler()


def test_each_connector_of_each_run_has_a_folder_of_its_own() -> None:
    scenario = replace(generate_scenario(0), num_connectors=2, cpu_blocks=20)
    for _ in range(2):
        result = simulate(WritesIntoItsFolder, scenario, {"folder": "{tmp}"})
        assert result.failure is None, result.failure
    folders = WritesIntoItsFolder.folders
    assert len(set(folders)) == 4
    assert not any(folder.exists() for folder in folders)
    assert not Path("{tmp}").exists()
