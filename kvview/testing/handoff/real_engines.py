"""The interface for handoffs between real engines, which an engine's package implements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kvview.targets import is_engine_connector
from kvview.testing.connector.run.engine import load_factory_class
from kvview.testing.handoff.suite import require_handoff_connector


@dataclass(frozen=True)
class RealCase:
    """The outcome of one case.

    Args:
        law: The law that the case tests; empty for a positive control.
        name: The case, in a few words.
        outcome: The observation.
        is_right: Whether the law holds.
    """

    law: str
    name: str
    outcome: str
    is_right: bool


@runtime_checkable
class PlaysRealHandoffs(Protocol):
    """An engine factory class that runs handoffs between two real engines."""

    @staticmethod
    def play_handoffs(
        connector_class: type, options: Mapping[str, Any], on_progress: Callable[[str], None]
    ) -> Iterator[RealCase]:
        """Run all cases with a connector of the engine or of kvview."""


def real_handoffs(
    connector_class: Any, options: Mapping[str, Any], on_progress: Callable[[str], None]
) -> Iterator[RealCase]:
    """Run handoffs between two real engines of the installed vLLM.

    Args:
        connector_class: A connector of vLLM, or a kvview connector for handoffs.
        options: Options of the connector.
        on_progress: Called with the name of each case.

    Raises:
        ConfigError: The target is not a connector for handoffs, or vLLM cannot run on this machine.
    """
    if not is_engine_connector(connector_class):
        require_handoff_connector(connector_class, options)
    engines = load_factory_class("vllm")
    assert isinstance(engines, PlaysRealHandoffs), "vLLM's factory plays them"
    return engines.play_handoffs(connector_class, options, on_progress)
