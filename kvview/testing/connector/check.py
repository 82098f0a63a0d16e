"""The run of many seeds of a connector, on all cores, up to the first failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from kvview.targets import is_engine_connector
from kvview.testing.checks import EXCEPTIONS
from kvview.testing.connector.confirm import repeat
from kvview.testing.connector.confirm.shrink import MAX_RUNS, Shrinker
from kvview.testing.connector.exercised.coverage import FAILED_BY_THEMSELVES
from kvview.testing.connector.exercised.lines import Lines
from kvview.testing.connector.processes import Died, Processes, Task, default_processes
from kvview.testing.connector.result import (
    ConnectorFailure,
    ConnectorRuns,
    Failure,
    SimulationResult,
)
from kvview.testing.connector.run.engine import EngineFactory, load_engines, own_runs
from kvview.testing.connector.scenario.scenario import Scenario, to_script
from kvview.testing.connector.scenario.seed_order import in_order
from kvview.testing.connector.seed import SeedResult, SeedRunner
from kvview.testing.connector.tally import Tally
from kvview.testing.placeholders import in_size
from kvview.testing.supervision import watchdog

_SAMPLE = repeat.EVERY // 2
_TRIES = 50  # runs that a script makes if its failure is not deterministic

GoesOn = Callable[[str], bool]
Simulate = Callable[[SeedRunner, Scenario], SimulationResult]


def check_connector(
    connector_class: type[Any],
    *,
    seeds: int = 200,
    first_seed: int = 0,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    keep_going: bool | GoesOn = False,
    max_shrink_runs: int = MAX_RUNS,
    engines: EngineFactory | None = None,
    steps: int | None = None,
    hook_seconds: float = watchdog.HOOK_SECONDS,
    processes: int | None = None,
    shard: tuple[int, int] = (1, 1),
    scenarios: Sequence[Scenario] = (),
    lines: Lines = MappingProxyType({}),
) -> ConnectorRuns:
    """Run a connector through the scenarios of many seeds, up to the first failure.

    1. The seeds that detect the most wrong connectors in the least time run first. The report does
       not depend on the number of processes.
    2. The first failure of each law is shrunk.
    3. A failing run is repeated, and the message contains any difference between the two runs.
    4. A hook that does not return ends its run; after the second such hook, the check ends.
    5. If a process dies, the seed that it ran counts as failed.

    Args:
        connector_class: A kvview connector, or a connector for the engine's own interface.
        seeds: Number of seeds.
        first_seed: The first seed.
        options: Options of the connector. ``cpu_blocks`` and ``enable_events`` are added if the
            connector accepts them and the user has not set them. The placeholders ``{tmp}``,
            ``{blocks}`` and ``{bytes}`` are replaced (:mod:`~kvview.testing.placeholders`).
        on_progress: Called after each seed with the number of seeds and of failures
            so far.
        keep_going: Whether the run continues after a failure; or a function that decides this for
            the broken law.
        max_shrink_runs: Maximum number of runs to shrink one failure; all failures together may use
            twice as many. A long run counts as several runs; 0 turns shrinking off.
        engines: Builds the engines; reference engines by default.
        steps: Minimum number of scheduler steps in a run; None for the numbers of the scenarios.
        hook_seconds: CPU seconds that one call of a hook may take
            (:mod:`~kvview.testing.supervision.watchdog`).
        processes: Number of forked processes that run seeds; with 0, all seeds run in this process.
            The default is one process per core, but 0 for a single seed or if a fork is not safe.
        shard: Number of the shard to run, from 1, and number of shards; all seeds by default.
        scenarios: Scenarios to run, in order, instead of those of the seeds.
        lines: Lines of the author's files that other checks have run.

    Returns:
        The results; after Ctrl-C, the results so far.

    Raises:
        ConfigError: The connector refuses the options.
    """
    given = dict(options or {})
    in_size(given, 1, 1)  # so that a wrong expression is refused before anything runs
    engines = engines or load_engines()
    runner = SeedRunner(connector_class, given, engines, steps or 0, scenarios)
    number = processes
    if number is None:
        number = default_processes() if seeds > 1 else 0  # because a fork takes as long as a seed
    numbers = in_order(first_seed, seeds)[shard[0] - 1 :: shard[1]]
    if scenarios:
        numbers = list(range(len(scenarios)))
    start = time.perf_counter()
    with watchdog.limit(hook_seconds), _one_thread(), Processes(runner, number) as made:
        check = _Check(
            connector_class,
            given,
            engines,
            runner,
            made,
            goes_on=keep_going if callable(keep_going) else lambda law: bool(keep_going),
            max_shrink_runs=max_shrink_runs,
        )
        if is_engine_connector(connector_class):
            check.tally.laws = own_runs(engines, connector_class).laws_of_own
        check.tally.code.add(lines)
        is_interrupted = check.run(numbers, on_progress)
    seconds = time.perf_counter() - start
    return check.tally.runs(
        engines.name, first_seed, seconds, is_interrupted, steps, len(numbers), shard
    )


@dataclass(eq=False)
class _Check:
    """The seeds of a connector, which run one after another, and their results.

    Args:
        connector_class: The connector.
        options: Its options.
        engines: Builds the engines.
        runner: Runs one seed.
        processes: The processes that have a copy of the runner.
        goes_on: Whether the check continues after a broken law.
        max_shrink_runs: Maximum number of runs to shrink one failure.
    """

    connector_class: type[Any]
    options: dict[str, Any]
    engines: EngineFactory
    runner: SeedRunner
    processes: Processes
    goes_on: GoesOn
    max_shrink_runs: int

    def __post_init__(self) -> None:
        self._shrink_runs_left = 2 * self.max_shrink_runs
        self.tally = Tally(self.connector_class, self.options, self.runner.code)
        self._num_timeouts = 0
        self._to_shrink: list[int] = []  # indices in self.tally.failures
        self._fails_alone: Scenario | None = None

    def run(self, seeds: Sequence[int], on_progress: Callable[[int, int], None] | None) -> bool:
        """Run the seeds, then shrink and explain the failures; returns whether Ctrl-C ended it."""
        try:
            self._run_seeds(seeds, on_progress)
            self._find_first_error()
            self._shrink_failures()
            self._explain()
        except KeyboardInterrupt:
            return True
        return False

    def _run_seeds(
        self, seeds: Sequence[int], on_progress: Callable[[int, int], None] | None
    ) -> None:
        """Run the seeds, in order, until a failure ends the check."""
        tasks = (
            Task(
                SeedRunner.run_seed,
                (seed, place % repeat.EVERY == _SAMPLE, not self.tally.code.is_complete),
            )
            for place, seed in enumerate(seeds)
        )
        with closing(self.processes.map(tasks)) as results:
            for seed, (_, result) in zip(seeds, results, strict=True):
                if isinstance(result, Died):
                    result = SeedResult(_death(self.runner.scenario(seed), result))
                self._take(seed, result)
                self.tally.num_seeds += 1
                if on_progress is not None:
                    on_progress(self.tally.num_seeds, len(self.tally.failures))
                num_seeds = self.tally.num_seeds
                if self._num_timeouts == watchdog.MAX_TIMEOUTS and num_seeds < len(seeds):
                    end = f"ended after {num_seeds} of {len(seeds)} seeds"
                    self.tally.notes.append(f"{end}: hooks do not return")
                    return
                has_failed = bool(self.tally.failures) and self.tally.failures[-1].seed == seed
                if has_failed and not self.goes_on(self.tally.failures[-1].filed_under):
                    return

    def _take(self, seed: int, ended: SeedResult) -> None:
        self.tally.code.add(ended.lines)
        result = ended.result
        if result is None:
            self.tally.coverage["refused geometries"] += 1
            return
        self.tally.coverage.update(result.coverage)
        fails = any(map(result.coverage.get, FAILED_BY_THEMSELVES.values()))
        if self._fails_alone is None and fails:
            self._fails_alone = result.scenario
        if ended.note:
            self.tally.of_chance.append(ended.note)
        if result.failure is None:
            return
        self._num_timeouts += result.failure.is_timeout
        failure = self._to_failure(seed, result, ended.is_repeatable)
        known = {one.filed_under for one in self.tally.failures}
        if ended.may_shrink and failure.filed_under not in known:
            self._to_shrink.append(len(self.tally.failures))
        self.tally.failures.append(failure)

    def _find_first_error(self) -> None:
        """Find the exception behind the first job that failed without an injected failure."""
        if self._fails_alone is not None:
            self.tally.first_error = self._first_error_in(self._fails_alone)

    def _first_error_in(self, scenario: Scenario) -> str:
        """Return the exception behind the first job that fails in a run, or an empty text."""
        task = Task(SeedRunner.first_error, (scenario,))
        _, error = next(self.processes.map([task]))
        return "" if isinstance(error, Died) else error

    def _shrink_failures(self) -> None:
        """Shrink the first failure of each law."""
        for place in self._to_shrink:
            found = self.tally.failures[place]
            # Only a second run with other request ids shows that CONN-5 is broken.
            plays = SeedRunner.simulate_both if found.law == "CONN-5" else SeedRunner.simulate
            smallest = self._shrink(found, place, plays)
            if smallest.failure is None or smallest.failure.law != found.law:
                self.tally.failures[place] = found

    def _shrink(self, found: ConnectorFailure, place: int, simulate: Simulate) -> SimulationResult:
        """Shrink a failure, and find whether the engine is the cause of its smallest run.

        Args:
            found: The failure.
            place: Its index.
            simulate: The method of the runner that runs the candidates.

        Returns:
            The smallest run; its law is ``ENGINE`` if it also fails without the connector.
        """
        assert found.result is not None, "simulated runs have results"
        most = min(self.max_shrink_runs, self._shrink_runs_left)
        shrinker = Shrinker(found.result, partial(self._run_all, simulate), most)
        try:
            shrinker.shrink()
        finally:  # so that the smallest run so far is reported after Ctrl-C
            self._shrink_runs_left -= most - shrinker.runs_left
            self.tally.failures[place] = self._to_failure(found.seed, shrinker.best, True)
        smallest = shrinker.best
        if smallest is not found.result:
            task = Task(SeedRunner.blame_engine, (smallest,))
            _, ended = next(self.processes.map([task]))
            smallest = _death(smallest.scenario, ended) if isinstance(ended, Died) else ended
            self.tally.failures[place] = self._to_failure(found.seed, smallest, True)
        return smallest

    def _explain(self) -> None:
        """Add the exception that may be the cause to the first CONN-3 failure.

        A thread pool catches the exceptions of its tasks, so no hook and no thread raises them.
        """
        for place, failure in enumerate(self.tally.failures):
            if failure.filed_under == "CONN-3" and failure.result is not None:
                if error := self._first_error_in(failure.result.scenario):
                    message = f"{failure.message}. The first exception in its code: {error}"
                    self.tally.failures[place] = replace(failure, message=message)
                return

    def _run_all(
        self, simulate: Simulate, scenarios: Iterable[Scenario]
    ) -> Generator[tuple[Scenario, SimulationResult], None, None]:
        tasks = (Task(simulate, (scenario,)) for scenario in scenarios)
        with closing(self.processes.map(tasks)) as results:
            for task, result in results:
                (scenario,) = task.arguments
                yield scenario, _death(scenario, result) if isinstance(result, Died) else result

    def _to_failure(
        self, seed: int, result: SimulationResult, is_repeatable: bool
    ) -> ConnectorFailure:
        failure = result.failure
        assert failure is not None, "only failures are reported"
        script = to_script(
            self.connector_class,
            result.scenario,
            self.options,
            f"seed {seed}: {failure}",
            self.engines,
            times=1 if is_repeatable else _TRIES,
        )
        law, message = failure.law, failure.message
        filed_under = EXCEPTIONS if failure.is_hook_error else law
        return ConnectorFailure(
            seed, law, message, script, filed_under, failure.hint, failure.log, result
        )


def _death(scenario: Scenario, died: Died) -> SimulationResult:
    message = f"the process that ran the connector died {died.how}: a crash in one of its hooks"
    failure = Failure("CONN-3", message, 0, len(scenario.events))
    return SimulationResult(scenario, failure, ())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use torch without its threads, which for small pages cost more time than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
