"""Checks of a connector in an engine: seeds, injected faults, invariants, and short scripts.

    report = check_connector(MyConnector)
    assert report.is_clean, report.summary()

The rooms are in the order of a run. Each seed is a scenario
(:mod:`~kvview.testing.connector.scenario`), which a simulated engine plays
(:mod:`~kvview.testing.connector.run`), with both halves of the connector in harnesses that delay,
lose and fail transfers (:mod:`~kvview.testing.connector.half`). After each event, models and
invariants are compared with the engine (:mod:`~kvview.testing.connector.judge`). A failing run is
repeated and shrunk to a script (:mod:`~kvview.testing.connector.confirm`), and code that never ran
is named (:mod:`~kvview.testing.connector.exercised`). :mod:`~kvview.testing.connector.seed` runs
one seed, and :mod:`~kvview.testing.connector.check` runs all seeds.
:func:`kvview.testing.run_checks` reports law by law.
"""

from __future__ import annotations

from kvview.testing.connector.check import check_connector
from kvview.testing.connector.result import (
    ConnectorFailure,
    ConnectorRuns,
    Failure,
    SimulationResult,
    Snapshot,
)
from kvview.testing.connector.run.engine import load_engines
from kvview.testing.connector.run.simulate import simulate
from kvview.testing.connector.scenario.generate import generate_scenario
from kvview.testing.connector.scenario.scenario import (
    Abort,
    AbortLoading,
    Add,
    Event,
    Fate,
    HoldBlocks,
    Reset,
    Scenario,
    SecondHash,
    Step,
)

__all__ = [
    "Abort",
    "AbortLoading",
    "Add",
    "ConnectorFailure",
    "ConnectorRuns",
    "Event",
    "Failure",
    "Fate",
    "HoldBlocks",
    "Reset",
    "Scenario",
    "SecondHash",
    "SimulationResult",
    "Snapshot",
    "Step",
    "check_connector",
    "generate_scenario",
    "load_engines",
    "simulate",
]
