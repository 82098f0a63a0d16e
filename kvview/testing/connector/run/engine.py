"""The interface that an engine needs for simulated runs.

The package of an engine declares the factory that builds the engine as an entry point
``kvview.engines``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvview import Connector, OffloadKey
from kvview.errors import ConfigError
from kvview.testing.connector.run.compute_stream import StepStream
from kvview.testing.connector.scenario.scenario import Add, Scenario

if TYPE_CHECKING:
    from kvview.testing.connector.result import SimulationResult

ENTRY_POINTS = "kvview.engines"


class SimulationStats(Protocol):
    """Counters since the engine was built.

    Attributes:
        requests: Number of queued requests.
        finished: Number of requests that ended without an abort.
        aborted: Number of aborted requests.
        preemptions: Number of preemptions, in which a request lost its blocks.
        steps: Number of scheduler steps.
        mismatches: Number of blocks that had wrong bytes for their hashes when a request read
            them.
    """

    requests: int
    finished: int
    aborted: int
    preemptions: int
    steps: int
    mismatches: int


class SimulatedEngine(Protocol):
    """An engine under simulation.

    1. A computed full block holds the bytes that are derived from its hash. Blocks are overwritten
       before a load into them starts, and are compared when a request reads them.
    2. Exceptions of the connector propagate unchanged.
    """

    @property
    def stats(self) -> SimulationStats:
        """Counters since the engine was built."""

    # --- actions ---

    def add(self, add: Add, serial: int) -> None:
        """Queue a request.

        Args:
            add: The request.
            serial: Number from which the generated tokens of the request are derived.

        Raises:
            ConfigError: The request cannot be queued, because it can never fit, its id is in use,
                or the request that it continues does not exist. The engine is unchanged then.
        """

    def abort(self, request_id: str) -> None:
        """End an unfinished request early."""

    def step(self) -> None:
        """Run one scheduler step."""

    def squeeze(self, num_blocks: int) -> None:
        """Release the blocks of the last squeeze, and allocate this number, or all free blocks."""

    def alias(self) -> bool:
        """Give the first cached block of a running request, if any, a second hash."""

    def reset(self, *, after_reports: bool = False) -> bool:
        """Reset the caches; returns False if the reset was refused.

        Args:
            after_reports: Whether reports are processed before the reset, as in
                :class:`~kvview.testing.connector.scenario.scenario.Reset`; ignored by an engine
                that processes the reports at the end of each step.
        """

    def shutdown(self) -> Mapping[int, int]:
        """Stop the connectors.

        Returns:
            References that the connectors never released, ``{block_id: count}``.
        """

    # --- queries ---

    @property
    def mismatch(self) -> str:
        """Describe the latest block with wrong bytes: the first difference, and the KV's key."""

    @property
    def wrong_block(self) -> tuple[int, OffloadKey] | None:
        """The block that ``mismatch`` describes, and its key; None if it is not known."""

    def unfinished(self) -> Mapping[str, str]:
        """Unfinished requests, ``{request_id: "waiting", "loading" or "running"}``.

        Loading requests are listed in the order in which their loads started.
        """

    def has_work(self) -> bool:
        """Whether ``step`` has work to do, including pending work of the connectors."""

    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        """Return the key to load into each block of a request that waits for loads.

        An aborted request also waits for its loads.
        """

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the pool, including the null block."""

    def ref_counts(self, block_ids: Sequence[int]) -> list[int]:
        """Return the number of references of all owners to each block."""

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """Return the keys of the KV in each block."""

    def free_block_ids(self) -> Sequence[int]:
        """Return the free queue, next victim first."""

    def engine_refs(self) -> Counter[int]:
        """Return the number of references of requests and of the squeeze to each block."""

    def held_blocks(self) -> Mapping[int, int]:
        """Return the number of references to each block that the connectors' views count."""


class EngineFactory(Protocol):
    """Builds the engine of each run."""

    @property
    def name(self) -> str:
        """Name of the engine in reports, with its version if known."""

    def fit(self, scenario: Scenario) -> tuple[Scenario, Sequence[str]]:
        """Return the nearest scenario that the engine can play.

        Returns:
            The nearest scenario, and a few words for each part that was removed.
        """

    def build(
        self,
        scenario: Scenario,
        connectors: Sequence[Connector],
        *,
        owner: str,
        stream: StepStream | None = None,
    ) -> SimulatedEngine:
        """Build an engine.

        Args:
            scenario: A scenario that :meth:`fit` returned.
            connectors: Connectors of the engine, in order of preference for loads.
            owner: Name of the owner in reports of the view.
            stream: The compute stream of the worker halves, if the scenario has ``compute_lags``.
                The engine notifies this stream of each launch and each output.
        """


@runtime_checkable
class RunsOwnConnectors(Protocol):
    """An engine factory that also runs connectors written for the engine's own interface.

    Attributes:
        laws_of_own: The laws that a run of such a connector can break.
    """

    laws_of_own: Collection[str]

    def simulate_own(
        self, connector_class: type, scenario: Scenario, options: Mapping[str, Any]
    ) -> SimulationResult:
        """Run the engine's own connector through a scenario; coverage counts skipped parts.

        Args:
            connector_class: A connector for the engine's own interface.
            scenario: The run.
            options: Options of the connector.
        """

    def judge_own(
        self, connector_class: type, result: SimulationResult, options: Mapping[str, Any]
    ) -> SimulationResult:
        """Change the law of a failure to ``ENGINE`` if the connector did not cause it.

        Args:
            connector_class: The connector.
            result: The run that failed.
            options: Options of the connector.
        """


def own_runs(engines: EngineFactory, connector_class: type) -> RunsOwnConnectors:
    """Return the factory if it also runs connectors for its engine's own interface.

    Raises:
        ConfigError: The factory runs only kvview connectors.
    """
    if isinstance(engines, RunsOwnConnectors):
        return engines
    raise ConfigError(
        f"{connector_class.__qualname__} is not a kvview connector, but {engines.name} only runs "
        "kvview connectors; pass --engine vllm to check a connector of vLLM"
    )


def load_engines(name: str = "reference") -> EngineFactory:
    """Return the engine factory with the given name, from an installed package.

    Raises:
        ConfigError: No package has this factory, or a library that the factory needs is not
            installed.
    """
    with _naming_missing_library(name):
        return load_factory_class(name)()


def load_factory_class(name: str) -> Callable[[], EngineFactory]:
    """Return the class of the engine factory with the given name.

    Raises:
        ConfigError: As for :func:`load_engines`.
    """
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise ConfigError(f"engine {name!r} is unknown; known: {', '.join(sorted(found))}")
    with _naming_missing_library(name):
        factory_class: Callable[[], EngineFactory] = found[name].load()
    return factory_class


@contextmanager
def _naming_missing_library(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"engine {name!r} needs {error.name}, which is not installed") from error
