"""One simulated run: an engine, a connector, a scenario, and invariants after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvview import (
    ConfigError,
    Connector,
    ConnectorConfig,
    ConnectorError,
    OffloadKey,
    SchedulerConnector,
    WorkerConnector,
    make_offload_key,
)
from kvview.testing.invariants import (
    HoldWatch,
    InvariantBroken,
    check_bytes,
    check_conservation,
    check_drained,
    check_free_list,
)
from kvview_reference.engine import Engine
from kvview_reference.multi_connector import MultiScheduler, MultiWorker
from kvview_reference.pool import NULL_BLOCK_ID
from kvview_reference.request import Request, Status, chain_hashes
from kvview_reference.simulation_faults import FaultyWorker, hook
from kvview_reference.simulation_result import Failure, SimulationResult, Snapshot
from kvview_reference.simulation_scenario import (
    Abort,
    AbortLoading,
    Add,
    Alias,
    Event,
    Reset,
    Scenario,
    Squeeze,
    Step,
    make_request,
)
from kvview_reference.simulation_watch import FEWEST_CHANCES, Ledger, WatchedScheduler

PAGE_BYTES = 64
NUM_LAYERS = 2
_PATIENCE = 30  # steps that a block may be held for no job
_STEPS_BEFORE_LOST = 12  # of the drain, until what is lost is reported
_MAX_STILL_STEPS = 80  # of the drain, in which nothing ends
_MAX_DRAIN_STEPS = 3000
_SECONDS_A_LEASE_MAY_LAST = 7 * 24 * 3600.0


def simulate(
    connector_class: type[Connector],
    scenario: Scenario,
    options: Mapping[str, Any] | None = None,
    *,
    unique_ids: bool = False,
) -> SimulationResult:
    """Run a connector through a scenario; the same arguments give the same result.

    Args:
        connector_class: What to run.
        scenario: What happens.
        options: Of the connector. ``cpu_blocks`` and ``enable_events`` are added where
            it takes them.
        unique_ids: Whether a request id that comes again gets another name.

    Raises:
        ConfigError: The connector refuses the options, or the scenario has a size
            that no engine takes.
    """
    return _Run(connector_class, scenario, dict(options or {}), unique_ids).run()


def _build(
    connector_class: type[Connector], scenario: Scenario, options: dict[str, Any]
) -> tuple[Connector, bool]:
    """A connector, with the options it takes; whether it knows ``cpu_blocks``."""
    cpu_blocks = {"cpu_blocks": scenario.cpu_blocks}
    events = {"enable_events": True}
    for extra in ({**cpu_blocks, **events}, cpu_blocks, events):
        with suppress(ConfigError):
            config = ConnectorConfig(scenario.geometry, {**extra, **options})
            return connector_class(config), "cpu_blocks" in extra
    return connector_class(ConnectorConfig(scenario.geometry, options)), False


class _Run(Connector):
    """Is between the engine and the connector: builds its halves and watches both.

    The engine's calls to the scheduler half come through :class:`WatchedScheduler`, those to
    the worker half through :class:`FaultyWorker`.
    """

    def __init__(
        self,
        connector_class: type[Connector],
        scenario: Scenario,
        options: dict[str, Any],
        unique_ids: bool,
    ) -> None:
        super().__init__(ConnectorConfig(scenario.geometry))
        self.scenario = scenario
        self.geometry = scenario.geometry
        self.ledger = Ledger(scenario.geometry)
        self._name = connector_class.__name__
        self._children = []
        for _ in range(scenario.num_connectors):
            child, self._knows_cpu_blocks = _build(connector_class, scenario, options)
            self._children.append(child)
        self._watch = HoldWatch(_PATIENCE)
        self._timeline: list[Snapshot] = []
        self._squeezed: list[int] = []
        self._seconds = 0.0
        self._num_begun = 0
        self._num_added = 0
        self._unique_ids = unique_ids
        self._names: dict[str, str] = {}  # of requests in the scenario, to those in the engine
        self._num_aliases = 0
        self._num_wrong = 0
        self._engine: Engine | None = None

    # --- what the engine builds ---

    def make_scheduler(self) -> SchedulerConnector:
        with hook("make_scheduler", "CONN-1"):
            halves = [child.make_scheduler() for child in self._children]
        self.scheduler = WatchedScheduler(
            halves[0] if len(halves) == 1 else MultiScheduler(halves), self.ledger
        )
        return self.scheduler

    def make_worker(self) -> WorkerConnector:
        with hook("make_worker", "CONN-1"):
            halves = [child.make_worker() for child in self._children]
        fates = iter(self.scenario.fates)
        self.workers = [FaultyWorker(half, fates, self, self.ledger.on_reported) for half in halves]
        return self.workers[0] if len(halves) == 1 else MultiWorker(self.workers)

    # --- what the worker's wrapper asks ---

    def is_free(self, block_id: int) -> bool:
        return self.engine.kv_cache.pool.ref_cnt(block_id) == 0

    def hashes(self, block_id: int) -> tuple[OffloadKey, ...]:
        return self.engine.kv_cache.pool.block_hashes(block_id)

    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        request = self.engine.loading_request(request_id)
        expected: dict[int, OffloadKey] = {}
        if request is None:
            return expected
        for index, table in enumerate(self.engine.kv_cache.block_tables(request_id)):
            for number, block_id in enumerate(table):
                if block_id != NULL_BLOCK_ID:
                    position = self.geometry.block_hash_index(index, number)
                    expected[block_id] = make_offload_key(request.block_hashes[position], index)
        return expected

    @property
    def num_in_flight(self) -> int:
        """Jobs that are not reported yet."""
        return sum(worker.num_in_flight for worker in self.workers)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "the engine is built by run()"
        return self._engine

    # --- the run ---

    def run(self) -> SimulationResult:
        failure = None
        try:
            scenario = self.scenario
            self._engine = Engine(
                self.geometry,
                self,
                num_gpu_blocks=scenario.num_gpu_blocks,
                page_bytes=PAGE_BYTES,
                num_layers=NUM_LAYERS,
                max_running=scenario.max_running,
                max_tokens_per_step=scenario.max_tokens_per_step,
                decode_tokens=scenario.decode_tokens,
            )
            # Leases expire by steps, not by the clock of the machine.
            self.engine.view.now = lambda: self._seconds
            self.engine.view.owner = self._name
            for event in scenario.events:
                self._num_begun += 1
                self._play(event)
            if not scenario.ends_abruptly:
                self._drain()
                self._probe()
                self._reset(is_last=True)
            self._shutdown()
        except InvariantBroken as broken:
            failure = self._failure(broken.law, broken.message)
        except ConnectorError as error:
            law, colon, message = str(error).partition(": ")
            is_law = bool(colon) and law.startswith("CONN-")
            failure = self._failure(*((law, message) if is_law else ("CONN-3", str(error))))
        finally:
            if self._engine is not None:
                for worker in self.workers:
                    with suppress(InvariantBroken):  # threads and memory, whatever happened
                        worker.shutdown()
        if self._engine is not None:
            stats = self.engine.stats
            for name in ("requests", "preemptions", "steps"):
                self.ledger.coverage[name] = getattr(stats, name)
        return SimulationResult(
            self.scenario, failure, tuple(self._timeline), dict(self.ledger.coverage)
        )

    def _failure(self, law: str, message: str) -> Failure:
        return Failure(law, message, len(self._timeline), self._num_begun)

    def _play(self, event: Event) -> None:
        match event:
            case Add():
                self._add(event)
            case Abort(request_id):
                self._abort(self._names.get(request_id, request_id))
            case AbortLoading():
                loading = (r for r in self._unfinished().values() if r.status is Status.LOADING)
                if request := next(loading, None):
                    self._abort(request.request_id)
            case Step(count):
                for _ in range(count):
                    self._step()
            case Squeeze(num_blocks):
                pool = self.engine.kv_cache.pool
                pool.free_blocks(self._squeezed)
                self._squeezed = pool.allocate_blocks(min(num_blocks, pool.num_free_blocks()))
            case Alias():
                self._alias()
            case Reset():
                self._reset()

    def _unfinished(self) -> dict[str, Request]:
        requests = {r.request_id: r for r in (*self.engine.waiting, *self.engine.running)}
        for request_id in list(self.engine._loads):
            request = self.engine.loading_request(request_id)
            if request is not None and request.status is Status.LOADING:
                requests[request_id] = request
        return requests

    def _add(self, add: Add) -> None:
        name = self._names.get(add.request_id)
        if name in self._unfinished():
            return
        self._num_added += 1
        if name is not None:
            self.ledger.coverage["ids again"] += 1
        if name is None or self._unique_ids:
            name = f"{add.request_id}.{self._num_added}" if name else add.request_id
        self._names[add.request_id] = name
        add = replace(add, request_id=name)
        # One that can never fit is none that an engine would queue.
        with suppress(ConfigError):
            self.engine.add_request(make_request(add, self.geometry, self._num_added))

    def _abort(self, request_id: str) -> None:
        request = self._unfinished().get(request_id)
        if request is not None:
            self.ledger.coverage[f"aborted {request.status.name.lower()}"] += 1
            self.engine.abort(request_id)
            self._check()

    def _alias(self) -> None:
        for request in self.engine.running:
            for index, table in enumerate(self.engine.kv_cache.block_tables(request.request_id)):
                for block_id in table:
                    if block_id != NULL_BLOCK_ID and len(self.hashes(block_id)) == 1:
                        self._num_aliases += 1
                        self.engine.kv_cache.pool.cache_blocks(
                            [block_id],
                            chain_hashes([f"alias {self._num_aliases}"]),
                            group_idx=index,
                            block_size=self.geometry.groups[index].block_size,
                        )
                        return

    def _step(self) -> None:
        self._seconds += 1.0
        self.engine.step()
        self._check(is_step=True)

    def _reset(self, is_last: bool = False) -> None:
        if self.engine.reset_cache():
            self.ledger.coverage["resets"] += 1
            self.scheduler.fold_events()
            self.ledger.forget()
        self._check()

    def _drain(self) -> None:
        """Let everything come to its end."""
        self._play(Squeeze(0))
        still, ended = 0, -1
        for number in range(_MAX_DRAIN_STEPS):
            if not self.engine.has_work() and not self.num_in_flight:
                break
            if number >= _STEPS_BEFORE_LOST:
                for worker in self.workers:
                    worker.release_lost()
            self._step()
            stats = self.engine.stats
            before, ended = ended, stats.finished + stats.aborted
            ended += sum(worker.num_reported for worker in self.workers)
            still = still + 1 if ended == before else 0
            if still > _MAX_STILL_STEPS:
                self._raise_stuck()
        else:
            raise InvariantBroken(
                "CONN-3", f"the connector still starts jobs after {_MAX_DRAIN_STEPS} idle steps"
            )
        if self.engine.view.held_blocks():
            self._seconds += _SECONDS_A_LEASE_MAY_LAST
            for _ in range(3):
                self._step()
        check_drained(self.engine.view.held_blocks(), "when everything has ended")

    def _raise_stuck(self) -> None:
        engine = self.engine
        if lost := [job for worker in self.workers for job in worker.unreported()]:
            raise InvariantBroken("CONN-3", f"jobs {lost} were started and are never reported")
        held = engine.view.held_blocks()
        if waiting := [request.request_id for request in engine.waiting]:
            why = "match_prefix never answers" if not held else "there is no room for them"
            raise InvariantBroken(
                "CONN-4" if held else "CONN-2",
                f"requests {waiting} wait for ever: {why}, and the connector holds {len(held)} of "
                f"{engine.kv_cache.pool.num_blocks - 1} blocks",
            )
        raise InvariantBroken(
            "CONN-3", "has_pending_work is true for ever, and nothing is in flight"
        )

    def _probe(self) -> None:
        """Ask again for what was asked for, when none of it is on the GPU any more."""
        if not self.ledger.wants_chances:
            return
        longest: dict[int, Add] = {}
        for event in self.scenario.events:
            if isinstance(event, Add):
                known = longest.get(event.family)
                if known is None or known.num_prompt_tokens < event.num_prompt_tokens:
                    longest[event.family] = replace(event, num_output_tokens=0)
        for _ in range(FEWEST_CHANCES):
            for add in longest.values():
                self._play(Squeeze(self.scenario.num_gpu_blocks))
                self._play(Squeeze(0))
                self._add(add)
                self._drain()
        self.ledger.check_ever_hits(self.scenario.cpu_blocks if self._knows_cpu_blocks else 0)

    def _shutdown(self) -> None:
        engine = self.engine
        left = engine.shutdown()
        check_drained(left, "after shutdown")
        engine.scheduler_connector.shutdown()  # callable twice
        engine.worker_connector.shutdown()

    # --- the invariants ---

    def _check(self, is_step: bool = False) -> None:
        engine = self.engine
        pool = engine.kv_cache.pool
        refs = {block: pool.ref_cnt(block) for block in range(1, pool.num_blocks)}
        held = engine.view.held_blocks()
        owned = Counter(engine.held_blocks())
        owned.update(self._squeezed)
        in_flight = self.num_in_flight
        num_free = pool.num_free_blocks()
        num_held = len(held.keys() - owned.keys())
        if is_step:
            step = len(self._timeline) + 1
            self._timeline.append(Snapshot(step, num_free, len(owned), num_held, in_flight))
        check_free_list(pool.free_block_ids(), refs)
        check_conservation(refs, owned, held)
        before, self._num_wrong = self._num_wrong, engine.stats.mismatches
        check_bytes(self._num_wrong, before)
        self.scheduler.fold_events()
        self.ledger.check()
        if is_step:
            self._watch.check(len(self._timeline), held.keys(), in_flight)
