"""The harness of handoffs: two engines with a connector in each, and a network between them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, runtime_checkable

from typing_extensions import override

from kvview import BlockIds, CacheGeometry, Connector, ConnectorConfig, StepPlan
from kvview.connector.hook_errors import build_connector
from kvview.errors import ConfigError
from kvview.handoff import Handoff, HandoffScheduler, HandoffWorker, Peer, Wire
from kvview.targets import is_engine_connector, require_connector
from kvview.testing.connector.run.engine import SimulatedEngine, load_engines
from kvview.testing.connector.scenario.scenario import Add, Scenario
from kvview.testing.handoff.network import FAULTS, Fault, Network
from kvview.testing.harness import Capability


class PDHarness(SimulatedEngine, Protocol):
    """A simulated engine in both roles of a handoff."""

    def add_prefill(self, add: Add, serial: int) -> None:
        """Queue a request whose KV is offered when the request has finished."""

    def add_decode(self, add: Add, serial: int, params: Mapping[str, Any]) -> None:
        """Queue a request with the parameters of a handoff."""

    def take_offered(self) -> Mapping[str, tuple[Mapping[str, Any], BlockIds]]:
        """Return the offers since the last call by request id: parameters and block table."""

    @property
    def num_loaded_blocks(self) -> int:
        """Return the number of blocks that requests have loaded."""

    def num_wrong_blocks(self) -> int:
        """Return the number of blocks that are cached or squeezed, and were changed by others."""


@dataclass(frozen=True)
class EngineLife:
    """One life of an engine that hands over KV.

    Args:
        me: Identity of this life.
        wires: The wire of each rank.
        clock: Returns the time in seconds.
        lease_seconds: Seconds for which an offer waits for its consumer.
    """

    me: Peer
    wires: Sequence[Wire]
    clock: Callable[[], float]
    lease_seconds: float


@runtime_checkable
class BuildsPDEngines(Protocol):
    """An engine factory that builds engines for handoffs."""

    def fit_for_handoffs(self, scenario: Scenario) -> Scenario:
        """Return the nearest scenario that two engines can simulate."""

    def build_for_handoffs(
        self, scenario: Scenario, connector: Connector, life: EngineLife
    ) -> PDHarness:
        """Build an engine that hands over KV.

        Args:
            scenario: Sizes of the engine.
            connector: The connector that the engine runs.
            life: Identity, wire and clock of the engine.
        """


@runtime_checkable
class BuildsOwnPDEngines(Protocol):
    """An engine factory that simulates handoffs with unmodified connectors of its engine."""

    def pair_of_own(self, connector_class: type, options: Mapping[str, Any]) -> TwoEngines:
        """Make two engines with an unmodified connector."""


@dataclass(frozen=True, eq=False)
class PDFactory:
    """Makes two engines with a connector.

    Args:
        made_of: The connector class.
        engine: Name of the engines.
        options: Options of the connector.
    """

    made_of: type
    engine: str = "reference"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        """Name of the connector class."""
        return self.made_of.__name__

    @property
    def made_by(self) -> str:
        """Return lines of a script that make the factory from ``factory``, the class."""
        place = "from kvview.testing.handoff.harness import PDFactory"
        return f"{place}\nfactory = PDFactory(factory, {self.engine!r}, {dict(self.options)!r})"

    @property
    def replaced(self) -> Sequence[str]:
        """Parts of the connector that are not checked, because the engines replace them."""
        return self().replaced

    def __call__(self) -> TwoEngines:
        """Return two engines that are not built yet."""
        if is_engine_connector(self.made_of):
            return _engines_of_own(self.engine).pair_of_own(self.made_of, self.options)
        return TwoEngines(self.made_of, _load(self.engine), self.options)


class _Idle(Connector):
    """A connector that offers and accepts no KV."""

    @override
    def make_scheduler(self) -> HandoffScheduler:
        return HandoffScheduler()

    @override
    def make_worker(self) -> HandoffWorker:
        return HandoffWorker()


@cache
def _load(name: str) -> BuildsPDEngines:
    """Load the factory of an engine, and try to build an engine, which may refuse handoffs."""
    engines = load_engines(name)
    if not isinstance(engines, BuildsPDEngines):
        raise ConfigError(f"engine {name!r} cannot simulate handoffs; use reference or vllm")
    scenario = engines.fit_for_handoffs(
        Scenario(CacheGeometry.single(4), num_gpu_blocks=4, events=())
    )
    TwoEngines(_Idle, engines, {}).start({"P": scenario}, Network(0, 1), 1.0)
    return engines


def _engines_of_own(name: str) -> BuildsOwnPDEngines:
    engines = load_engines(name)
    if not isinstance(engines, BuildsOwnPDEngines):
        raise ConfigError(f"engine {name!r} only runs kvview connectors; use --engine vllm")
    return engines


def pd_factory(
    target: object, engine: str | None = None, options: Mapping[str, Any] | None = None
) -> PDFactory:
    """Make the factory of a connector class, for ``run_checks`` and ``parametrize_with_checks``.

    Args:
        target: The connector class.
        engine: Name of the engines; None for the reference engine.
        options: Options of the connector.

    Raises:
        ConfigError: The target is not a connector, refuses the options, or its halves have no
            hooks for handoffs.
        UnsupportedEngineError: The installed release of the engine cannot simulate handoffs.
    """
    given = dict(options or {})
    if not is_engine_connector(target):
        target = require_handoff_connector(target, given)
    found = PDFactory(target, engine or "reference", given)  # type: ignore[arg-type]
    found()
    return found


def require_handoff_connector(target: object, options: Mapping[str, Any]) -> type[Connector]:
    """Refuse an object that is not a connector class with hooks for handoffs.

    Raises:
        ConfigError: As for :func:`pd_factory`.
    """
    name = getattr(target, "__qualname__", repr(target))
    connector_class = require_connector(target, name)
    config = ConnectorConfig(CacheGeometry.single(4), dict(options))
    halves = build_connector(connector_class, config)
    kinds = type(halves.make_scheduler()), type(halves.make_worker())
    if not issubclass(kinds[0], HandoffScheduler) or not issubclass(kinds[1], HandoffWorker):
        raise ConfigError(
            f"{connector_class.__qualname__} makes a {kinds[0].__name__} and a "
            f"{kinds[1].__name__}; a connector for handoffs makes a HandoffScheduler and a "
            f"HandoffWorker"
        )
    return connector_class


class TwoEngines:
    """Two engines with a network between them, which :meth:`start` makes.

    Args:
        connector_class: The connector.
        factory: Builds the engines.
        options: Options of the connector.
    """

    capabilities: frozenset[str] = frozenset({Capability.NAMES_THE_KV})
    faults: Sequence[Fault] = FAULTS
    """The faults of messages that the network plays."""
    names_are_unique = False
    """Whether no two requests of a run have the same id."""
    serves_itself = True
    """Whether an engine may consume its own handoffs."""
    renews_leases = False
    """Whether a consumer with the parameters may extend the lease."""
    laws_of_errors: Mapping[str, str] = dict.fromkeys(("CONN-3", "CONN-4", "POOL-4"), "HAND-3")
    """The laws that errors of an engine break, by the law that the engine names."""
    replaced: Sequence[str] = ()
    """Parts of the connector that are not checked, because the engines replace them."""

    def __init__(self, connector_class: type, factory: Any, options: Mapping[str, Any]) -> None:
        self._class, self._factory, self._options = connector_class, factory, options
        self._scenarios: Mapping[str, Scenario] = {}
        self.engines: dict[str, PDHarness] = {}
        self.lives: dict[str, int] = {}

    def fit(self, scenario: Scenario) -> Scenario:
        """Return the nearest scenario that the engines can simulate."""
        fitted: Scenario = self._factory.fit_for_handoffs(scenario)
        return fitted

    def start(
        self, scenarios: Mapping[str, Scenario], network: Network, lease_seconds: float
    ) -> None:
        """Build both engines.

        Args:
            scenarios: Sizes of each engine, as :meth:`fit` returned them, by name.
            network: The network.
            lease_seconds: Seconds for which an offer waits for its consumer.
        """
        self._scenarios, self.network, self.lease_seconds = scenarios, network, lease_seconds
        for name in scenarios:
            self.restart(name)

    def restart(self, name: str) -> None:
        """Start a new life of an engine; the old life sends no further message."""
        self.lives[name] = self.lives.get(name, 0) + 1
        scenario = self._scenarios[name]
        split = str(scenario.ranks) if scenario.ranks else ""
        me = Peer(name, self.life(name), self.address(name), split)
        wires = [self.network.connect(me.address, rank) for rank in range(len(scenario.ranks) or 1)]
        if name in self.engines:
            with suppress(Exception):
                self.engines[name].shutdown()  # release threads and memory
        life = EngineLife(me, wires, lambda: self.network.now, self.lease_seconds)
        self.engines[name] = self.build(scenario, life)

    def build(self, scenario: Scenario, life: EngineLife) -> PDHarness:
        """Build an engine with the connector."""
        connector = self._class(ConnectorConfig(scenario.geometry, dict(self._options)))
        make_worker = connector.make_worker

        def make_pickling_worker() -> Any:
            worker = make_worker()
            start_plan = worker.start_plan

            def start_copy(plan: StepPlan) -> None:  # two instances, for two processes
                start_plan(pickle.loads(pickle.dumps(plan)))

            worker.start_plan = start_copy
            return worker

        connector.make_worker = make_pickling_worker
        engine: PDHarness = self._factory.build_for_handoffs(scenario, connector, life)
        return engine

    def close(self) -> None:
        """Release all resources of both engines."""

    def life(self, name: str) -> str:
        """Name of the current life of an engine."""
        return f"life {self.lives[name]}"

    def address(self, name: str) -> str:
        """Address of an engine."""
        return f"wire://{name}"

    def read_handoff(self, params: Mapping[str, Any], num_tokens: int) -> Handoff:
        """Read parameters in the form in which a router passes them on.

        Args:
            params: The parameters.
            num_tokens: Tokens of the prompt.
        """
        return Handoff.from_params(params)

    def offered_blocks(
        self, handoff: Handoff, geometry: CacheGeometry, tables: BlockIds
    ) -> set[int]:
        """Return the blocks that an offer must hold, and may hold.

        Args:
            handoff: The offer.
            geometry: Geometry of the producer.
            tables: Block tables of the producer's request.
        """
        return {
            table[number]
            for group, table in zip(geometry.groups, tables, strict=True)
            for number in group.required_blocks(handoff.num_tokens)
        }

    def entries(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the parameters that the connector compares."""
        return self.read_handoff(params, 0).to_params()
