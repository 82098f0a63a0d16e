"""Prove a connector in an engine: many seeds, faults, invariants, a small script.

    report = check_connector(MyConnector)
    assert report.is_clean, report.summary()

Each seed is a scenario (:mod:`~kvview.testing.connector.scenario`) with
transfers that are late, reordered, failed or lost
(:mod:`~kvview.testing.connector.faults`). The invariants are those of
:mod:`kvview.testing.connector.invariants`. The first failure of each law is shrunk to a
script. :func:`kvview.testing.run_checks` says the same law by law.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from kvview import CacheGeometry, ConfigError, ConnectorConfig
from kvview.connector.raising import build_connector
from kvview.targets import is_engine_connector
from kvview.testing import watchdog
from kvview.testing.connector import repeat
from kvview.testing.connector.configure import configure
from kvview.testing.connector.coverage import EVENTS_WANTED, notes_on
from kvview.testing.connector.generate import generate_scenario
from kvview.testing.connector.harness import EngineFactory, load_engines, own_runs
from kvview.testing.connector.result import (
    ConnectorFailure,
    ConnectorRuns,
    Failure,
    SimulationResult,
    Snapshot,
)
from kvview.testing.connector.run import simulate
from kvview.testing.connector.scenario import (
    Abort,
    AbortLoading,
    Add,
    Alias,
    Event,
    Fate,
    Reset,
    Scenario,
    Squeeze,
    Step,
    to_script,
)
from kvview.testing.connector.shrink import MAX_RUNS, shrink
from kvview.testing.placeholders import in_fresh_folders, in_size

_MAX_TIMEOUTS = 2  # seeds whose hooks do not return: each costs all that a hook may take
_BLOCKS_TO_TRY = 1024
_SAMPLE = repeat.EVERY // 2
_MOST_SAMPLES = 25  # of green runs, to show a typical one
_TRIES = 50  # of a script, for what does not happen every time

__all__ = [
    "Abort",
    "AbortLoading",
    "Add",
    "Alias",
    "ConnectorFailure",
    "ConnectorRuns",
    "Event",
    "Failure",
    "Fate",
    "Reset",
    "Scenario",
    "SimulationResult",
    "Snapshot",
    "Squeeze",
    "Step",
    "check_connector",
    "generate_scenario",
    "load_engines",
    "replay_seed",
    "shrink",
    "simulate",
]


def check_connector(
    connector_class: type[Any],
    *,
    seeds: int = 200,
    first_seed: int = 0,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    max_shrink_runs: int = MAX_RUNS,
    engines: EngineFactory | None = None,
    steps: int | None = None,
    hook_seconds: float = watchdog.HOOK_SECONDS,
) -> ConnectorRuns:
    """Run a connector through the scenarios of many seeds.

    1. A seed that fails is run again: what does not give the same again is said so.
    2. The first failure of each law is shrunk.
    3. A hook that does not return ends its run; the second of them ends the check.

    Args:
        connector_class: What to check: a kvview connector, or one of the engine's own kind.
        seeds: How many.
        first_seed: The first of them.
        options: Of the connector. ``cpu_blocks`` and ``enable_events`` are added where
            it takes them and they are not given; ``{tmp}``, ``{blocks}`` and ``{bytes}`` in
            them are filled in (:mod:`~kvview.testing.placeholders`).
        on_progress: Called after each seed with the number of seeds and of failures
            so far.
        max_shrink_runs: Runs to make one failure smaller, and for all laws together twice
            as many; 0 leaves them as they are.
        engines: Builds the engines; reference engines by default.
        steps: Fewest scheduler steps of a run; None for what the scenarios say.
        hook_seconds: CPU seconds that one call of a hook may take
            (:mod:`~kvview.testing.watchdog`).

    Returns:
        What was found; after Ctrl-C, what was found until then.

    Raises:
        ConfigError: The connector refuses the options.
    """
    check = _Check(connector_class, dict(options or {}), engines or load_engines(), steps)
    check.max_shrink_runs, check.shrink_runs_left = max_shrink_runs, 2 * max_shrink_runs
    num_seeds = 0
    is_interrupted = False
    start = time.perf_counter()
    try:
        with watchdog.limit(hook_seconds):
            for seed in range(first_seed, first_seed + seeds):
                check.run(seed)
                num_seeds += 1
                if on_progress is not None:
                    on_progress(num_seeds, len(check.failures))
                if check.num_timeouts == _MAX_TIMEOUTS and num_seeds < seeds:
                    told = f"ended after {num_seeds} of {seeds} seeds: hooks do not return"
                    check.notes.append(told)
                    break
    except KeyboardInterrupt:
        is_interrupted = True
    check.notes += sorted(name for name in check.coverage if name.startswith("stands in"))
    check.notes += notes_on(check.coverage)
    return ConnectorRuns(
        connector_class.__name__,
        check.engines.name,
        first_seed,
        num_seeds,
        check.failures,
        time.perf_counter() - start,
        dict(check.coverage),
        is_interrupted,
        steps,
        check.notes,
        check.typical(),
    )


def replay_seed(
    connector_class: type[Any],
    seed: int,
    *,
    options: Mapping[str, Any] | None = None,
    max_shrink_runs: int = MAX_RUNS,
    engines: EngineFactory | None = None,
    steps: int | None = None,
) -> ConnectorFailure | None:
    """Run one seed again, and make its failure smaller.

    Args:
        connector_class: What to check: a kvview connector, or one of the engine's own kind.
        seed: Of a failure.
        options: As when it failed.
        max_shrink_runs: Runs to make it smaller; 0 leaves it as it is.
        engines: As when it failed.
        steps: As when it failed.

    Returns:
        The failure, or None when there is none.
    """
    check = _Check(connector_class, dict(options or {}), engines or load_engines(), steps)
    check.max_shrink_runs = check.shrink_runs_left = max_shrink_runs
    check.run(seed)
    return check.failures[0] if check.failures else None


def _asks_for_events(options: object) -> bool:
    """Whether ``enable_events`` is given, here or to a connector within."""
    if isinstance(options, Mapping):
        return options.get("enable_events") is True or _asks_for_events(list(options.values()))
    return isinstance(options, list | tuple) and any(map(_asks_for_events, options))


class _Check:
    """Seed after seed, and what came of them."""

    def __init__(
        self,
        connector_class: type[Any],
        options: dict[str, Any],
        engines: EngineFactory,
        steps: int | None,
    ) -> None:
        self.engines = engines
        self.failures: list[ConnectorFailure] = []
        self.coverage: Counter[str] = Counter()
        self.notes: list[str] = []
        self.num_timeouts = 0
        self.num_runs = 0
        self._num_with_loads = 0
        self._green: list[SimulationResult] = []
        self.max_shrink_runs = self.shrink_runs_left = 0
        self._connector_class = connector_class
        self._options = options
        self._steps = steps

    def typical(self) -> Sequence[Snapshot]:
        """Of a green run that loaded as often as most of those that loaded at all."""
        loads = [result for result in self._green if result.coverage.get("loads")]
        shown = sorted(loads or self._green, key=lambda result: result.coverage.get("loads", 0))
        return shown[len(shown) // 2].timeline if shown else ()

    def run(self, seed: int) -> None:
        """Run a seed; what fails is run twice, and a sample of the others."""
        scenario = generate_scenario(seed, self._steps or 0)
        try:
            result = self._simulate(scenario)
        except ConfigError:
            if not self._takes_one_group():
                raise
            self.coverage["refused geometries"] += 1
            return
        self.coverage.update(result.coverage)
        self.coverage.update([EVENTS_WANTED] * self._wants_events)
        failure = result.failure
        if failure is not None and failure.is_timeout:
            self.num_timeouts += 1
            self._add(seed, result, is_repeatable=True)
            return
        if failure is None:
            self._num_with_loads += bool(result.coverage.get("loads"))
            if len(self._green) < _MOST_SAMPLES:
                self._green.append(result)
            if not result.coverage.get("loads") or self._num_with_loads % repeat.EVERY != _SAMPLE:
                return
        differs = repeat.difference(result, self._simulate(scenario))
        if differs is not None:
            told = f"not deterministic: seed {seed} was run twice: {differs}"
            if failure is None:
                self.notes.append(f"{told}. A seed of this connector replays nothing exactly")
                return
            failure = replace(failure, message=f"{failure.message}. This is {told}")
            result = replace(result, failure=failure)
        if failure is not None:
            try:
                if differs is None:
                    result = self._shrunk(result) if self._is_own else self._judged(result)
            finally:  # what was found is told, when Ctrl-C ends the search for a smaller run
                self._add(seed, result, differs is None)

    @property
    def _is_own(self) -> bool:
        """Whether it is a connector of kvview, and not one of the engine's own kind."""
        return not is_engine_connector(self._connector_class)

    def _judged(self, result: SimulationResult) -> SimulationResult:
        """What fails without the connector too is not shrunk: it is not the connector's."""
        judge = own_runs(self.engines, self._connector_class).judge_own
        judged = judge(self._connector_class, result, self._options)
        assert judged.failure is not None, "a failure is judged, not mended"
        if judged.failure.law == "ENGINE" and judged.failure != result.failure:
            return judged
        shrunk = self._shrunk(result)
        if shrunk is result:
            return judged
        smaller = judge(self._connector_class, shrunk, self._options)
        return smaller if smaller.failure and smaller.failure.law == judged.failure.law else judged

    @cached_property
    def _wants_events(self) -> bool:
        """Whether events are asked for: by an option, or one that no other name will do for."""
        if not self._is_own:
            return False
        return _asks_for_events(self._options) or (
            self._takes(enable_events=True) and not self._takes(no_such_option=True)
        )

    def _takes(self, **more: object) -> bool:
        """Whether the connector can be built with these options too."""
        try:
            with in_fresh_folders({**self._options, **more}) as (options,):
                sized = in_size(options, _BLOCKS_TO_TRY, 1024)
                config = ConnectorConfig(CacheGeometry.single(4), sized)
                build_connector(self._connector_class, config)
        except ConfigError:
            return False
        return True

    def _takes_one_group(self) -> bool:
        """Whether it is the geometry that the connector refuses, not the options."""
        if not self._is_own:
            return False
        scenario = Scenario(CacheGeometry.single(4), num_gpu_blocks=8, events=())
        try:
            with in_fresh_folders(self._options) as (options,):
                configure(self._connector_class, scenario, options)
        except ConfigError:
            return False
        return True

    def _shrunk(self, result: SimulationResult) -> SimulationResult:
        assert result.failure is not None, "only what fails is shrunk"
        if any(failure.law == result.failure.law for failure in self.failures):
            return result
        left = min(self.max_shrink_runs, self.shrink_runs_left)
        before = self.num_runs
        result = shrink(result, self._simulate, left)
        self.shrink_runs_left -= self.num_runs - before
        return result

    def _add(self, seed: int, result: SimulationResult, is_repeatable: bool) -> None:
        failure = result.failure
        assert failure is not None, "only failures are added"
        script = to_script(
            self._connector_class,
            result.scenario,
            self._options,
            f"seed {seed}: {failure}",
            self.engines,
            times=1 if is_repeatable else _TRIES,
        )
        self.failures.append(ConnectorFailure(seed, failure.law, failure.message, script, result))

    def _simulate(self, scenario: Scenario) -> SimulationResult:
        """Run, and find out whether it is the reuse of request ids that breaks the law (CONN-5)."""
        self.num_runs += 1
        run = partial(simulate, self._connector_class, options=self._options, engines=self.engines)
        result = run(scenario)
        failure = result.failure
        if failure is None or failure.is_timeout or not result.coverage.get("ids again"):
            return result
        if run(result.scenario, unique_ids=True).failure is not None:
            return result
        message = f"only when a request id is used again: {failure.law}: {failure.message}"
        return replace(result, failure=replace(failure, law="CONN-5", message=message))
