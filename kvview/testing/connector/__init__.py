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

from kvview.testing.connector.check import check_connector as check_connector
from kvview.testing.connector.result import (
    ConnectorFailure as ConnectorFailure,
    ConnectorRuns as ConnectorRuns,
    Failure as Failure,
    SimulationResult as SimulationResult,
    Snapshot as Snapshot,
)
from kvview.testing.connector.run.engine import load_engines as load_engines
from kvview.testing.connector.run.simulate import simulate as simulate
from kvview.testing.connector.scenario.generate import generate_scenario as generate_scenario
from kvview.testing.connector.scenario.scenario import (
    Abort as Abort,
    AbortLoading as AbortLoading,
    Add as Add,
    Event as Event,
    Fate as Fate,
    HoldBlocks as HoldBlocks,
    Reset as Reset,
    Scenario as Scenario,
    SecondHash as SecondHash,
    Step as Step,
)
