"""The harness of handoffs: two engines with a connector in each, and a network between them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kvview import BlockIds, CacheGeometry, Connector, ConnectorConfig, StepPlan
from kvview.handoff import Handoff, Peer, Wire
from kvview.testing.connector.run.engine import SimulatedEngine
from kvview.testing.connector.scenario.scenario import Add, Scenario
from kvview.testing.handoff.network import FAULTS, Fault, Network
from kvview.testing.suites.capability import Capability


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
        lease_seconds: Seconds for which an offer waits for its consumer.
    """

    me: Peer
    wires: Sequence[Wire]
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
            life: Identity and wire of the engine.
        """


@runtime_checkable
class BuildsOwnPDEngines(Protocol):
    """An engine factory that simulates handoffs with unmodified connectors of its engine."""

    def pair_of_own(self, connector_class: type, options: Mapping[str, Any]) -> TwoEngines:
        """Make two engines with an unmodified connector."""


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
        life = EngineLife(me, wires, self.lease_seconds)
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
        for engine in self.engines.values():
            with suppress(Exception):
                engine.shutdown()  # release threads and memory
        self.engines.clear()

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
