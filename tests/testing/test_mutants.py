"""Every injected fault is killed, and every law has one that is killed for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvview import ConfigError
from kvview.cli.commands import cli
from kvview.targets import is_connector
from kvview.testing import CHECKS, Mutant, load_mutants, mutants, run_checks
from kvview.testing.checks import EXCEPTIONS
from kvview.testing.handoff import PDFactory
from kvview_reference import harness
from kvview_reference.handoff.pull import PullConnector

pytest.importorskip("torch")

FAULTS = [fault for fault in load_mutants() if isinstance(fault, Mutant)]
CONNECTORS = [fault for fault in FAULTS if is_connector(fault.factory)]
MUTANTS = [fault for fault in FAULTS if fault not in CONNECTORS]
RIGHT: list[Callable[[], Any]] = [
    harness.pool,
    harness.guarded_pool,
    harness.geometry,
    harness.offloading_lru,
    harness.offloading_arc,
    harness.transfer,
    harness.tier,
    PDFactory(PullConnector),
]


@pytest.mark.slow
# The thread of a wrong implementation may end with an exception.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant) -> None:
    assert mutant.first_failure() is not None, mutant.what


@pytest.mark.slow
@pytest.mark.parametrize("factory", RIGHT, ids=lambda factory: factory.__name__)
def test_the_right_implementation_passes(factory: Callable[[], Any]) -> None:
    report = run_checks(factory)
    assert report.is_clean, [str(result.failure) for result in report.failures]


def test_every_mutant_states_its_fault() -> None:
    assert all(mutant.what and mutant.what.endswith(".") for mutant in MUTANTS)
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))


def test_every_law_has_a_mutant_and_every_mutant_a_law() -> None:
    laws = {one.law for one in CHECKS if one.contract != "connector" and "*" not in one.law}
    assert {mutant.law for mutant in MUTANTS} == laws
    # tests/connector runs these; a law of a part is planted where the part is simple
    # (POOL-1, OFF-2 ...), and each law of connectors here.
    laws = {one.law for one in CHECKS if one.contract == "connector"}
    planted = {mutant.law for mutant in CONNECTORS}
    assert planted <= laws
    assert {law for law in laws if law.startswith("CONN-")} <= planted
    assert laws - {"*", EXCEPTIONS} <= planted | {mutant.law for mutant in MUTANTS}
    assert len({mutant.incident for mutant in MUTANTS} - {None}) >= 15


@pytest.mark.slow
def test_the_self_test_shows_every_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [m for m in FAULTS if m.name in ("FreesDuplicatesOnce", "NeverHits")]
    monkeypatch.setattr(mutants, "load_mutants", lambda: few)
    result = CliRunner().invoke(cli, ["check", "--self-test", "--json", "-"])
    assert result.exit_code == 0, result.output
    assert "3 of 3 injected faults killed; 2 incidents" in result.stderr
    report = json.loads(result.stdout)
    assert [row["is_killed"] for row in report["mutants"]] == [True, True, True]
    assert {row["incident"] for row in report["mutants"]} >= {"vllm#42571", "vllm#53498"}


def test_the_injected_faults_are_not_in_a_wheel(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in a checkout"):
        load_mutants(tmp_path)
