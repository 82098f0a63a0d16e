"""One simulated run: an engine, a connector, a scenario, and invariants after every step."""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn

from kvview import (
    ConfigError,
    Connector,
    ConnectorConfig,
    ConnectorError,
    HookError,
    OffloadKey,
    PinBudgetExceeded,
    SchedulerConnector,
    WorkerConnector,
)
from kvview.connector.hook_errors import build_connector
from kvview.targets import is_engine_connector
from kvview.testing import watchdog
from kvview.testing.connector.aging import (
    FEWEST_LAPS,
    failure_at_the_end,
    is_end_of_third,
    kept_bytes,
    line_of_allocations,
    with_laps_compared,
)
from kvview.testing.connector.as_it_is import AsItIsWorker
from kvview.testing.connector.configure import configure, is_of_size
from kvview.testing.connector.coverage import (
    FAILED_BY_THEMSELVES,
    LOADS_LEFT_ALONE,
    OF_THEIR_OWN_SIZE,
    WITH_A_FULL_TIER,
    seeds_of,
)
from kvview.testing.connector.fates import Fates
from kvview.testing.connector.faults import FaultyWorker, Pool
from kvview.testing.connector.harness import (
    ConnectorHarness,
    EngineFactory,
    load_engines,
    own_runs,
)
from kvview.testing.connector.hook_calls import hook, make_worker, require_type
from kvview.testing.connector.invariants import (
    EndedLoudly,
    InvariantBroken,
    check_bytes,
    check_conservation,
    check_drained,
    check_free_list,
)
from kvview.testing.connector.jumping_clock import jumping_clock
from kvview.testing.connector.process import RemoteWorker, can_fork
from kvview.testing.connector.result import Failure, SimulationResult, Snapshot
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
)
from kvview.testing.connector.stream import StepStream
from kvview.testing.connector.thread_errors import noting_thread_errors, with_thread_error
from kvview.testing.connector.threads import ThreadWatch, leaves_threads
from kvview.testing.connector.watch import History, WatchedScheduler
from kvview.testing.placeholders import in_fresh_folders, is_in_bytes
from kvview.testing.yield_points import new_threads_yield_often

