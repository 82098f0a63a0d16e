"""The connector contract: a connector has two halves, is one file, and works with any engine.

The scheduler half runs next to the engine's scheduler. The scheduler half has the pool view,
promises prefixes that it can load, and plans transfers. The worker half runs next to the KV bytes
and executes the plans. Every method has a default, so a connector overrides the methods that it
needs, and a later release may add methods.

Laws: CONN-1 to CONN-13 in ``kvview/laws.toml``.

The engine gives these guarantees. The engine calls the scheduler half from one thread. The engine
runs the loads of a request before it computes the tokens after the loaded tokens. The engine never
gives a block of an unfinished load to another request, and computes the tokens of a failed load. If
the engine has called another hook between a promise and the allocation of its blocks, the engine
calls ``match_prefix`` again (CONN-2).

``docs/hooks.md`` shows the calls for one request.

Source: ``vllm/distributed/kv_transfer/kv_connector/v1/base.py`` (0.33.0), and
vLLM PRs #39654 (bind) and #41011 (engine facts for the scheduler half).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvview.connector.hooks import Hooked
from kvview.connector.scheduler_half import SchedulerConnector
from kvview.connector.worker_half import WorkerConnector
from kvview.geometry import CacheGeometry
from kvview.version import CONTRACT_VERSION


@dataclass(frozen=True)
class ConnectorConfig:
    """The arguments of a connector.

    Args:
        geometry: Block sizes and KV-cache groups of the engine.
        options: The user's settings for this connector, not yet checked.
    """

    geometry: CacheGeometry
    options: Mapping[str, Any] = field(default_factory=dict)


class Connector(Hooked):
    """A connector: the class that builds both halves; named by a target such as ``my.py:Mine``.

    The halves may run in two processes. Each process makes its own instance of this class from an
    equal configuration, and builds its half from this instance.

    Args:
        config: Geometry and the user's options.

    Raises:
        ConfigError: An option is unknown or has an impossible value.
    """

    contract_version: ClassVar[str] = CONTRACT_VERSION
    """The contract version for which the class was written, "1.0" for example; by default the
    installed one. An engine refuses a version that this kvview does not support."""

    def __init__(self, config: ConnectorConfig) -> None:
        self.config = config

    @classmethod
    def checked_parts(cls, options: Mapping[str, Any]) -> Iterable[tuple[Any, Mapping[str, Any]]]:
        """List the parts that satisfy further laws, such as a store.

        ``kvview check`` checks these parts together with the connector.

        Args:
            options: Options of the connector, in which placeholders may remain.

        Returns:
            Targets of ``kvview check``, each with its options.

        Examples:
            Name a class of stores, with the options that it receives:

            >>> class Store: ...
            >>> class Mine(Connector):
            ...     @classmethod
            ...     def checked_parts(cls, options): return [(Store, {"root": options["root"]})]
            >>> [part.__name__ for part, _ in Mine.checked_parts({"root": "{tmp}"})]
            ['Store']
        """
        return ()

    def make_scheduler(self) -> SchedulerConnector:
        """Build the scheduler half.

        Examples:
            Give the scheduler half the geometry and an option:

            >>> class Half(SchedulerConnector):
            ...     def __init__(self, num_pages): self.free_pages = [*range(num_pages)]
            >>> class Mine(Connector):
            ...     def make_scheduler(self): return Half(self.config.options["cpu_blocks"])
            >>> len(Mine(config).make_scheduler().free_pages)
            100
        """
        return SchedulerConnector()

    def make_worker(self) -> WorkerConnector:
        """Build the worker half.

        Examples:
            Build a worker half that agrees with the scheduler half of another process:

            >>> class Half(WorkerConnector):
            ...     def __init__(self, num_pages): self.num_pages = num_pages
            >>> class Mine(Connector):
            ...     def make_worker(self): return Half(self.config.options["cpu_blocks"])
            >>> Mine(config).make_worker().num_pages == Mine(config).make_worker().num_pages
            True
        """
        return WorkerConnector()
