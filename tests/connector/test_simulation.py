"""The simulation: wrong connectors are red, right ones green; failures are replayed and shrunk."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typing_extensions import override

from examples.host_cache import HostCacheConnector, HostCacheScheduler
from kvview import (
    CacheGeometry,
    ConfigError,
    Connector,
    ConnectorConfig,
    OffloadingEvent,
    RequestInfo,
    SchedulerConnector,
    make_offload_key,
)
from kvview.testing.connector import (
    Add,
    Scenario,
    Step,
    check_connector,
    generate_scenario,
    simulate,
)
from kvview.testing.connector.confirm.shrink import simpler_geometries, simpler_sizes
from kvview.testing.connector.exercised.coverage import not_exercised
from kvview.testing.connector.judge.invariants import (
    InvariantBroken,
)
from kvview.testing.connector.judge.tier_model import TierKeys
from kvview.testing.connector.result import SimulationResult
from kvview.testing.connector.run.long_runs import (
    FEWEST_ROUNDS,
    KeptObjects,
    grows,
    grows_with_keys,
    with_rounds_compared,
)
from kvview.testing.connector.scenario.generate import FULL_TIER_PLACES, steady_scenario
from kvview_reference.engine import chain_hashes
from kvview_reference.store_connector import StoreConnector
from tests.connector.unusual import UNUSUAL
from tests.mutants.connector import MUTANTS, load_named
from tests.mutants.connector.each_step import EachStep
from tests.mutants.connector.late import Flaky, Late
from tests.mutants.connector.two import Two
from tests.mutants.connector.walker import Walker
from tests.mutants.mutant import Mutant

FREES, LEAKS = load_named("FreesAtPlan"), load_named("NeverFreesAfterFailure")
# --- right connectors ---


RIGHT: list[type[Connector]] = [
    *(StoreConnector, HostCacheConnector, Connector),
    *(Walker, EachStep, Late, Two),
    *UNUSUAL,
]


@pytest.mark.slow
@pytest.mark.parametrize("connector", RIGHT)
def test_right_connectors_break_no_law(connector: type[Connector]) -> None:
    report = check_connector(connector, seeds=16)
    assert not report.failures, report.failures[0].script


def test_a_connector_that_does_nothing_is_not_green() -> None:
    report = check_connector(Connector, first_seed=3, seeds=3)
    assert "nothing was ever stored" in {gap.what for gap in report.not_exercised}


@pytest.mark.slow
def test_the_default_seeds_cover_every_event_and_every_cell() -> None:
    coverage = check_connector(HostCacheConnector, seeds=200).coverage
    for name in (
        *("loads", "stores", "failed loads", "failed stores", "hits", "preemptions", "resets"),
        *("aborted loading", "aborted running", "aborted waiting", "ids again"),
    ):
        assert coverage[name] >= 8, name
    assert coverage["next turns"] >= 200
    assert coverage["resets with jobs in flight"] >= 10
    assert not not_exercised(coverage)
    scenarios = [generate_scenario(seed) for seed in range(200)]
    halves = Counter(scenario.worker_half for scenario in scenarios)
    assert halves["whole_plans"] >= 25
    assert halves["in_a_process"] >= 5
    assert sum(bool(scenario.group_pages) for scenario in scenarios) >= 25


# --- wrong connectors ---


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_wrong_connector_breaks_its_law(mutant: Mutant) -> None:
    broken = mutant.first_failure()
    assert broken is not None, "no seed showed it"
    assert broken.law == mutant.law, broken


@pytest.mark.slow
@pytest.mark.parametrize("name", ["KeepsStoresOverResets", "OwnBlockTable", "StoresTheLastToken"])
def test_the_first_seeds_reach_late_moments(name: str) -> None:
    assert check_connector(load_named(name), seeds=25, max_shrink_runs=0, processes=0).failures


class CountsPromises(HostCacheConnector):
    """Counts promises of which a page was evicted before the load, and promises without a load."""

    seen: ClassVar[Counter[str]] = Counter()

    @override
    def make_scheduler(self) -> SchedulerConnector:
        seen, promised = self.seen, dict[str, int]()

        class Scheduler(HostCacheScheduler):
            @override
            def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
                number = super().match_prefix(request, num_computed_tokens)
                end = num_computed_tokens + number
                seen["evicted"] += end < promised.get(request.request_id, 0)
                promised[request.request_id] = end if number else 0
                return number

            @override
            def on_blocks_allocated(self, request: RequestInfo, *args: Any) -> None:
                promised[request.request_id] = 0
                super().on_blocks_allocated(request, *args)

            @override
            def on_request_finished(self, request: RequestInfo, *args: Any) -> None:
                seen["abandoned"] += promised.get(request.request_id, 0) > 0
                super().on_request_finished(request, *args)

        return Scheduler(self.config, self.cpu_blocks)


@pytest.mark.slow
def test_full_tiers_evict_promised_pages_and_requests_abandon_promises() -> None:
    CountsPromises.seen.clear()
    for seed in FULL_TIER_PLACES:
        options = {"cpu_blocks": "{blocks}"}
        assert simulate(CountsPromises, generate_scenario(seed), options).failure is None
    assert CountsPromises.seen.keys() == {"evicted", "abandoned"}
    assert all(CountsPromises.seen.values()), CountsPromises.seen


@pytest.mark.slow
def test_conn5_a_job_id_is_not_used_again() -> None:
    failure = simulate(load_named("CountsJobsInAByte"), steady_scenario(2)).failure
    assert failure is not None
    assert failure.law == "CONN-5", failure


# --- replay ---


class SlowLookup(SchedulerConnector):
    """Answers half a second after the first lookup; many steps of the simulation pass meanwhile."""

    def __init__(self) -> None:
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._look_up)

    def _look_up(self) -> None:
        self._answered.wait(0.5)
        self._answered.set()

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        if self._thread.ident is None:
            self._thread.start()
        return 0 if self._answered.is_set() else None

    @override
    def shutdown(self) -> None:
        self._answered.set()
        if self._thread.ident is not None:
            self._thread.join()


class LooksUpSlowly(Connector):
    @override
    def make_scheduler(self) -> SchedulerConnector:
        return SlowLookup()


def test_a_lookup_on_a_thread_may_take_longer_than_the_steps_of_a_run() -> None:
    assert not check_connector(LooksUpSlowly, seeds=1).failures


@pytest.mark.slow
@pytest.mark.parametrize("connector", [StoreConnector, LEAKS])
def test_a_seed_gives_the_same_run_twice(connector: type[Connector]) -> None:
    for seed in range(12):
        first = simulate(connector, generate_scenario(seed))
        again = simulate(connector, generate_scenario(seed))
        if first.scenario.worker_half == "whole_plans":  # its threads may be late in one run
            again = replace(again, coverage=first.coverage)
        assert first == again
        for snapshot in first.timeline:
            blocks = snapshot.free + snapshot.engine + snapshot.held
            assert blocks == first.scenario.num_gpu_blocks - 1


@pytest.mark.slow
def test_a_seed_gives_the_same_run_in_another_process() -> None:
    code = (
        "from kvview.testing.connector import generate_scenario, simulate\n"
        "from kvview_reference.store_connector import StoreConnector as C\n"
        "print([simulate(C, generate_scenario(seed)).timeline for seed in range(2)])"
    )
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    here = [simulate(StoreConnector, generate_scenario(seed)).timeline for seed in range(2)]
    assert output == f"{here}\n"


# --- shrinking ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("connector", "law"),
    [(LEAKS, "CONN-4"), (FREES, "CONN-6"), (load_named("JobIdsByRequest"), "CONN-5")],
)
def test_the_first_failure_is_shrunk_to_a_script_that_fails(
    connector: type[Connector], law: str
) -> None:
    (failure,) = check_connector(connector, seeds=60, max_shrink_runs=250).failures
    assert failure.law == law
    assert failure.result is not None
    small, big = failure.result.scenario, generate_scenario(failure.seed)
    assert len(small.events) <= 8 < len(big.events)
    assert len(small.fates) <= len(big.fates)
    with pytest.raises(AssertionError) as raised:
        exec(failure.script, {})  # as pasted by its reader
    assert f": {failure.message}" in str(raised.value) or law == "CONN-5"


def test_all_that_is_simpler_can_be_played() -> None:
    drawn = [scenario for scenario in map(generate_scenario, range(60)) if scenario.ranks]
    for scenario in drawn:
        for simpler in (*simpler_sizes(scenario), *simpler_geometries(scenario)):
            assert simulate(HostCacheConnector, replace(simpler, events=())).failure is None
    assert len(drawn) > 5


# --- the invariants and the model alone ---


def promised(keys: TierKeys, request: RequestInfo, num_tokens: int) -> None:
    """Promise keys that are stored and advertised."""
    found = tuple(make_offload_key(h, 0) for h in request.block_hashes[: num_tokens // 4])
    keys.stored.update(found)
    keys.on_events([OffloadingEvent(found, "CPU", removed=False)])
    keys.on_promise(request, 0, num_tokens)


def test_a_promise_ends_with_a_reset_and_when_the_blocks_come() -> None:
    keys = TierKeys(CacheGeometry.single(4))
    promised(keys, RequestInfo("a", 9, chain_hashes(range(2))), 4)
    keys.on_events([OffloadingEvent(tuple(keys.advertised), "CPU", removed=True)])
    keys.on_reset()
    keys.on_blocks_allocated("a")  # it starts without a load
    promised(keys, RequestInfo("a", 9, chain_hashes(range(2))), 4)
    keys.on_blocks_allocated("a")
    keys.stored.clear()  # evicted since, and the load failed
    keys.on_blocks_allocated("a")


def test_the_promises_of_several_requests_are_kept_apart() -> None:
    keys = TierKeys(CacheGeometry.single(4))
    one, two = (RequestInfo(name, 9, chain_hashes([name, 1])) for name in "ab")
    promised(keys, one, 8)
    promised(keys, two, 8)
    keys.stored.discard(make_offload_key(one.block_hashes[1], 0))
    keys.on_blocks_allocated("b")
    with pytest.raises(InvariantBroken, match="CONN-2: match_prefix promised key"):
        keys.on_blocks_allocated("a")


# --- scenarios ---


def test_a_next_turn_needs_a_request_that_has_ended() -> None:
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
    result = simulate(StoreConnector, scenario)
    assert result.failure is None
    assert result.coverage["requests"] >= 3
    assert result.coverage["next turns"] == 2


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
@pytest.mark.parametrize("number", [3, 5])
def test_conn10_random_failures_are_not_a_leak(number: int) -> None:
    """A medium fails every third time: the faults of a round must not repeat in the next."""
    result = simulate(Flaky, steady_scenario(number))
    assert result.failure is None
    assert sum(result.loads_of_rounds) > 0


@pytest.mark.parametrize(
    ("sizes", "is_leak"),
    [
        ([0, 3_000, 6_000, 9_000, 12_000, 15_000], True),
        ([0, 3_000, 4_000, 13_000, 14_000, 15_000], True),  # a dictionary doubles its table
        ([0, 9_000, 17_000, 17_500, 17_500, 17_500], False),  # a history that is full
        ([0, 9_000, 9_000, 18_000, 18_000, 27_000], False),  # a pool of connections
        ([0, 100, 700, 1_300, 1_900, 2_500], False),  # too little for 40 pages
        ([], False),  # a raw connector
    ],
)
def test_conn10_memory_must_not_grow_in_each_window(sizes: list[int], is_leak: bool) -> None:
    assert grows(sizes, 40) == is_leak


def test_conn10_a_table_that_counts_differently_is_measured() -> None:
    class Odd(dict[int, int]):
        def __len__(self) -> int:
            raise ValueError("this table has no length")

    half = Growing()
    half.table = Odd.fromkeys(range(100), 0)  # type: ignore[attr-defined]
    memory = KeptObjects(FEWEST_ROUNDS)
    memory.end_round(0, [half], 0, set())
    assert memory.sizes[0] > 0


def test_conn10_a_history_of_keys_must_not_grow_in_each_window() -> None:
    assert grows_with_keys([1_000_000 * window for window in range(6)])
    assert not grows_with_keys([1_000_000 * min(window, 4) for window in range(6)])  # it is full
    assert not grows_with_keys([8_000 * window for window in range(6)])  # no entry for each key


@pytest.mark.parametrize("is_filling", [True, False])
def test_conn10_a_tier_that_fills_slowly_is_not_a_leak(is_filling: bool) -> None:
    half = Growing()
    rounds = 2 * FEWEST_ROUNDS
    memory = KeptObjects(rounds)
    for place in range(rounds):
        half.pages += [bytes(1_000) for _ in range(2)]
        memory.end_round(place, [half], len(half.pages) if is_filling else 90, set())
    assert grows(memory.sizes, 90) != is_filling


def test_conn10_jobs_that_have_not_ended_are_not_a_leak() -> None:
    half = Growing()
    memory = KeptObjects(FEWEST_ROUNDS)
    for place in range(FEWEST_ROUNDS):
        half.pages = [bytes(1_000) for _ in range(place * (place % 2))]
        memory.end_round(place, [half], 0, set())
    assert not grows(memory.sizes, 10)


@pytest.mark.parametrize("most", [None, 20])
def test_conn10_ids_of_ended_requests_must_not_grow_in_each_window(most: int | None) -> None:
    """A table of a fixed number of requests grows until it is full."""

    def play(scenario: Scenario) -> SimulationResult:
        memory, half, ended = KeptObjects(scenario.rounds), Growing(), set[str]()
        half.table = dict[str, int]()  # type: ignore[attr-defined]
        for place in range(scenario.rounds):
            ended.add(f"r{place}")
            if len(half.table) != most:  # type: ignore[attr-defined]
                half.table[f"r{place}"] = 0  # type: ignore[attr-defined]
            memory.end_round(place, [half], 0, ended | {"unfinished"})
        loads = (30,) * scenario.rounds
        kept = tuple(memory.requests)
        return SimulationResult(scenario, None, (), {}, loads, kept_requests=kept)

    result = with_rounds_compared(play(steady_scenario(0)), play)
    assert (result.failure is None) == (most is not None)


@pytest.mark.slow
def test_conn10_evictions_by_chance_are_not_a_leak() -> None:
    """The first run loads less than half as much as new connectors, and the second does not."""
    result = simulate(load_named("EvictsAtRandom"), generate_scenario(114))
    assert result.failure is None, result.failure


@pytest.mark.parametrize("is_leak", [False, True])
def test_conn10_other_rounds_confirm_that_a_run_loads_little(is_leak: bool) -> None:
    def played(scenario: Scenario, tokens: int) -> SimulationResult:
        return SimulationResult(scenario, None, (), {}, (tokens,) * scenario.rounds)

    def play(scenario: Scenario) -> SimulationResult:
        is_other = scenario.first_round == FEWEST_ROUNDS == scenario.rounds
        return played(scenario, 1 if is_leak and is_other else 30)

    result = with_rounds_compared(played(steady_scenario(0), 1), play)
    assert (result.failure is not None) == is_leak


@pytest.mark.parametrize(("is_leak", "num_resets"), [(False, 9), (True, 9), (True, 0)])
def test_conn10_many_keys_confirm_that_memory_grows(is_leak: bool, num_resets: int) -> None:
    """Equal rounds load the same keys again, so their memory does not grow with the keys.

    Without resets, a tier without a limit keeps each key.
    """
    coverage = {"resets of connectors": num_resets}

    def play(scenario: Scenario) -> SimulationResult:
        grows_now = is_leak and scenario.cpu_blocks > 1_000
        sizes = tuple(10**6 * window * grows_now for window in range(6))
        return SimulationResult(scenario, None, (), coverage, (0,) * scenario.rounds, sizes)

    grown = replace(play(steady_scenario(0)), kept_bytes=tuple(range(0, 6 * 10**6, 10**6)))
    result = with_rounds_compared(grown, play)
    assert (result.failure is not None) == (is_leak and num_resets > 0)


class Growing(SchedulerConnector):
    def __init__(self) -> None:
        self.pages: list[bytes] = []


class RaisesOnce(SchedulerConnector):
    has_raised = False

    @override
    def shutdown(self) -> None:
        if not RaisesOnce.has_raised:
            RaisesOnce.has_raised = True
            raise RuntimeError("once")


class RaisesOnceConnector(Connector):
    @override
    def make_scheduler(self) -> SchedulerConnector:
        return RaisesOnce()


def test_a_failure_by_chance_is_not_blamed_on_the_reuse_of_request_ids() -> None:
    seed = next(
        seed
        for seed in range(99)
        if simulate(Connector, generate_scenario(seed)).coverage["ids again"]
    )
    (failure,) = check_connector(RaisesOnceConnector, seeds=1, first_seed=seed).failures
    assert failure.law == "CONN-4"
    assert "the second: no law broken" in failure.message


class OneGroupOnly(HostCacheConnector):
    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        if len(config.geometry.groups) > 1:
            raise ConfigError("one KV-cache group, please")


def test_a_refused_geometry_is_a_gap_and_not_a_crash() -> None:
    report = check_connector(OneGroupOnly, first_seed=3, seeds=8)
    assert report.num_seeds == 8
    assert [gap.name for gap in report.not_exercised] == ["geometries"]


@pytest.mark.slow
def test_a_long_run_repeats_its_events_with_faults() -> None:
    short, long = generate_scenario(1), generate_scenario(1, steps=1000)
    assert long == replace(short, rounds=long.rounds)
    result = simulate(StoreConnector, long)
    assert result.failure is None
    assert result.coverage["steps"] >= 1000
    assert len(result.loads_of_rounds) == long.rounds


class WritesIntoItsFolder(StoreConnector):
    """Keeps a file, which must not outlive its run, nor be visible to another connector."""

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
