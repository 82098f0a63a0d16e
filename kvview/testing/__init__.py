"""The conformance kit: the laws of every contract as checks, and what runs them.

A check is a plain function of a factory; one list of them has three runners:
:func:`run_checks` (and ``kvview check``), :func:`parametrize_with_checks`, and
``pytest --pyargs kvview.testing.suite --kvview-target pkg.mod:factory``.
"""

from kvview.testing import (
    completion_checks,
    event_checks,
    geometry_checks,
    guard_checks,
    offloading_checks,
    pool_checks,
    transfer_checks,
    walk_checks,
)
from kvview.testing.checks import CHECKS, Check, check, checks_for
from kvview.testing.harness import (
    Capability,
    GeometryHarness,
    ManagerHarness,
    PoolHarness,
    TransferHarness,
)
from kvview.testing.mutants import Mutant, MutantResult, PlantedFault, load_mutants, run_mutants
from kvview.testing.parametrize import BoundCheck, parametrize_with_checks
from kvview.testing.profiles import PROFILES, Profile
from kvview.testing.recorder import LawBroken
from kvview.testing.report import CheckResult, Outcome, Report
from kvview.testing.runner import read_expected_failures, run_checks
from kvview.testing.targets import inspect_factory, load_target

__all__ = [
    "CHECKS",
    "PROFILES",
    "BoundCheck",
    "Capability",
    "Check",
    "CheckResult",
    "GeometryHarness",
    "LawBroken",
    "ManagerHarness",
    "Mutant",
    "MutantResult",
    "Outcome",
    "PlantedFault",
    "PoolHarness",
    "Profile",
    "Report",
    "TransferHarness",
    "check",
    "checks_for",
    "completion_checks",
    "event_checks",
    "geometry_checks",
    "guard_checks",
    "inspect_factory",
    "load_mutants",
    "load_target",
    "offloading_checks",
    "parametrize_with_checks",
    "pool_checks",
    "read_expected_failures",
    "run_checks",
    "run_mutants",
    "transfer_checks",
    "walk_checks",
]
