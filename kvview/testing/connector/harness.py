"""The engine of a simulated run: what the simulation asks of one.

Any engine that can say these values can be simulated. Its package names the factory
that builds it among the entry points ``kvview.engines``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvview import Connector, OffloadKey
from kvview.errors import ConfigError
from kvview.testing.connector.scenario import Add, Scenario
from kvview.testing.connector.stream import StepStream

if TYPE_CHECKING:
    from kvview.testing.connector.result import SimulationResult

ENTRY_POINTS = "kvview.engines"


class SimulationStats(Protocol):
    """Counters since the engine was built."""

    @property
    def requests(self) -> int:
        """Requests queued."""

    @property
    def finished(self) -> int:
        """Requests that ended by themselves."""

    @property
    def aborted(self) -> int:
        """Requests that were aborted."""

    @property
    def preemptions(self) -> int:
        """Times that a request lost its blocks."""

    @property
    def steps(self) -> int:
        """Scheduler steps."""

    @property
    def mismatches(self) -> int:
        """Blocks that a request read and that held other bytes than their hashes stand for."""


class ConnectorHarness(Protocol):
    """An engine under simulation.

    1. A full block that is computed holds the bytes that follow from its hash; what is
       loaded is overwritten before the load starts; what a request reads is compared.
    2. What the connector raises comes through unchanged.
    """

    @property
    def stats(self) -> SimulationStats:
        """Counters since the engine was built."""

    # --- what happens to it ---

    def add(self, add: Add, serial: int) -> None:
        """Queue a request.

        Args:
            add: What comes.
            serial: Tells what it generates from what others do.

        Raises:
            ConfigError: No engine would queue it: it can never fit, its id is not free
                yet, or what it continues was never there. Nothing changed.
        """

    def abort(self, request_id: str) -> None:
        """End an unfinished request early."""

    def step(self) -> None:
        """Run one scheduler step."""

    def squeeze(self, num_blocks: int) -> None:
        """Give back what was squeezed out before, and allocate this many, if as many are free."""

    def alias(self) -> bool:
        """Give the first cached block of a running request a second hash, if there is one."""

    def reset(self, *, after_reports: bool = False) -> bool:
        """Reset the caches; False when refused.

        Args:
            after_reports: As in :class:`~kvview.testing.connector.scenario.Reset`; an engine
                that ends each step with the reports has no other moment.
        """

    def shutdown(self) -> Mapping[int, int]:
        """Stop the connectors.

        Returns:
            References that they never gave back, ``{block_id: count}``.
        """

    # --- what is asked ---

    def unfinished(self) -> Mapping[str, str]:
        """Requests that are not finished, ``{request_id: "waiting", "loading" or "running"}``.

        Those that load come in the order in which they began to.
        """

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do, the connectors' pending work included."""

    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        """Per block of a request that waits for loads, what must come into it.

        One that was aborted meanwhile is a request as well; empty for any other.
        """

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""

    def ref_count(self, block_id: int) -> int:
        """References to a block, whoever has them."""

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """What each block holds."""

    def free_block_ids(self) -> Sequence[int]:
        """The free queue, next victim first."""

    def engine_refs(self) -> Counter[int]:
        """References by block of the requests and of what is squeezed out."""

    def held_blocks(self) -> Mapping[int, int]:
        """References by block that the connectors' views count."""


class EngineFactory(Protocol):
    """Builds the engine of each run."""

    @property
    def name(self) -> str:
        """What the engine is called in reports, with its version if it has one."""

    def fit(self, scenario: Scenario) -> tuple[Scenario, Sequence[str]]:
        """The nearest scenario that the engine can play.

        Returns:
            The scenario, and what was left out of it, in a few words each.
        """

    def build(
        self,
        scenario: Scenario,
        connectors: Sequence[Connector],
        *,
        owner: str,
        clock: Callable[[], float],
        stream: StepStream | None = None,
    ) -> ConnectorHarness:
        """Build an engine.

        Args:
            scenario: As fitted.
            connectors: What it runs, in order of preference for loads.
            owner: Named in reports of the view.
            clock: Seconds, by which leases expire where the engine has them.
            stream: Told of each launch and each output taken; given with a scenario whose
                ``compute_lags``. It reaches the worker halves as ``compute_stream``.
        """


@runtime_checkable
class RunsOwnConnectors(Protocol):
    """An engine factory that runs connectors written to the engine itself, as they are."""

    def simulate_own(
        self, connector_class: type, scenario: Scenario, options: Mapping[str, Any]
    ) -> SimulationResult:
        """Run one through a scenario; what is left out is counted in the coverage.

        Args:
            connector_class: Of the engine's own kind.
            scenario: What happens.
            options: What its user configures.
        """

    def judge_own(
        self, connector_class: type, result: SimulationResult, options: Mapping[str, Any]
    ) -> SimulationResult:
        """Find out whether a failure is the connector's: the law is ``ENGINE`` if it is not.

        Args:
            connector_class: What failed.
            result: How.
            options: As it ran.
        """


def own_runs(engines: EngineFactory, connector_class: type) -> RunsOwnConnectors:
    """The factory, as one that runs connectors of its engine.

    Raises:
        ConfigError: It runs kvview connectors alone.
    """
    if isinstance(engines, RunsOwnConnectors):
        return engines
    raise ConfigError(
        f"{connector_class.__qualname__} is no kvview connector, and {engines.name} runs no other: "
        f"give --engine vllm to check a connector of vLLM"
    )


def load_engines(name: str = "reference") -> EngineFactory:
    """The factory that an installed package brings under a name.

    Raises:
        ConfigError: No package brings one, or what it needs is not installed.
    """
    with _what_it_needs(name):
        return load_factory_class(name)()


def load_factory_class(name: str) -> Callable[[], EngineFactory]:
    """The class of that factory, of which nothing is built.

    Raises:
        ConfigError: As :func:`load_engines`.
    """
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise ConfigError(f"there is no engine {name!r}; known: {', '.join(sorted(found))}")
    with _what_it_needs(name):
        factory_class: Callable[[], EngineFactory] = found[name].load()
    return factory_class


@contextmanager
def _what_it_needs(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"engine {name!r} needs {error.name}: it is not installed") from error
