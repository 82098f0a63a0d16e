"""The suite of handoffs: an author names a connector, and the suite makes two engines with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from typing_extensions import override

from kvview import CacheGeometry, Connector, ConnectorConfig
from kvview.connector.hook_errors import build_connector
from kvview.errors import ConfigError
from kvview.handoff import HandoffScheduler, HandoffWorker
from kvview.targets import is_engine_connector, name_target, require_connector
from kvview.testing.connector.run.engine import load_engines
from kvview.testing.connector.scenario.scenario import Scenario
from kvview.testing.handoff.harness import BuildsOwnPDEngines, BuildsPDEngines, TwoEngines
from kvview.testing.handoff.machine import HandoffMachine
from kvview.testing.handoff.network import Network
from kvview.testing.suites.capability import Contract, capabilities_of
from kvview.testing.suites.conformance import Conformance


class HandoffConformance(Conformance):
    """The suite of connectors for handoffs.

    Example:
        class TestMyHandoff(HandoffConformance):
            connector = MyConnector
    """

    contract: ClassVar[Contract] = "handoff"
    machine = HandoffMachine
    num_runs: ClassVar[int] = 200
    connector: ClassVar[type]
    """The connector class."""
    engine: ClassVar[str] = "reference"
    """Name of the engines."""
    engine_name: ClassVar[str] = ""
    """Name of the engines in reports."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the connector."""
    replaced: ClassVar[Sequence[str]] = ()
    """Parts of the connector that are not checked, because the engines replace them."""

    def make(self) -> TwoEngines:
        """Make two engines, which are not built yet."""
        if is_engine_connector(self.connector):
            return _engines_of_own(self.engine).pair_of_own(self.connector, self.options)
        return TwoEngines(self.connector, _load(self.engine), self.options)


def pd_factory(
    target: object, engine: str | None = None, options: Mapping[str, Any] | None = None
) -> type[HandoffConformance]:
    """Make the suite of a connector class, for ``run_checks`` and the command.

    Args:
        target: The connector class.
        engine: Name of the engines; None for the reference engine.
        options: Options of the connector.

    Raises:
        ConfigError: The target is not a connector, refuses the options, or its halves have no
            hooks for handoffs.
        UnsupportedEngineError: The installed release of the engine cannot simulate handoffs.
    """
    given, name = dict(options or {}), engine or "reference"
    if is_engine_connector(target):
        connector: Any = target
    else:
        connector = require_handoff_connector(target, given)
    names = {"connector": connector, "engine": name, "options": given}
    names["__module__"] = connector.__module__
    names["made_by"] = (
        "from kvview.testing import load_target\n"
        "from kvview.testing.handoff import pd_factory\n\n"
        f"connector = load_target({name_target(connector)!r})\n"
        f"{connector.__name__} = pd_factory(connector, {name!r}, {given!r})"
    )
    suite: type[HandoffConformance] = type(connector.__name__, (HandoffConformance,), names)
    pair = suite().make()
    suite.lacks = [one for one in capabilities_of("handoff") if one not in pair.capabilities]
    suite.replaced = pair.replaced
    suite.engine_name = load_engines(name).name
    return suite


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
