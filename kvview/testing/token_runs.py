"""Runs of a connector in an engine that serves a model, for the checks of real tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from typing_extensions import override

from kvview.errors import ConfigError
from kvview.testing.connector.coverage import Gap
from kvview.testing.connector.harness import load_factory_class
from kvview.testing.connector.result import ConnectorRuns

ENGINE = "vllm"
"""What serves, unless another engine is named."""


@dataclass(frozen=True)
class TokenRuns(ConnectorRuns):
    """The outcome of serving with a connector and without it; ``gaps`` are its only gaps."""

    @property
    @override
    def not_exercised(self) -> Sequence[Gap]:
        return self.gaps


class TokenCheck(Protocol):
    """Serves with a connector and without it; a static member of an engine factory."""

    def __call__(
        self,
        connector_class: type,
        *,
        seeds: int,
        first_seed: int = 0,
        options: Mapping[str, Any] | None = None,
        hook_seconds: float = ...,
        on_progress: Callable[[str], None] = ...,
    ) -> TokenRuns:
        """Serve the traffic of some seeds.

        Args:
            connector_class: Of kvview, or of the engine's own kind.
            seeds: How many.
            first_seed: The first of them.
            options: Of the connector.
            hook_seconds: CPU seconds that one call of a hook may take.
            on_progress: Called with the progress.

        Raises:
            ConfigError: The engine that is installed cannot run, or the options are refused.
        """


def load_token_check(engine: str) -> TokenCheck:
    """The settings with which an engine serves.

    Raises:
        ConfigError: It runs no model.
    """
    bring: Callable[[], TokenCheck] | None = getattr(
        load_factory_class(engine), "token_check", None
    )
    if bring is None:
        raise ConfigError(f"engine {engine!r} runs no model: --inference needs {ENGINE}")
    return bring()
