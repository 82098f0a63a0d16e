"""Checks of a connector in an engine: seeds, injected faults, invariants, and short scripts.

    report = check_connector(MyConnector)
    assert report.is_clean, report.summary()

Each seed is a scenario (:mod:`~kvview.testing.connector.scenario`) with transfers that are late,
reordered, failed or lost (:mod:`~kvview.testing.connector.worker`). After each event the run is
compared with the model (:mod:`~kvview.testing.connector.memory`), and the invariants are checked
(:mod:`~kvview.testing.connector.invariants`). The first failure of each law is shrunk to a script.
:func:`kvview.testing.run_checks` reports law by law.
"""

from __future__ import annotations

from kvview.testing.connector.all_seeds import check_connector
from kvview.testing.connector.generate import generate_scenario
from kvview.testing.connector.harness import load_engines
from kvview.testing.connector.result import (
    ConnectorFailure,
    ConnectorRuns,
    Failure,
    SimulationResult,
    Snapshot,
)
from kvview.testing.connector.run import simulate
from kvview.testing.connector.scenario import (
    Abort,
    AbortLoading,
    Add,
    Alias,
    Event,
    Fate,
    Reset,
    Scenario,
    Squeeze,
    Step,
)

__all__ = [
    "Abort",
    "AbortLoading",
    "Add",
    "Alias",
    "ConnectorFailure",
    "ConnectorRuns",
    "Event",
    "Failure",
    "Fate",
    "Reset",
    "Scenario",
    "SimulationResult",
    "Snapshot",
    "Squeeze",
    "Step",
    "check_connector",
    "generate_scenario",
    "load_engines",
    "simulate",
]