_STEPS_BEFORE_LOST = 12  # of the drain, until what is lost is reported
_MAX_STILL_STEPS = 80  # of the drain, in which nothing ends
_MAX_DRAIN_STEPS = 3000
_STEPS_TO_REST = 3  # until a reset that nothing stands in the way of is done
_STEPS_PER_LOOK_AT_KEYS = 8
_LONGEST_TIMELINE = 2000  # steps, the last ones
_HUGE_POOL = 1000  # blocks beyond which they are not all looked at in every step
_STEPS_PER_CHECK_OF_A_HUGE_POOL = 8
_FAMILIES_A_LAP = 1000
_SECONDS_A_LEASE_MAY_LAST = 7 * 24 * 3600.0


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
        connector_class: What to run: a kvview connector, or one of the engine's own kind.
        scenario: What happens.
        options: Of the connector. ``cpu_blocks`` and ``enable_events`` are added where
            it takes them.
        unique_ids: Whether a request id that comes again gets another name.
        engines: Builds the engine; the reference engine by default. What it can not
            play of the scenario is left out, and counted in the result's coverage.

    Raises:
        ConfigError: The connector refuses the options, one of them does not pickle, or
            the scenario has a size that no engine takes.
        HookError: The connector's constructor raised.
    """
    engines = engines or load_engines()
    if is_engine_connector(connector_class):
        own = own_runs(engines, connector_class)

        def play_own(scenario: Scenario) -> SimulationResult:
            return own.simulate_own(connector_class, scenario, dict(options or {}))

        return with_laps_compared(play_own(scenario), play_own)

    def play_once(scenario: Scenario) -> tuple[SimulationResult, list[str]]:
        given = dict(options or {})
        with in_fresh_folders(given, scenario.num_connectors) as options_of_each:
            with watchdog.calling():  # the constructor
                run = Run(connector_class, scenario, options_of_each, unique_ids, engines)
            with (
                new_threads_yield_often() if scenario.threads_yield_often else nullcontext(),
                jumping_clock(connector_class, scenario.clock_jump),
                noting_thread_errors(),
            ):
                return with_thread_error(run.run()), run.threads_left

    def play(scenario: Scenario) -> tuple[SimulationResult, list[str]]:
        try:
            return play_once(scenario)
        except _BudgetIgnored:
            return play_once(replace(scenario, pin_budget=None))

    with watchdog.watching():
        result, left = play(scenario)
        result = with_laps_compared(result, lambda one: play(one)[0])
        if (
            left
            and result.failure is None
            and leaves_threads(connector_class, lambda: play(scenario)[1])
        ):
            failure = failure_at_the_end(
                result,
                "CONN-12",
                f"shutdown of the halves returned, and their threads {left} go on: end what was "
                f"started, and wait for it",
            )
            result = replace(result, failure=failure)
        return result


class _BudgetIgnored(Exception):
    """A hold that the pin budget refused ended a hook: no law obliges to ask before."""


def _is_refused_hold(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, PinBudgetExceeded):
        error = error.__cause__ or error.__context__
    return error is not None


class _Part(Connector):
    """A connector as the engine sees it: the real one, with both halves watched.

    1. Each half is made by an instance of its own, from an equal configuration that was
       pickled: what they share through ``self`` is not shared.
    2. The engine's calls to the scheduler half come through :class:`WatchedScheduler`, those
       to the worker half through :class:`FaultyWorker`.
    """

    def __init__(
        self,
        connector_class: type[Connector],
        config: bytes,
        scenario: Scenario,
        fates: Iterator[Fate],
        pool: Pool,
        stream: StepStream | None,
    ) -> None:
        super().__init__(ConnectorConfig(scenario.geometry))
        self.history = History(scenario.geometry)
        self.halves: list[SchedulerConnector | WorkerConnector] = []
        self._connector_class = connector_class
        self._config = config
        self._scenario = scenario
        self._fates = fates
        self._pool = pool
        self._stream = stream

    def make_scheduler(self) -> SchedulerConnector:
        with hook("make_scheduler", "CONN-1"):
            half = build_connector(
                self._connector_class, pickle.loads(self._config)
            ).make_scheduler()
        require_type("make_scheduler", half, "CONN-1")
        self.halves.append(half)
        self.scheduler = WatchedScheduler(half, self.history)
        return self.scheduler

    def make_worker(self) -> WorkerConnector:
        half: WorkerConnector
        if self._scenario.worker_half == "in_a_process":
            half = RemoteWorker(self._connector_class, self._config)
        else:
            half = make_worker(self._connector_class, self._config)
            self.halves.append(half)
        kind = AsItIsWorker if self._scenario.worker_half == "as_it_is" else FaultyWorker
        fate_of_load = self._scenario.fate_of_load
        self.worker = kind(half, self._fates, fate_of_load, self._pool, self.history, self._stream)
        return self.worker


class Run:
    """Builds the connectors and the engine, plays the scenario, and watches both."""

    def __init__(
        self,
        connector_class: type[Any],
        scenario: Scenario,
        options_of_each: Sequence[dict[str, Any]],
        unique_ids: bool,
        engines: EngineFactory,
    ) -> None:
        self.scenario, left_out = engines.fit(scenario)
        self._coverage = Counter(f"left out: {what}" for what in left_out)
        if self.scenario.worker_half == "in_a_process" and not can_fork():
            self.scenario = replace(self.scenario, worker_half="job_by_job")
            self._coverage["left out: a worker half in a process of its own, without fork"] += 1
        if self.scenario.worker_half != "job_by_job":
            self._coverage[f"with the worker half {self.scenario.worker_half}"] += 1
        self._coverage["with pages of different sizes"] += bool(self.scenario.group_pages)
        self._coverage.update(seeds_of(self.scenario))
        self._coverage["with two connectors"] += self.scenario.num_connectors > 1
        self._coverage["with an abrupt end"] += self.scenario.ends_abruptly
        self._coverage["with steps in flight"] += self.scenario.steps_in_flight > 1
        self._coverage["with lagging compute"] += self.scenario.compute_lags
        self._coverage["with a pin budget"] += self.scenario.pin_budget is not None
        self._engines = engines
        self._connector_class = connector_class
        self._name = connector_class.__name__
        self._stream = StepStream() if self.scenario.compute_lags else None
        self._parts: list[_Part] = []
        self._is_roomy = False
        self._fates = Fates(self.scenario)
        self._configure(connector_class, options_of_each)
        self._timeline: deque[Snapshot] = deque(maxlen=_LONGEST_TIMELINE)
        self._num_steps = 0
        self._loaded_by_lap: list[int] = []
        self._kept_bytes: list[int] = []
        self._allocated_at = ""
        self._seconds = 0.0
        self._num_begun = 0
        self._num_renamed = 0
        self._first_family = 0
        self._serial = 0  # what is generated in one lap is generated in the next
        self._unique_ids = unique_ids
        self._names: dict[str, str] = {}  # of requests in the scenario, to those in the engine
        self._names_of_lap: set[str] = set()
        self._num_wrong = 0
        self._engine: ConnectorHarness | None = None
        self._threads = ThreadWatch()
        self.threads_left: list[str] = []  # when all was shut down

    def _configure(
        self, connector_class: type[Any], options_of_each: Sequence[dict[str, Any]]
    ) -> None:
        # engines.fit may have left one connector of two
        configs = [
            configure(connector_class, self.scenario, options)
            for options in options_of_each[: self.scenario.num_connectors]
        ]
        given = pickle.loads(configs[0]).options
        knows_size = is_of_size(given, self.scenario, options_of_each[0])
        self._coverage[OF_THEIR_OWN_SIZE] += not knows_size and self.scenario.cpu_blocks > 0
        knows_blocks = knows_size and not is_in_bytes(options_of_each[0])
        self._is_roomy = self.scenario.is_roomy and knows_blocks
        part_class = type(self._name, (_Part,), {})  # reports name the connector
        self._parts += [
            part_class(connector_class, config, self.scenario, self._fates, self, self._stream)
            for config in configs
        ]

    def _build_engine(self) -> ConnectorHarness:
        return self._engines.build(
            self.scenario,
            self._parts,
            owner=self._name,
            clock=lambda: self._seconds,
            stream=self._stream,
        )

    # --- what the worker's wrapper asks ---

    def is_free(self, block_id: int) -> bool:
        """Whether nobody refers to a block."""
        return self.engine.ref_count(block_id) == 0

    def is_held(self, block_id: int) -> bool:
        """Whether a view holds it."""
        return block_id in self.engine.held_blocks()

    def hashes(self, block_id: int) -> tuple[OffloadKey, ...]:
        """What a block holds."""
        return self.engine.block_keys([block_id])[0]

    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        """Per block of a request that loads, what must come into it."""
        return self.engine.expected_keys(request_id)

    def blocks_to_load(self) -> set[int]:
        """What loads in flight write, whichever connector's they are."""
        return {block for worker in self._workers for block in worker.blocks_to_load()}

    @property
    def engine(self) -> ConnectorHarness:
        """The engine, once it is built."""
        assert self._engine is not None, "the engine is built by run()"
        return self._engine

    @property
    def _workers(self) -> list[FaultyWorker]:
        return [part.worker for part in self._parts]

    @property
    def _num_in_flight(self) -> int:
        """Jobs that are not reported yet."""
        return sum(worker.num_in_flight for worker in self._workers)

    def _expiring_blocks(self) -> Counter[int]:
        """References of leases that end by themselves."""
        parts = (part.scheduler.expiring_blocks() for part in self._parts)
        return sum(parts, Counter())

    # --- the run ---

    def run(self) -> SimulationResult:
        """Play the scenario to its end, or to the first law that is broken."""
        failure = None
        try:
            self._engine = self._build_engine()
            for lap in range(self.scenario.laps):
                self._play_lap(lap)
            self._allocated_at = line_of_allocations(self._connector_class)
            self._coverage["steady runs"] += self.scenario.laps >= FEWEST_LAPS
            if not self.scenario.ends_abruptly:
                self._drain()
                self._check_skipped()
                self._reset_at_rest()
            self._shutdown()
            self.threads_left = self._threads.left()
        except EndedLoudly:
            self._coverage["ended by a copy that failed"] += 1
        except InvariantBroken as broken:
            self._raise_ignored_budget(broken)
            failure = replace(
                self._failure(broken.law, broken.message),
                is_timeout=broken.is_timeout,
                is_hook_error=broken.is_hook_error,
            )
        except ConnectorError as error:
            self._raise_ignored_budget(error)
            law, colon, message = str(error).partition(": ")
            is_law = bool(colon) and law.startswith("CONN-")
            failure = self._failure(*((law, message) if is_law else ("CONN-3", str(error))))
            failure = replace(failure, is_hook_error=isinstance(error, HookError))
        finally:
            if self._stream is not None:
                self._stream.finish()  # a worker's threads wait for it
            if self._engine is not None:
                for worker in self._workers:
                    with suppress(InvariantBroken):  # threads and memory, whatever happened
                        worker.shutdown()
        is_left_alone = all(fate.outcome == "ok" for fate in self.scenario.fates)
        for part in self._parts:
            seen = part.history.coverage
            self._coverage.update(seen)
            if is_left_alone:
                self._coverage[LOADS_LEFT_ALONE] += seen["loads"] + seen["failed loads"]
                self._coverage[FAILED_BY_THEMSELVES] += seen["failed loads"]
        self._coverage[WITH_A_FULL_TIER] += any(part.history.was_full for part in self._parts)
        if self._engine is not None:
            stats = self.engine.stats
            for name in ("requests", "preemptions", "steps"):
                self._coverage[name] = getattr(stats, name)
        return SimulationResult(
            self.scenario,
            failure,
            tuple(self._timeline),
            dict(self._coverage),
            self._lap_loads,
            tuple(self._kept_bytes),
            self._allocated_at,
        )

    def _raise_ignored_budget(self, error: Exception) -> None:
        if self.scenario.pin_budget is None or not _is_refused_hold(error):
            return
        if not any(part.scheduler.asks_for_budget for part in self._parts):
            raise _BudgetIgnored from error

    def _play_lap(self, lap: int) -> None:
        numbered = self.scenario.first_lap + lap
        self._fates.begin_lap(numbered)
        self._first_family = numbered % self.scenario.laps_until_again * _FAMILIES_A_LAP
        # An id that comes again finds what was remembered by it, over a reset for example, and
        # hides what was left under it.
        if not any(isinstance(event, Reset) for event in self.scenario.events):
            self._names_of_lap.clear()
        for number, event in enumerate(self.scenario.events, 1):
            self._num_begun = max(self._num_begun, number)
            self._serial = number
            if self._is_last(lap, number) and self.scenario.ends_abruptly:
                for worker in self._workers:
                    worker.hold()
            self._play(event)
        self._loaded_by_lap.append(self._num_tokens_loaded())
        if is_end_of_third(self.scenario.laps, lap):
            halves = (half for part in self._parts for half in part.halves)
            self._kept_bytes.append(kept_bytes(halves))

    def _is_last(self, lap: int, number: int) -> bool:
        return lap == self.scenario.laps - 1 and number == len(self.scenario.events)

    def _num_tokens_loaded(self) -> int:
        return sum(part.history.num_tokens_to_load for part in self._parts)

    @property
    def _lap_loads(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in pairwise([0, *self._loaded_by_lap]))

    def _failure(self, law: str, message: str) -> Failure:
        parts = [part for part in self._parts if hasattr(part, "worker")]
        if jobs := [job for part in parts for job in part.worker.not_waited_for]:
            message += (
                f". Jobs {jobs[:5]} were still going on when wait of the worker half had "
                f"returned: it has to block until they have ended, and what is told here may "
                f"follow from that"
            )
        return Failure(law, message, self._num_steps, self._num_begun)

    def _play(self, event: Event) -> None:
        match event:
            case Add():
                self._add(event)
            case Abort(request_id):
                self._abort(self._names.get(request_id, request_id))
            case AbortLoading():
                unfinished = self.engine.unfinished()
                if loading := next((r for r, s in unfinished.items() if s == "loading"), None):
                    self._abort(loading)
            case Step(count):
                for _ in range(count):
                    self._step()
            case Squeeze(num_blocks):
                self.engine.squeeze(num_blocks)
            case Alias():
                self._coverage["second hashes"] += self.engine.alias()
            case Reset(after_reports):
                self._reset(after_reports)

    def _add(self, add: Add) -> None:
        name = self._names.get(add.request_id)
        unfinished = self.engine.unfinished()
        if name in unfinished:
            return
        if add.continues is not None:
            before = self._names.get(add.continues)
            if before is None or before in unfinished:
                return
            add = replace(add, continues=before)
        is_again = name in self._names_of_lap
        if name is None or not is_again or self._unique_ids:
            self._num_renamed += 1
            is_first = name is None and not self._loaded_by_lap
            name = add.request_id if is_first else f"{add.request_id}.{self._num_renamed}"
        self._names[add.request_id] = name
        self._names_of_lap.add(name)
        # One that can never fit is none that an engine would queue.
        with suppress(ConfigError):
            family = self._first_family + add.family
            self.engine.add(replace(add, request_id=name, family=family), self._serial)
            self._coverage["ids again"] += is_again
            self._coverage["next turns"] += add.continues is not None

    def _abort(self, request_id: str) -> None:
        status = self.engine.unfinished().get(request_id)
        if status is not None:
            self._coverage[f"aborted {status}"] += 1
            self.engine.abort(request_id)
            self._check()

    def _step(self) -> None:
        self._seconds += 1.0
        self.engine.step()
        self._check(is_step=True)

    def _reset(self, after_reports: bool = False) -> bool:
        self._coverage["resets with jobs in flight"] += bool(self._num_in_flight)
        was_reset = self.engine.reset(after_reports=after_reports)
        self._coverage["resets"] += was_reset
        self._check()
        return was_reset

    def _reset_at_rest(self) -> None:
        """Reset once more; who refuses is given some steps, and asked again."""
        for part in self._parts:
            part.scheduler.has_refused_reset = False
        was_reset = self._reset()
        for _ in range(_STEPS_TO_REST):
            if not any(part.scheduler.has_refused_reset for part in self._parts):
                break
            self._step()
            was_reset = self._reset()
        else:
            self._raise_refuses()
        if self._parts and not was_reset:
            raise InvariantBroken(
                "ENGINE", "no block is in use, and the engine does not reset its prefix cache"
            )

    def _raise_refuses(self) -> NoReturn:
        raise InvariantBroken(
            "CONN-11",
            f"reset_cache refuses for ever: no job was in flight and no request there, and it was "
            f"asked {_STEPS_TO_REST + 1} times. What was offloaded by a model that is no more "
            f"stays loadable",
        )

    def _drain(self) -> None:
        """Let everything come to its end."""
        self._play(Squeeze(0))
        still, ended, has_waited = 0, -1, False
        for number in range(_MAX_DRAIN_STEPS):
            if not self.engine.has_work():
                self._check_asleep()
                if not self._num_in_flight:
                    break
            if number >= _STEPS_BEFORE_LOST:
                for worker in self._workers:
                    worker.release_lost()
            self._step()
            stats = self.engine.stats
            before, ended = ended, stats.finished + stats.aborted
            ended += sum(worker.num_reported for worker in self._workers)
            still = still + 1 if ended == before else 0
            has_waited &= still > 0
            if still > _MAX_STILL_STEPS:
                if has_waited or not self._expiring_blocks():
                    self._raise_stuck()
                self._seconds += _SECONDS_A_LEASE_MAY_LAST
                still, has_waited = 0, True
        else:
            raise InvariantBroken(
                "CONN-3", f"the connector still starts jobs after {_MAX_DRAIN_STEPS} idle steps"
            )
        if self.engine.held_blocks():
            self._seconds += _SECONDS_A_LEASE_MAY_LAST
            for _ in range(3):
                self._step()
        check_drained(self.engine.held_blocks(), "when everything has ended")

    def _check_asleep(self) -> None:
        """An engine without work does not step: a store in flight is not heard of."""
        held = Counter(self.engine.held_blocks()) - self._expiring_blocks()
        for worker in self._workers:
            for job_id, blocks in worker.stores_in_flight():
                if kept := [block for block in blocks if block in held]:
                    raise InvariantBroken(
                        "CONN-3",
                        f"store job {job_id} is in flight and holds blocks {kept}, no request is "
                        f"there and has_pending_work is false: the engine steps no more, and "
                        f"they stay held",
                    )

    def _raise_stuck(self) -> None:
        if lost := [job for worker in self._workers for job in worker.unreported()]:
            raise InvariantBroken(
                "CONN-3",
                f"jobs {lost} were started and are never reported: get_finished of the worker half "
                f"returns a TransferResult for each, once",
            )
        held = self.engine.held_blocks()
        unfinished = self.engine.unfinished()
        if waiting := [request for request, status in unfinished.items() if status == "waiting"]:
            law, why = "CONN-4", "there is no room for them"
            if not held:
                law, why = "ENGINE", "match_prefix has answered"
                if any(part.scheduler.unanswered.intersection(waiting) for part in self._parts):
                    law, why = "CONN-2", "match_prefix never answers"
            raise InvariantBroken(
                law,
                f"requests {waiting} wait for ever: {why}, and the connector holds {len(held)} of "
                f"{self.engine.num_blocks - 1} blocks",
            )
        raise InvariantBroken(
            "CONN-3", "has_pending_work is true for ever, and nothing is in flight"
        )

    def _check_skipped(self) -> None:
        """Where nothing was ever short, there is no block that could not be stored."""
        for part in self._parts:
            num_skipped = part.scheduler.num_told_as_skipped
            if num_skipped and self._is_roomy:
                raise InvariantBroken(
                    "CONN-13",
                    f"num_skipped_blocks is {num_skipped!r}, and neither blocks nor pages of the "
                    f"tier were ever short, and no transfer failed: it counts what could have "
                    f"been stored and was not",
                )

    def _shutdown(self) -> None:
        left = self.engine.shutdown()
        check_drained(left, "after shutdown")
        for part in self._parts:  # callable twice
            part.scheduler.shutdown()
            part.worker.shutdown()

    # --- the invariants ---

    def _check(self, is_step: bool = False) -> None:
        engine = self.engine
        self._num_steps += is_step
        if engine.num_blocks > _HUGE_POOL and self._num_steps % _STEPS_PER_CHECK_OF_A_HUGE_POOL:
            self._check_halves()
            return
        held = engine.held_blocks()  # first: a look may end leases that are due
        refs = {block: engine.ref_count(block) for block in range(1, engine.num_blocks)}
        owned = engine.engine_refs()
        free = engine.free_block_ids()
        in_flight = self._num_in_flight
        num_held = len(held.keys() - owned.keys())
        if is_step:
            step = self._num_steps
            self._timeline.append(Snapshot(step, len(free), len(owned), num_held, in_flight))
        check_free_list(free, refs)
        check_conservation(refs, owned, held)
        self._check_halves()
        if is_step and self._num_steps % _STEPS_PER_LOOK_AT_KEYS == 0:
            keys = Counter(key for found in engine.block_keys(list(refs)) for key in found)
            has_doubles = max(keys.values(), default=0) > 1
            self._coverage["steps with one hash in two blocks"] += has_doubles

    def _check_halves(self) -> None:
        """What costs the same in a pool of any size."""
        engine = self.engine
        before, self._num_wrong = self._num_wrong, engine.stats.mismatches
        check_bytes(self._num_wrong, before)
        for part in self._parts:
            part.scheduler.fold_events()
            part.history.check()
