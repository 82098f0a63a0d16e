"""A simulated run of a connector in an engine, with a check of invariants after every step."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import cycle, pairwise
from random import Random
from typing import Any

from typing_extensions import override

from kvview import ConfigError, ConnectorError, HookError, PinBudgetExceeded
from kvview.targets import is_engine_connector
from kvview.testing.connector.exercised.coverage import (
    OF_THEIR_OWN_SIZE,
    WITH_A_FULL_TIER,
    seeds_of,
)
from kvview.testing.connector.half.connector import ConnectorInHarness
from kvview.testing.connector.half.process import can_fork
from kvview.testing.connector.half.worker import Shared
from kvview.testing.connector.judge.invariants import EndedLoudly, InvariantBroken, check_drained
from kvview.testing.connector.judge.threads import (
    ThreadWatch,
    leaves_threads,
    noting_thread_errors,
    with_thread_error,
)
from kvview.testing.connector.result import Failure, SimulationResult, failure_at_the_end
from kvview.testing.connector.run import drain
from kvview.testing.connector.run.compute_stream import StepStream
from kvview.testing.connector.run.configure import configure, end_before_start, is_of_size
from kvview.testing.connector.run.engine import (
    EngineFactory,
    SimulatedEngine,
    load_engines,
    own_runs,
)
from kvview.testing.connector.run.jumping_clock import jumping_clock
from kvview.testing.connector.run.long_runs import (
    FEWEST_ROUNDS,
    KeptObjects,
    confirms,
    with_rounds_compared,
)
from kvview.testing.connector.run.state import RunState
from kvview.testing.connector.scenario.scenario import (
    Abort,
    AbortLoading,
    Add,
    Event,
    Fate,
    HoldBlocks,
    Reset,
    Scenario,
    SecondHash,
    Step,
)
from kvview.testing.placeholders import in_fresh_folders, is_in_bytes
from kvview.testing.supervision import watchdog
from kvview.testing.supervision.yield_points import new_threads_yield_often

_KEYS = "requests with a LoRA adapter, a cache salt or images: kvview partition checks their keys"
_FAMILIES_PER_ROUND = 1000
_MUCH_LATER = 40  # steps until a long run reports a lost job


def simulate(
    connector_class: type[Any],
    scenario: Scenario,
    options: Mapping[str, Any] | None = None,
    *,
    unique_ids: bool = False,
    engines: EngineFactory | None = None,
) -> SimulationResult:
    """Run a connector through a scenario; the same arguments give the same result.

    Args:
        connector_class: A kvview connector, or a connector for the engine's own interface.
        scenario: The run.
        options: Options of the connector. ``cpu_blocks`` and ``enable_events`` are added if the
            connector has these options.
        unique_ids: Whether a reused request id is replaced by another id.
        engines: Builds the engine; the reference engine by default. Parts of the scenario that the
            engine cannot simulate are skipped, and counted in the result's coverage.

    Raises:
        ConfigError: The connector refuses the options, one of them does not pickle, or
            the scenario has a size that no engine accepts.
        HookError: The connector's constructor raised.
    """
    engines = engines or load_engines()
    given = dict(options or {})
    if is_engine_connector(connector_class):
        own = own_runs(engines, connector_class)

        def play_own(scenario: Scenario) -> SimulationResult:
            return own.simulate_own(connector_class, scenario, given)

        return with_rounds_compared(play_own(scenario), play_own)

    def play(scenario: Scenario) -> tuple[SimulationResult, list[str]]:
        return _play(connector_class, scenario, given, unique_ids, engines)

    with watchdog.watching():
        result, threads = play(scenario)
        result = with_rounds_compared(result, lambda one: play(one)[0])
        if not threads or result.failure is not None:
            return result
        if leaves_threads(connector_class, lambda: play(scenario)[1]):
            failure = failure_at_the_end(
                result,
                "CONN-12",
                f"shutdown of the halves returned, and their threads {threads} still run: end "
                f"the threads that a half has started, and wait for them",
            )
            result = replace(result, failure=failure)
        return result


def _play(
    connector_class: type[Any],
    scenario: Scenario,
    options: Mapping[str, Any],
    unique_ids: bool,
    engines: EngineFactory,
) -> tuple[SimulationResult, list[str]]:
    """Run a scenario; returns the result, and the names of threads that the halves left."""
    try:
        with in_fresh_folders(options, scenario.num_connectors) as options_of_each:
            with watchdog.calling():  # the call of the constructor
                run = Run(connector_class, scenario, options_of_each, unique_ids, engines)
            with (
                new_threads_yield_often() if scenario.threads_yield_often else nullcontext(),
                jumping_clock(connector_class, scenario.clock_jump),
                noting_thread_errors(),
            ):
                return with_thread_error(run.run()), run.threads_left
    except _BudgetIgnored:
        without = replace(scenario, pin_budget=None)
        return _play(connector_class, without, options, unique_ids, engines)


class _BudgetIgnored(Exception):
    """A connector that never queried its pin budget has exceeded the budget."""


class Run:
    """A run, which builds the connectors and the engine, plays the scenario, and makes the result.

    Args:
        connector_class: The connector.
        scenario: The scenario; parts that the engine cannot simulate are skipped.
        options_of_each: Options of each instance of the connector.
        unique_ids: Whether a reused request id is replaced by another id.
        engines: Builds the engine.
    """

    def __init__(
        self,
        connector_class: type[Any],
        scenario: Scenario,
        options_of_each: Sequence[dict[str, Any]],
        unique_ids: bool,
        engines: EngineFactory,
    ) -> None:
        self.scenario, left_out = engines.fit(scenario)
        self.coverage = Counter(f"left out: {part}" for part in (*left_out, _KEYS))
        if self.scenario.worker_half == "in_a_process" and not can_fork():
            self.scenario = replace(self.scenario, worker_half="job_by_job")
            self.coverage["left out: a worker half in a separate process, without fork"] += 1
        self.coverage.update(seeds_of(self.scenario))
        self.stage = RunState(self.coverage)
        self.threads_left: list[str] = []
        """Names of the threads that the halves left after the shutdown."""
        self._engines = engines
        self._connector_class = connector_class
        self._stream = StepStream() if self.scenario.compute_lags else None
        self._is_roomy = False
        self._fates = Fates(self.scenario)
        self._events = EventPlayer(self.stage, self.scenario, unique_ids=unique_ids)
        self._loaded: list[int] = []  # number of loaded tokens so far, at the end of each round
        self._memory = KeptObjects(self.scenario.rounds, confirms=confirms(self.scenario))
        self._config: bytes | None = None  # of a connector that the run itself builds
        self._configure(connector_class, options_of_each)
        # Created here, after the halves that were only built to test the options.
        self._threads = ThreadWatch()

    def _configure(
        self, connector_class: type[Any], options_of_each: Sequence[dict[str, Any]]
    ) -> None:
        scenario = self.scenario
        configs = [  # engines.fit may have removed one of two connectors
            configure(connector_class, scenario, options)
            for options in options_of_each[: scenario.num_connectors]
        ]
        given = pickle.loads(configs[0]).options
        knows_size = is_of_size(given, scenario, options_of_each[0])
        self.coverage[OF_THEIR_OWN_SIZE] += not knows_size and scenario.cpu_blocks > 0
        self._is_roomy = scenario.is_roomy and knows_size and not is_in_bytes(options_of_each[0])
        self._config = configs[0]
        # Reports name the connector by its class.
        part_class = type(connector_class.__name__, (ConnectorInHarness,), {})
        shared = Shared(
            scenario,
            self._fates,
            engine=lambda: self.stage.engine,
            blocks_to_load=self.stage.blocks_to_load,
            stream=self._stream,
            log=self.stage.log,
        )
        self.stage.parts += [part_class(connector_class, config, shared) for config in configs]

    def _build_engine(self) -> SimulatedEngine:
        return self._engines.build(
            self.scenario,
            self.stage.parts,
            owner=self._connector_class.__name__,
            stream=self._stream,
        )

    def run(self) -> SimulationResult:
        """Play the scenario to its end, or to the first law that is broken."""
        failure = None
        try:
            self.stage.built = self._build_engine()
            self._play()
        except EndedLoudly:
            self.coverage["ended by a copy that failed"] += 1
        except (InvariantBroken, ConnectorError) as error:
            self._raise_ignored_budget(error)
            failure = self._failure(error)
        finally:
            self._stop_workers()
        return self._result(failure)

    def _play(self) -> None:
        for place in range(self.scenario.rounds):
            self._play_round(place)
            if self._memory.refutes:
                break
        self.coverage["steady runs"] += self.scenario.rounds >= FEWEST_ROUNDS
        if not self.scenario.ends_abruptly:
            drain.drain(self.stage, self._raise_stuck)
            drain.check_skipped(self.stage, is_roomy=self._is_roomy)
            drain.reset_at_rest(self.stage)
        self._shutdown()
        if self.scenario.ends_abruptly and self._config is not None:
            end_before_start(self._connector_class, self._config)
        self.threads_left = self._threads.left()

    def _play_round(self, place: int) -> None:
        scenario = self.scenario
        number = scenario.first_round + place
        self._fates.begin_round(number)
        self._events.begin_round(number)
        is_last_round = place == scenario.rounds - 1
        for event_number, event in enumerate(scenario.events, 1):
            if scenario.ends_abruptly and is_last_round and event_number == len(scenario.events):
                for part in self.stage.parts:
                    part.workers[-1].hold()  # one of several ranks may have stopped by itself
            self._events.play(event_number, event)
        self._loaded.append(self._num_tokens_loaded())
        parts, most = self.stage.parts, scenario.cpu_blocks
        num_held = sum(min(len(part.record.keys.stored), most) for part in parts)
        halves = (half for part in parts for half in part.halves)
        ended = self._events.ids - self.stage.engine.unfinished().keys()
        self._memory.end_round(place, halves, num_held, ended)

    def _raise_stuck(self) -> None:
        drain.raise_stuck(self.stage)

    def _num_tokens_loaded(self) -> int:
        return sum(part.record.counts.num_tokens_to_load for part in self.stage.parts)

    def _shutdown(self) -> None:
        check_drained(self.stage.engine.shutdown(), "after shutdown", self.stage.touched_at)
        try:
            for part in self.stage.parts:
                part.scheduler.engine_calls.check_closed()
                part.scheduler.shutdown()
                for worker in part.workers:
                    worker.shutdown()
        except InvariantBroken as error:
            error.message = f"the second call of {error.message}"
            raise

    def _stop_workers(self) -> None:
        """Stop the threads of the run and free its memory, even after an error."""
        if self._stream is not None:
            self._stream.finish()  # threads of a worker half may wait for compute
        if self.stage.built is not None:
            for worker in self.stage.workers:
                with suppress(InvariantBroken):
                    worker.shutdown()

    # --- the result ---

    def _raise_ignored_budget(self, error: Exception) -> None:
        """Raise an error that repeats the run without a budget, because no law requires a query."""
        if self.scenario.pin_budget is None or not _is_refused_hold(error):
            return
        if not any(part.scheduler.asks_for_budget for part in self.stage.parts):
            raise _BudgetIgnored from error

    def _failure(self, error: InvariantBroken | ConnectorError) -> Failure:
        if isinstance(error, ConnectorError):
            law, colon, message = str(error).partition(": ")
            if not colon or not law.startswith("CONN-"):
                law, message = "CONN-3", str(error)
            error = InvariantBroken(law, message, is_hook_error=isinstance(error, HookError))
        return Failure(
            error.law,
            error.message,
            self.stage.num_steps,
            self._events.num_begun,
            is_timeout=error.is_timeout,
            is_hook_error=error.is_hook_error,
            hint=error.hint,
            log=self.stage.log.lines(),
        )

    def _result(self, failure: Failure | None) -> SimulationResult:
        for part in self.stage.parts:
            self.coverage.update(part.record.counts.coverage)
        self.coverage[WITH_A_FULL_TIER] += any(p.record.keys.was_full for p in self.stage.parts)
        if self.stage.built is not None:
            stats = self.stage.built.stats
            for name in ("requests", "preemptions", "steps"):
                self.coverage[name] = getattr(stats, name)
        return SimulationResult(
            self.scenario,
            failure,
            tuple(self.stage.timeline),
            dict(self.coverage),
            tuple(after - before for before, after in pairwise([0, *self._loaded])),
            tuple(self._memory.sizes),
            tuple(self._memory.requests),
            next((e for p in self.stage.parts if (e := p.record.counts.first_error)), ""),
        )


def _is_refused_hold(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, PinBudgetExceeded):
        error = error.__cause__ or error.__context__
    return error is not None


class EventPlayer:
    """Plays events on a stage.

    A request has a new id in each round, except within a round if the scenario reuses its id and
    ``unique_ids`` is False.

    Args:
        stage: The engine and its connectors.
        scenario: The run.
        unique_ids: Whether a reused request id is replaced by another id.
    """

    def __init__(self, stage: RunState, scenario: Scenario, *, unique_ids: bool) -> None:
        self._stage = stage
        self._scenario = scenario
        self._unique_ids = unique_ids
        self.num_begun = 0
        """Largest number of events that were started in one round."""
        self.ids: set[str] = set()
        """Ids of all requests in the engine, so far."""
        self._is_first_round = False
        self._first_family = 0
        self._num_renamed = 0
        self._names: dict[str, str] = {}  # from request ids of the scenario to ids in the engine
        self._names_of_round: set[str] = set()

    def begin_round(self, number: int) -> None:
        """Start a round with its own prompts."""
        self._is_first_round = number == self._scenario.first_round
        families = number % self._scenario.rounds_until_reuse
        self._first_family = families * _FAMILIES_PER_ROUND
        # With a reused id a connector finds its old entries, which hides that it kept them, so ids
        # are reused in every second round only.
        if number % 2 == 0:
            self._names_of_round.clear()

    def play(self, number: int, event: Event) -> None:
        """Play an event; ``number`` counts from 1."""
        stage = self._stage
        self.num_begun = max(self.num_begun, number)
        match event:
            case Add():
                self._add(event, number)
            case Abort(request_id):
                stage.abort(self._names.get(request_id, request_id))
            case AbortLoading():
                unfinished = stage.engine.unfinished()
                if loading := next((r for r, s in unfinished.items() if s == "loading"), None):
                    stage.abort(loading)
            case Step(count):
                for _ in range(count):
                    stage.step()
            case HoldBlocks(num_blocks):
                stage.engine.squeeze(num_blocks)
            case SecondHash():
                stage.coverage["second hashes"] += stage.engine.alias()
            case Reset(after_reports):
                stage.reset(after_reports=after_reports)

    def _add(self, add: Add, serial: int) -> None:
        """Queue a request; its generated tokens are the same in each round."""
        engine, coverage = self._stage.engine, self._stage.coverage
        name = self._names.get(add.request_id)
        unfinished = engine.unfinished()
        if name in unfinished:
            return
        if add.continues is not None:
            before = self._names.get(add.continues)
            if before is None or before in unfinished:
                return
            add = replace(add, continues=before)
        is_reused = name in self._names_of_round
        if name is None or not is_reused or self._unique_ids:
            self._num_renamed += 1
            is_first = name is None and self._is_first_round
            name = add.request_id if is_first else f"{add.request_id}.{self._num_renamed}"
        self._names[add.request_id] = name
        self._names_of_round.add(name)
        self.ids.add(name)
        with suppress(ConfigError):  # no engine queues a request that can never fit
            family = self._first_family + add.family
            engine.add(replace(add, request_id=name, family=family), serial)
            coverage["ids again"] += is_reused
            coverage["next turns"] += add.continues is not None


class Fates(Iterator[Fate]):
    """The fates of a run.

    Each round of a long run has its own order of fates, so that the faults of the rounds differ.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._fates = scenario.fates
        self._ahead = iter(scenario.fates)
        self._is_endless = scenario.rounds > 1 or scenario.first_round > 0
        if self._is_endless:
            self._fates = tuple(map(_reported_later, scenario.fates))

    def begin_round(self, number: int) -> None:
        """Start a round with its own order of fates."""
        if self._is_endless and self._fates:
            self._ahead = cycle(Random(number).sample(self._fates, len(self._fates)))

    @override
    def __next__(self) -> Fate:
        return next(self._ahead)


def _reported_later(fate: Fate) -> Fate:
    if not fate.is_lost:
        return fate
    return replace(fate, is_lost=False, report_after=fate.report_after + _MUCH_LATER)
