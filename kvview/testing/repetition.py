"""The repetition of an incident that a recorder in a server wrote (``kvview check --from``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvview.testing.token_runs import ENGINE

if TYPE_CHECKING:
    from kvview.testing.connector import ConnectorRuns
    from kvview.testing.connector.scenario.scenario import Scenario


@dataclass(frozen=True)
class Replay:
    """An incident as scenarios of a simulated engine.

    Args:
        law: The law that the server saw broken; empty if a signal requested the file.
        scenarios: The scenarios, the most likely first.
        notes: Facts for the reader, one line each.
    """

    law: str
    scenarios: Sequence[Scenario]
    notes: Sequence[str]


def read_replay(path: str) -> Replay:
    """Read an incident file.

    Raises:
        ConfigError: The file is not an incident that can be played, or its reader is not installed.
    """
    from kvview.testing.connector.run.engine import load_factory_class

    read: Callable[[str], Replay] = load_factory_class(ENGINE).read_replay  # type: ignore[attr-defined]
    return read(path)


def verdict_on(replay: Replay, runs: ConnectorRuns) -> str:
    """Return whether the runs of an incident break the law of the incident, in one line."""
    broken = {law for one in runs.failures for law in (one.law, one.filed_under)}
    if replay.law in broken:
        return f"the fault repeats: {replay.law} is broken again"
    if broken:
        return f"another law is broken: the incident names {replay.law or 'none'}"
    return f"the fault does not repeat: {runs.num_seeds} scenarios of the incident break no law"
