"""Runs of a connector in an engine that serves a model, for the checks of real tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


TokenCheck = Callable[..., TokenRuns]
"""Serves requests with and without a connector: the static member ``token_check`` of a factory
returns it; see :func:`kvview.testing.connector_checks.shared_runs` for the arguments."""


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
