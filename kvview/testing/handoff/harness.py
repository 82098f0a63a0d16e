"""The harness of handoffs: two engines with a connector in each, and a network between them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, runtime_checkable

from typing_extensions import override

from kvview import BlockIds, CacheGeometry, Connector, ConnectorConfig, StepPlan
from kvview.connector.hook_errors import build_connector
from kvview.errors import ConfigError
from kvview.handoff import HandoffScheduler, HandoffWorker, Peer, Wire
from kvview.targets import is_engine_connector, require_connector
from kvview.testing.connector.harness import ConnectorHarness, load_engines
from kvview.testing.connector.scenario import Add, Scenario
from kvview.testing.handoff.network import Network


class PDHarness(ConnectorHarness, Protocol):
    """A simulated engine that can play both roles of a handoff."""

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
        """Return the number of cached and squeezed blocks that another writer has changed."""


@dataclass(frozen=True)
class EngineLife:
    """One life of an engine that hands over KV.

    Args:
        me: Identity of this life.
        wire: The wire of the engine.
        clock: Returns the time in seconds.
        lease_seconds: Seconds for which an offer waits for its consumer.
    """

    me: Peer
    wire: Wire
    clock: Callable[[], float]
    lease_seconds: float


@runtime_checkable
class BuildsPDEngines(Protocol):
    """An engine factory that builds engines for handoffs."""

    def fit_for_handoffs(self, scenario: Scenario) -> Scenario:
        """Return the nearest scenario that two engines can play."""

    def build_for_handoffs(
        self, scenario: Scenario, connector: Connector, life: EngineLife
    ) -> PDHarness:
        """Build an engine that hands over KV.

        Args:
            scenario: Sizes of the engine.
            connector: The connector of the engine.
            life: Identity, wire and clock of the engine.
        """


@dataclass(frozen=True, eq=False)
class PDFactory:
    """Makes two engines with a connector.

    Args:
        made_of: The connector class.
        engine: Name of the engines.
        options: Options of the connector.
    """

    made_of: type[Connector]
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

    def __call__(self) -> TwoEngines:
        """Return two engines that are not built yet."""
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
    """Load the factory of an engine, and build an engine, because a release may refuse handoffs."""
    engines = load_engines(name)
    if not isinstance(engines, BuildsPDEngines):
        raise ConfigError(f"engine {name!r} cannot play handoffs; use reference or vllm")
    scenario = engines.fit_for_handoffs(
        Scenario(CacheGeometry.single(4), num_gpu_blocks=4, events=())
    )
    TwoEngines(_Idle, engines, {}).start({"P": scenario}, Network(0, 1), 1.0)
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
        UnsupportedEngineError: The installed release of the engine cannot play handoffs.
    """
    given = dict(options or {})
    found = PDFactory(require_handoff_connector(target, given), engine or "reference", given)
    found()
    return found


def require_handoff_connector(target: object, options: Mapping[str, Any]) -> type[Connector]:
    """Refuse an object that is not a connector class with hooks for handoffs.

    Raises:
        ConfigError: As for :func:`pd_factory`.
    """
    name = getattr(target, "__qualname__", repr(target))
    if is_engine_connector(target):
        raise ConfigError(
            f"{name} is a connector of vLLM and opens connections of its own, which the simulated "
            f"network cannot replace; check it with --pd --inference"
        )
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
    """Two engines with a network between them, which exist after :meth:`start`.

    Args:
        connector_class: The connector.
        factory: Builds the engines.
        options: Options of the connector.
    """

    capabilities: frozenset[str] = frozenset()

    def __init__(
        self,
        connector_class: type[Connector],
        factory: BuildsPDEngines,
        options: Mapping[str, Any],
    ) -> None:
        self._class, self._factory, self._options = connector_class, factory, options
        self._scenarios: Mapping[str, Scenario] = {}
        self.engines: dict[str, PDHarness] = {}
        self.lives: dict[str, int] = {}

    def fit(self, scenario: Scenario) -> Scenario:
        """Return the nearest scenario that the engines can play."""
        return self._factory.fit_for_handoffs(scenario)

    def start(
        self, scenarios: Mapping[str, Scenario], network: Network, lease_seconds: float
    ) -> None:
        """Build both engines.

        Args:
            scenarios: Sizes of each engine, as :meth:`fit` returned them, by name.
            network: The network.
            lease_seconds: Time that an offer waits for its consumer.
        """
        self._scenarios, self.network, self.lease_seconds = scenarios, network, lease_seconds
        for name in scenarios:
            self.restart(name)

    def restart(self, name: str) -> None:
        """Start a new life of an engine; the old life sends no further message."""
        scenario = self._scenarios[name]
        self.lives[name] = self.lives.get(name, 0) + 1
        me = Peer(name, self.life(name), f"wire://{name}")
        wire = self.network.connect(me.address)
        if name in self.engines:
            with suppress(Exception):
                self.engines[name].shutdown()  # release threads and memory
        connector = self._class(ConnectorConfig(scenario.geometry, dict(self._options)))
        make_worker = connector.make_worker

        def make_pickling_worker() -> Any:
            worker = make_worker()
            start_plan = worker.start_plan

            def start_copy(plan: StepPlan) -> None:  # two instances, for two processes
                start_plan(pickle.loads(pickle.dumps(plan)))

            worker.start_plan = start_copy  # type: ignore[method-assign]
            return worker

        connector.make_worker = make_pickling_worker  # type: ignore[method-assign]
        life = EngineLife(me, wire, lambda: self.network.now, self.lease_seconds)
        self.engines[name] = self._factory.build_for_handoffs(scenario, connector, life)

    def life(self, name: str) -> str:
        """Name of the current life of an engine."""
        return f"life {self.lives[name]}"
