"""Runs of a connector in an engine that serves a model, for the checks of real tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from typing_extensions import override

from kvview.errors import ConfigError
from kvview.testing.connector.result import ConnectorRuns
from kvview.testing.connector.run.engine import load_factory_class
from kvview.testing.results.law_broken import Gap

ENGINE = "vllm"
"""The engine that serves models by default."""


@dataclass(frozen=True)
class TokenRuns(ConnectorRuns):
    """The outcome of requests that were served with and without a connector."""

    @property
    @override
    def not_exercised(self) -> Sequence[Gap]:
        return self.gaps


class TokenCheck(Protocol):
    """Serves requests with and without a connector; the type of a static member of factories."""

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
        """Serve the requests of some seeds.

        Args:
            connector_class: A kvview connector, or a connector for the engine's own interface.
            seeds: Number of seeds.
            first_seed: The first seed.
            options: Options of the connector.
            hook_seconds: CPU seconds that one call of a hook may take.
            on_progress: Called with the progress.

        Raises:
            ConfigError: The installed engine cannot run, or the options are refused.
        """


def load_token_check(engine: str) -> TokenCheck:
    """Return the check of real tokens of an engine.

    Raises:
        ConfigError: The engine runs no model.
    """
    bring: Callable[[], TokenCheck] | None = getattr(
        load_factory_class(engine), "token_check", None
    )
    if bring is None:
        raise ConfigError(f"engine {engine!r} runs no model; use --inference with {ENGINE}")
    return bring()
