"""The repetition of an incident that a recorder in a server wrote (``kvview check --from``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvview.errors import ConfigError
from kvview.targets import is_connector, is_engine_connector
from kvview.testing.effort import Effort
from kvview.testing.token_runs import ENGINE

if TYPE_CHECKING:
    from kvview.testing.connector import ConnectorFailure, ConnectorRuns
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


def repeat_incident(
    replay: Replay,
    connector_class: Any,
    effort: Effort,
    on_progress: Callable[[int, int], None],
) -> ConnectorRuns:
    """Run the scenarios of an incident until one breaks the law of the incident, and shrink it.

    Args:
        replay: The incident.
        connector_class: A kvview connector, or a connector of vLLM.
        effort: Engine, options and limits of the runs.
        on_progress: Called after each scenario with their number and the number of failures.

    Raises:
        ConfigError: The target is not a connector, or it refuses the options.
    """
    from kvview.testing.connector import check_connector, load_engines

    is_own = is_engine_connector(connector_class)
    if not (is_own or is_connector(connector_class)):
        raise ConfigError("--from plays an incident with a connector, and the target is not one")
    return check_connector(
        connector_class,
        seeds=len(replay.scenarios),
        scenarios=replay.scenarios,
        options=effort.options,
        engines=load_engines(effort.engine or (ENGINE if is_own else "reference")),
        hook_seconds=effort.hook_seconds,
        on_progress=on_progress,
        keep_going=lambda law: bool(replay.law) and law != replay.law,
    )


def verdict_on(replay: Replay, runs: ConnectorRuns) -> tuple[str, ConnectorFailure | None]:
    """Return the result in one line, and the failure that repeats the incident, or the first."""
    failures, law = runs.failures, replay.law
    same = (one for one in failures if law in (one.law, one.filed_under))
    failure = next(same, failures[0] if failures else None)
    if failure is None:
        number = len(replay.scenarios)
        return f"the fault does not repeat: {number} scenarios of the incident break no law", None
    if law in (failure.law, failure.filed_under):
        return f"the fault repeats: {law} is broken again", failure
    if law:
        text = f"another law is broken: {failure.law}, the incident names {law}"
    else:
        text = f"a law is broken: {failure.law}, the incident names none"
    return text, failure
