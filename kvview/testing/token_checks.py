"""Real tokens as checks: what a connector does in an engine that runs a model.

The engine's own package serves; these say what came out, law by law, in the report of
every other check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from typing_extensions import override

from kvview.errors import ConfigError
from kvview.testing.checks import Check
from kvview.testing.connector.coverage import Gap
from kvview.testing.connector.harness import load_factory_class
from kvview.testing.connector.result import ConnectorRuns
from kvview.testing.connector_checks import COVERAGE, check_law, require_exercised
from kvview.testing.harness import Factory

ENGINE = "vllm"
"""What serves, unless another engine is named."""

LAWS: Mapping[str, str] = {
    "CONN-3": "Every request is answered, and the engine comes to rest.",
    "CONN-4": "Every block is given back.",
    "CONN-11": "After a reset nothing of other weights is loaded.",
    "XFER-1": "The tokens are those without the connector.",
}


@dataclass(frozen=True)
class TokenRuns(ConnectorRuns):
    """What serving with a connector and without it said.

    Args:
        gaps: What must happen and did not, or was not proven.
    """

    gaps: Sequence[Gap] = ()

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
            on_progress: Told what is being done.

        Raises:
            ConfigError: The engine that is installed cannot run, or the options are refused.
        """


def load_token_check(engine: str) -> TokenCheck:
    """What an engine serves with.

    Raises:
        ConfigError: It runs no model.
    """
    bring: Callable[[], TokenCheck] | None = getattr(
        load_factory_class(engine), "token_check", None
    )
    if bring is None:
        raise ConfigError(f"engine {engine!r} runs no model: --inference needs {ENGINE}")
    return bring()


def token_checks() -> list[Check]:
    """The checks, by law."""
    return [*(_check(law, what) for law, what in LAWS.items()), _any_other(), _coverage()]


def _check(law: str, what: str) -> Check:
    def run(factory: Factory) -> None:
        check_law(factory, lambda broken: broken == law, what)

    run.__doc__ = what
    name = f"check_{law.lower().replace('-', '_')}_in_real_inference"
    return Check(name, law, "connector", (), run)


def _any_other() -> Check:
    def run(factory: Factory) -> None:
        """The engine goes on, and no other law is broken."""
        check_law(factory, lambda broken: broken not in LAWS, "no law broken")

    return Check("check_any_other_law_in_real_inference", "*", "connector", (), run)


def _coverage() -> Check:
    def run(factory: Factory) -> None:
        """Something was loaded, and a fault planted over it changed tokens."""
        require_exercised(factory, lambda gap: True)

    return Check("check_coverage_of_real_inference", COVERAGE, "connector", (), run)
