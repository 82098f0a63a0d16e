"""The engine of a simulated run, as the simulation drives and queries it.

Any engine with these methods can be simulated. Its package names the factory that builds it
among the entry points ``kvview.engines``.
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

    @property
    def mismatch(self) -> str:
        """One of them: where it differs, and whose KV is there; empty if the engine cannot say."""


class ConnectorHarness(Protocol):
    """An engine under simulation.

    1. A full block that is computed holds the bytes that follow from its hash. Blocks are
       overwritten before a load into them starts, and compared when a request reads them.
    2. Exceptions of the connector come through unchanged.
    """

    @property
    def stats(self) -> SimulationStats:
        """Counters since the engine was built."""

    # --- actions ---

    def add(self, add: Add, serial: int) -> None:
        """Queue a request.

        Args:
            add: The request.
            serial: Distinguishes its generated tokens from those of other requests.

        Raises:
            ConfigError: No engine would queue it, because it can never fit, its id is in use,
                or the request that it continues does not exist. Nothing changed.
        """

    def abort(self, request_id: str) -> None:
        """End an unfinished request early."""

    def step(self) -> None:
        """Run one scheduler step."""

    def squeeze(self, num_blocks: int) -> None:
        """Release the blocks of the last squeeze, and allocate this many, if so many are free."""

    def alias(self) -> bool:
        """Give the first cached block of a running request a second hash, if there is one."""

    def reset(self, *, after_reports: bool = False) -> bool:
        """Reset the caches; False if refused.

        Args:
            after_reports: As in :class:`~kvview.testing.connector.scenario.Reset`; an engine
                that ends each step with the reports has no other moment.
        """

    def shutdown(self) -> Mapping[int, int]:
        """Stop the connectors.

        Returns:
            References that they never released, ``{block_id: count}``.
        """

    # --- queries ---

    def unfinished(self) -> Mapping[str, str]:
        """Requests that are not finished, ``{request_id: "waiting", "loading" or "running"}``.

        Loading requests come in the order in which their loads started.
        """

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do, the connectors' pending work included."""

    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        """Per block of a request that waits for loads, the key that must come into it.

        An aborted request waits for its loads as well; empty for any other.
        """

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""

    def ref_count(self, block_id: int) -> int:
        """References to a block, of all owners."""

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """Keys of the KV in each block."""

    def free_block_ids(self) -> Sequence[int]:
        """The free queue, next victim first."""

    def engine_refs(self) -> Counter[int]:
        """References by block of the requests and of the squeezed blocks."""

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
            The scenario, and the parts that were left out of it, in a few words each.
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
            connectors: Its connectors, in order of preference for loads.
            owner: Named in reports of the view.
            clock: Seconds, by which leases expire where the engine has them.
            stream: Notified of each launch and each output; given if the scenario's
                ``compute_lags``. The worker halves get it as ``compute_stream``.
        """


@runtime_checkable
class RunsOwnConnectors(Protocol):
    """An engine factory that also runs connectors written to the engine itself."""

    def simulate_own(
        self, connector_class: type, scenario: Scenario, options: Mapping[str, Any]
    ) -> SimulationResult:
        """Run one through a scenario; parts that are left out are counted in the coverage.

        Args:
            connector_class: A connector of the engine's own kind.
            scenario: The run.
            options: Its options.
        """

    def judge_own(
        self, connector_class: type, result: SimulationResult, options: Mapping[str, Any]
    ) -> SimulationResult:
        """Change the law of a failure to ``ENGINE`` if the connector did not cause it.

        Args:
            connector_class: The connector.
            result: The run that failed.
            options: Its options.
        """


def own_runs(engines: EngineFactory, connector_class: type) -> RunsOwnConnectors:
    """The factory, if it also runs connectors of its engine.

    Raises:
        ConfigError: It runs only kvview connectors.
    """
    if isinstance(engines, RunsOwnConnectors):
        return engines
    raise ConfigError(
        f"{connector_class.__qualname__} is not a kvview connector, and {engines.name} runs only "
        f"those: give --engine vllm to check a connector of vLLM"
    )


def load_engines(name: str = "reference") -> EngineFactory:
    """The factory of a name, from an installed package.

    Raises:
        ConfigError: No package has one, or a library that it needs is not installed.
    """
    with _naming_missing_library(name):
        return load_factory_class(name)()


def load_factory_class(name: str) -> Callable[[], EngineFactory]:
    """The class of that factory, not instantiated.

    Raises:
        ConfigError: As :func:`load_engines`.
    """
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise ConfigError(f"there is no engine {name!r}; known: {', '.join(sorted(found))}")
    with _naming_missing_library(name):
        factory_class: Callable[[], EngineFactory] = found[name].load()
    return factory_class


@contextmanager
def _naming_missing_library(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"engine {name!r} needs {error.name}: it is not installed") from error
