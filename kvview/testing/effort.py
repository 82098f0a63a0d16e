"""The settings of a run of checks: length, seeds, and options of the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvview.errors import ConfigError
from kvview.testing.supervision.watchdog import HOOK_SECONDS

if TYPE_CHECKING:
    from kvview.testing.connector.scenario.scenario import Scenario
    from kvview.testing.results.schema import RunsModel

_FOR_CONNECTORS = (
    "scenarios",
    "engine",
    "options",
    "hook_seconds",
    "inference",
    "keep_going",
    "shard",
)


@dataclass(frozen=True)
class Effort:
    """The settings of a run; equal settings give equal runs.

    Args:
        seed: The first seed.
        steps: Maximum number of calls in one sequence of a search, by default 40. For a connector,
            minimum number of scheduler steps in a run, by default the number of each scenario.
        seeds: Number of runs; by default 100 for a search, 200 for a connector, and 1 with
            inference.
        engine: Engine that runs a connector: ``"reference"`` (the default) or ``"vllm"``.
        options: Options of the connector or store.
        hook_seconds: CPU seconds that one call of a hook may take.
        inference: Whether a connector is checked with a real model instead of simulated runs.
        keep_going: Whether all seeds of a connector are run; otherwise the first failure ends the
            runs.
        shard: Number of the shard of a connector's seeds to run, from 1, and number of shards.
        scenarios: Scenarios of a connector to run instead of those of the seeds.
        merged: The runs of all shards of a connector, instead of new runs.
        expected_message: Text that each message of the running check's expected failure contains.
        is_brief: Whether a search ends at its first failure, without shrinking it.
        shared: Results of earlier checks of the run, which all its checks share.

    Raises:
        ConfigError: A number is too small, or steps are set together with inference.
    """

    seed: int = 0
    steps: int | None = None
    seeds: int | None = None
    engine: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    hook_seconds: float = HOOK_SECONDS
    inference: bool = False
    keep_going: bool = False
    shard: tuple[int, int] = (1, 1)
    scenarios: Sequence[Scenario] = ()
    merged: Sequence[RunsModel] = ()
    expected_message: str = ""
    is_brief: bool = False
    shared: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Validate the numbers."""
        for name in ("steps", "seeds", "hook_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, got {value}")
        if not 1 <= self.shard[0] <= self.shard[1]:
            number, of = self.shard
            raise ConfigError(f"shard must be between 1/{of} and {of}/{of}, got {number}/{of}")
        if self.inference and self.shard != (1, 1):
            raise ConfigError("shard only applies to simulated runs; drop shard or inference")
        if self.inference and self.steps is not None:
            raise ConfigError(
                "steps only applies to simulated runs and cannot be combined with inference; "
                "drop steps"
            )

    def for_connectors(self) -> list[str]:
        """Return the names of the given settings that apply only to connectors."""
        return [name for name in _FOR_CONNECTORS if getattr(self, name) != getattr(_DEFAULT, name)]


_DEFAULT = Effort()
_current: ContextVar[Effort] = ContextVar("kvview_effort", default=_DEFAULT)


def current_effort() -> Effort:
    """Return the settings of the current run; the defaults outside of a run."""
    return _current.get()


@contextmanager
def use_effort(effort: Effort) -> Iterator[None]:
    """Run the checks in the block with these settings."""
    token = _current.set(effort)
    try:
        yield
    finally:
        _current.reset(token)
