"""The execution of one seed of a connector: its run, and repetitions that confirm the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from kvview import CacheGeometry, ConfigError, ConnectorConfig
from kvview.connector.hook_errors import build_connector
from kvview.targets import is_engine_connector
from kvview.testing.connector.confirm import repeat
from kvview.testing.connector.confirm.first_error import first_error
from kvview.testing.connector.exercised.author_code import AuthorCode
from kvview.testing.connector.exercised.coverage import EVENTS_WANTED
from kvview.testing.connector.exercised.lines import Lines, LineTracer
from kvview.testing.connector.result import SimulationResult
from kvview.testing.connector.run.engine import EngineFactory, own_runs
from kvview.testing.connector.run.simulate import simulate
from kvview.testing.connector.scenario.generate import generate_scenario
from kvview.testing.connector.scenario.scenario import Scenario
from kvview.testing.placeholders import in_fresh_folders, in_size

_BLOCKS_TO_TRY = 1024


@dataclass(frozen=True)
class SeedResult:
    """The result of a seed.

    Args:
        result: The result of the run; None if the connector refuses the geometry.
        is_repeatable: Whether a second run of the seed, if there was one, had the same result.
        note: Note for the report, or empty.
        lines: Lines of the author's code that have run so far in the process that ran the seed;
            empty if not measured.
    """

    result: SimulationResult | None
    is_repeatable: bool = True
    note: str = ""
    lines: Lines = field(default_factory=dict)

    @property
    def may_shrink(self) -> bool:
        """Whether the failure can be shrunk, because it is repeatable and is not a timeout."""
        failure = None if self.result is None else self.result.failure
        if failure is None or failure.is_timeout or not self.is_repeatable:
            return False
        return failure.law != "ENGINE"


class SeedRunner:
    """Runs a connector through scenarios, which are generated from seeds or given.

    Args:
        connector_class: The connector.
        options: Options of the connector.
        engines: Builds the engines.
        steps: Minimum of scheduler steps in a run.
        scenarios: Scenarios of the seeds from 0 on, which are generated if there are none.
    """

    def __init__(
        self,
        connector_class: type[Any],
        options: Mapping[str, Any],
        engines: EngineFactory,
        steps: int,
        scenarios: Sequence[Scenario] = (),
    ) -> None:
        self._connector_class = connector_class
        self._options = dict(options)
        self._engines = engines
        self._steps = steps
        self._scenarios = scenarios
        self.code = AuthorCode(connector_class)
        self._tracer = LineTracer(self.code.paths)

    def scenario(self, seed: int) -> Scenario:
        """Return or make the scenario of a seed."""
        return self._scenarios[seed] if self._scenarios else generate_scenario(seed, self._steps)

    def run_seed(self, seed: int, is_sample: bool, is_measured: bool = False) -> SeedResult:
        """Run a seed.

        Args:
            seed: Any whole number.
            is_sample: Whether to run the seed twice if its run is green, is short, and loads a
                block.
            is_measured: Whether to measure which lines of the author's code run.
        """
        scenario = self.scenario(seed)
        lines: Lines = {}
        # Runs in which threads yield at each line have their own tracer.
        if is_measured and not scenario.threads_yield_often:
            with self._tracer.measuring():
                ended = self._run_seed(scenario, seed, is_sample)
            lines = self._tracer.take()
        else:
            ended = self._run_seed(scenario, seed, is_sample)
        result = ended.result
        if result is not None and self._wants_events:
            result = replace(result, coverage={**result.coverage, EVENTS_WANTED: 1})
        return replace(ended, result=result, lines=lines)

    def _run_seed(self, scenario: Scenario, seed: int, is_sample: bool) -> SeedResult:
        try:
            result = self.simulate(scenario)
        except ConfigError:
            if not self._takes_one_group:
                raise
            return SeedResult(None)
        if result.failure is not None:
            return self._confirm(seed, result, scenario)
        note = ""
        if is_sample and scenario.rounds == 1 and result.coverage.get("loads"):
            note = self._chance(seed, result, self.simulate(scenario))
        if not note:
            return SeedResult(result)
        note = f"{note}. A seed of this connector replays nothing exactly"
        return SeedResult(result, is_repeatable=False, note=note)

    def _confirm(self, seed: int, result: SimulationResult, scenario: Scenario) -> SeedResult:
        """Repeat a failing run, and name chance, reused request ids or the engine as its cause.

        Args:
            seed: The seed of the run.
            result: The run.
            scenario: The scenario of the seed, of which the engine may have skipped parts.
        """
        assert result.failure is not None, "only failures are confirmed"
        if result.failure.is_timeout:
            return SeedResult(result)
        again = self.simulate(scenario)
        chance = self._chance(seed, result, again)
        # Otherwise chance decides, not the ids.
        if again.failure and not (chance and result.failure.law == "ENGINE"):
            result = self._with_reused_ids(result)
        if not chance:
            return SeedResult(self.blame_engine(result))
        failure = result.failure
        assert failure is not None, "the law changes, not the failure"
        failure = replace(failure, message=f"{failure.message}. This is {chance}")
        return SeedResult(replace(result, failure=failure), is_repeatable=False)

    @staticmethod
    def _chance(seed: int, result: SimulationResult, again: SimulationResult) -> str:
        differs = repeat.difference(result, again)
        return f"not deterministic: seed {seed} was run twice: {differs}" if differs else ""

    def first_error(self, scenario: Scenario) -> str:
        """Return the exception behind the first job that fails in a run, or an empty text."""
        if not self._is_own:  # only connectors of kvview have jobs of their own
            return ""
        alone = replace(scenario, worker_half="job_by_job")
        run = partial(simulate, self._connector_class, alone, self._options, engines=self._engines)
        return first_error(self.code.paths, run)

    def blame_engine(self, result: SimulationResult) -> SimulationResult:
        """Return a failing run; its law is ``ENGINE`` if it also fails without the connector."""
        if self._is_own:
            return result
        runs = own_runs(self._engines, self._connector_class)
        return runs.judge_own(self._connector_class, result, self._options)

    def simulate_both(self, scenario: Scenario) -> SimulationResult:
        """Run a scenario; a failure that only reused request ids cause breaks CONN-5."""
        return self._with_reused_ids(self.simulate(scenario))

    def simulate(self, scenario: Scenario, *, unique_ids: bool = False) -> SimulationResult:
        """Run a scenario once."""
        return simulate(
            self._connector_class,
            scenario,
            self._options,
            unique_ids=unique_ids,
            engines=self._engines,
        )

    def _with_reused_ids(self, result: SimulationResult) -> SimulationResult:
        """Return a failing run; its law is CONN-5 if the run is green with unique request ids."""
        failure = result.failure
        if failure is None or failure.is_timeout or not result.coverage.get("ids again"):
            return result
        first_rounds = min(result.scenario.rounds, len(result.loads_of_rounds) + 1)
        scenario = replace(result.scenario, rounds=first_rounds)
        if self.simulate(scenario, unique_ids=True).failure is not None:
            return result
        message = f"only when a request id is used again: {failure.law}: {failure.message}"
        return replace(result, failure=replace(failure, law="CONN-5", message=message, hint=None))

    @property
    def _is_own(self) -> bool:
        """Whether this is a kvview connector, not a connector for the engine's own interface."""
        return not is_engine_connector(self._connector_class)

    @cached_property
    def _wants_events(self) -> bool:
        """Whether the options enable events, or the connector accepts ``enable_events``."""
        if not self._is_own:
            return False
        return _asks_for_events(self._options) or (
            self._takes(enable_events=True) and not self._takes(no_such_option=True)
        )

    def _takes(self, **more: object) -> bool:
        """Whether the connector can be built if these options are added."""
        try:
            with in_fresh_folders({**self._options, **more}) as (options,):
                sized = in_size(options, _BLOCKS_TO_TRY, 1024)
                config = ConnectorConfig(CacheGeometry.single(4), sized)
                build_connector(self._connector_class, config)
        except ConfigError:
            return False
        return True

    @cached_property
    def _takes_one_group(self) -> bool:
        """Whether the connector refuses the geometry, not the options."""
        if not self._is_own:
            return False
        scenario = Scenario(CacheGeometry.single(4), num_gpu_blocks=8, events=())
        try:
            self.simulate(scenario)
        except ConfigError:
            return False
        return True


def _asks_for_events(options: object) -> bool:
    """Whether ``enable_events`` is set for the connector or a child connector."""
    if isinstance(options, Mapping):
        return options.get("enable_events") is True or _asks_for_events(list(options.values()))
    return isinstance(options, list | tuple) and any(map(_asks_for_events, options))
