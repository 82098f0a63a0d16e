"""Every injected fault is killed, and every law has one that is killed for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvview.targets import is_connector
from kvview.testing import all_checks, run_checks
from kvview.testing.checks import EXCEPTIONS
from kvview.testing.handoff import pd_factory
from kvview.testing.results.law_broken import COVERAGE
from kvview_reference import harness
from kvview_reference.handoff.pull import PullConnector
from tests import mutants
from tests.house.test_laws import LAWS_WITHOUT_A_CHECK
from tests.mutants.mutant import Mutant
from tests.mutants.tested import FaultOfTests

pytest.importorskip("torch")

CONNECTORS = [fault for fault in mutants.MUTANTS if is_connector(fault.factory)]
MUTANTS = [fault for fault in mutants.MUTANTS if fault not in CONNECTORS]
RIGHT: list[Callable[[], Any]] = [
    harness.ReferencePool,
    harness.ReferenceManager,
    harness.ReferenceARCManager,
    harness.ReferenceTransfer,
    harness.Tier,
    pd_factory(PullConnector),
]


@pytest.mark.slow
# The thread of a wrong implementation may end with an exception.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant) -> None:
    assert mutant.first_failure() is not None, mutant.what


@pytest.mark.slow
@pytest.mark.parametrize("fault", mutants.TESTED, ids=lambda fault: fault.variant.name)
def test_a_fault_fails_the_tests_of_its_contract(fault: FaultOfTests) -> None:
    assert fault.first_failure() is not None, fault.variant.what


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
    laws = {one.law for one in all_checks() if one.contract != "connector" and "*" not in one.law}
    laws.discard(COVERAGE)
    assert {mutant.law for mutant in MUTANTS} == laws
    tested = {law for law in LAWS_WITHOUT_A_CHECK if law.startswith(("GEO", "GUARD", "TIER"))}
    assert {fault.variant.law for fault in mutants.TESTED} == tested
    # tests/connector runs these; a law of a part is planted where the part is simple
    # (POOL-1, OFF-2 ...), and each law of connectors here.
    laws = {one.law for one in all_checks() if one.contract == "connector"}
    planted = {mutant.law for mutant in CONNECTORS}
    assert planted <= laws
    assert {law for law in laws if law.startswith("CONN-")} <= planted
    assert laws - {"*", EXCEPTIONS} <= planted | {mutant.law for mutant in MUTANTS}
    incidents = {mutant.incident for mutant in MUTANTS}
    incidents |= {fault.variant.incident for fault in mutants.TESTED}
    assert len(incidents - {None}) >= 15
