"""Prove a connector in an engine: many seeds, faults, invariants, a small script.

    report = check_connector(MyConnector)
    assert report.is_clean, report.summary()

Each seed is a scenario (:mod:`~kvview.testing.connector.scenario`) with
transfers that are late, reordered, failed or lost
(:mod:`~kvview.testing.connector.faults`). The invariants are those of
:mod:`kvview.testing.connector.invariants`. The first failure is shrunk to a script.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvview import CacheGeometry, ConfigError, Connector, ConnectorConfig
from kvview.testing.connector.generate import generate_scenario
from kvview.testing.connector.harness import EngineFactory, load_engines
from kvview.testing.connector.result import (
    ConnectorFailure,
    ConnectorReport,
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

__all__ = [
    "Abort",
    "AbortLoading",
    "Add",
    "Alias",
    "ConnectorFailure",
    "ConnectorReport",
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
    connector_class: type[Connector],
    *,
    seeds: int = 200,
    first_seed: int = 0,
    steps: int = 0,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    max_shrink_runs: int = MAX_RUNS,
    engines: EngineFactory | None = None,
) -> ConnectorReport:
    """Run a connector through the scenarios of many seeds.

    Args:
        connector_class: What to check.
        seeds: How many.
        first_seed: The first of them.
        steps: Steps of each run, at least; 0 for about two hundred.
        options: Of the connector. ``cpu_blocks`` and ``enable_events`` are added where
            it takes them and they are not given.
        on_progress: Called after each seed with the number of seeds and of failures
            so far.
        max_shrink_runs: Runs to make the first failure smaller; 0 leaves it as it is.
        engines: Builds the engines; reference engines by default.

    Returns:
        What was found; after Ctrl-C, what was found until then.

    Raises:
        ConfigError: The connector refuses the options.
    """
    options = dict(options or {})
    engines = engines or load_engines()
    failures: list[ConnectorFailure] = []
    coverage: Counter[str] = Counter()
    num_seeds = 0
    is_interrupted = False
    start = time.perf_counter()
    try:
        for seed in range(first_seed, first_seed + seeds):
            try:
                result = _run(connector_class, generate_scenario(seed, steps), options, engines)
            except ConfigError:
                if not _takes_one_group(connector_class, options):
                    raise
                coverage["refused geometries"] += 1
                num_seeds += 1
                continue
            coverage.update(result.coverage)
            if result.failure is not None:
                max_runs = 0 if failures else max_shrink_runs
                failures.append(_explain(connector_class, seed, options, engines, result, max_runs))
            num_seeds += 1
            if on_progress is not None:
                on_progress(num_seeds, len(failures))
    except KeyboardInterrupt:
        is_interrupted = True
    seconds = time.perf_counter() - start
    return ConnectorReport(
        connector_class.__name__,
        first_seed,
        num_seeds,
        failures,
        seconds,
        dict(coverage),
        is_interrupted,
    )


def replay_seed(
    connector_class: type[Connector],
    seed: int,
    *,
    steps: int = 0,
    options: Mapping[str, Any] | None = None,
    max_shrink_runs: int = MAX_RUNS,
    engines: EngineFactory | None = None,
) -> ConnectorFailure | None:
    """Run one seed again, and make its failure smaller.

    Args:
        connector_class: What to check.
        seed: Of a failure.
        steps: As when it failed.
        options: As when it failed.
        max_shrink_runs: Runs to make it smaller; 0 leaves it as it is.
        engines: As when it failed.

    Returns:
        The failure, or None when there is none.
    """
    options = dict(options or {})
    engines = engines or load_engines()
    result = _run(connector_class, generate_scenario(seed, steps), options, engines)
    if result.failure is None:
        return None
    return _explain(connector_class, seed, options, engines, result, max_shrink_runs)


def _takes_one_group(connector_class: type[Connector], options: dict[str, Any]) -> bool:
    """Whether it is the geometry that a connector refuses, not the options."""
    try:
        connector_class(ConnectorConfig(CacheGeometry.single(4), options))
    except ConfigError:
        return False
    return True


def _run(
    connector_class: type[Connector],
    scenario: Scenario,
    options: dict[str, Any],
    engines: EngineFactory,
) -> SimulationResult:
    """Run, and find out whether it is the reuse of request ids that breaks the law (CONN-5)."""
    result = simulate(connector_class, scenario, options, engines=engines)
    failure = result.failure
    if failure is None or not result.coverage.get("ids again"):
        return result
    other = simulate(connector_class, result.scenario, options, unique_ids=True, engines=engines)
    if other.failure is not None:
        return result
    message = f"only when a request id is used again: {failure.law}: {failure.message}"
    return replace(result, failure=replace(failure, law="CONN-5", message=message))


def _explain(
    connector_class: type[Connector],
    seed: int,
    options: dict[str, Any],
    engines: EngineFactory,
    result: SimulationResult,
    max_runs: int,
) -> ConnectorFailure:
    result = shrink(
        result, lambda scenario: _run(connector_class, scenario, options, engines), max_runs
    )
    failure = result.failure
    assert failure is not None, "a shrunk run fails as well"
    comment = f"seed {seed}: {failure}"
    script = to_script(connector_class, result.scenario, options, comment, engines)
    return ConnectorFailure(seed, failure.law, failure.message, script, result)
