"""The conformance kit: the laws of every contract as checks, and what runs them.

A check is a plain function of a factory; one list of them has three runners:
:func:`run_checks` (and ``kvview check``), :func:`parametrize_with_checks`, and
``pytest --pyargs kvview.testing.suite --kvview-target pkg.mod:factory``.
"""

from kvview.targets import load_target
from kvview.testing.checks import CHECKS, Check, check, checks_for
from kvview.testing.connector_checks import NotExercised
from kvview.testing.geometry import checks as geometry_checks
from kvview.testing.guard import checks as guard_checks
from kvview.testing.guard import leaks as leak_checks
from kvview.testing.guard import surroundings as guard_surroundings_checks
from kvview.testing.guard import trouble as guard_trouble_checks
from kvview.testing.harness import (
    Capability,
    GeometryHarness,
    ManagerHarness,
    PoolHarness,
    TierHarness,
    TransferHarness,
)
from kvview.testing.inspect_factory import inspect_factory
from kvview.testing.mutants import Mutant, MutantResult, PlantedFault, load_mutants, run_mutants
from kvview.testing.offloading import examples as offloading_examples
from kvview.testing.offloading.player import ManagerPlayer
from kvview.testing.parametrize import BoundCheck, parametrize_with_checks
from kvview.testing.pool import examples as pool_examples
from kvview.testing.pool.player import PoolPlayer
from kvview.testing.profiles import PROFILES, Profile
from kvview.testing.recorder import LawBroken
from kvview.testing.report import CheckResult, Outcome, Report
from kvview.testing.runner import read_expected_failures, run_checks
from kvview.testing.tier import budget_checks as tier_budget_checks
from kvview.testing.tier import checks as tier_checks
from kvview.testing.tier import guard_checks as tier_guard_checks
from kvview.testing.tier import meanwhile_checks as tier_meanwhile_checks
from kvview.testing.tier.store_harness import GuardedStoreHarness, StoreHarness
from kvview.testing.transfer import checks as transfer_checks
from kvview.testing.transfer import jobs as job_checks
from kvview.testing.transfer import refusals as refusal_checks
from kvview.testing.transfer.compute import GatedComputeStream

__all__ = [
    "CHECKS",
    "PROFILES",
    "BoundCheck",
    "Capability",
    "Check",
    "CheckResult",
    "GatedComputeStream",
    "GeometryHarness",
    "GuardedStoreHarness",
    "LawBroken",
    "ManagerHarness",
    "ManagerPlayer",
    "Mutant",
    "MutantResult",
    "NotExercised",
    "Outcome",
    "PlantedFault",
    "PoolHarness",
    "PoolPlayer",
    "Profile",
    "Report",
    "StoreHarness",
    "TierHarness",
    "TransferHarness",
    "check",
    "checks_for",
    "geometry_checks",
    "guard_checks",
    "guard_surroundings_checks",
    "guard_trouble_checks",
    "inspect_factory",
    "job_checks",
    "leak_checks",
    "load_mutants",
    "load_target",
    "offloading_examples",
    "parametrize_with_checks",
    "pool_examples",
    "read_expected_failures",
    "refusal_checks",
    "run_checks",
    "run_mutants",
    "tier_budget_checks",
    "tier_checks",
    "tier_guard_checks",
    "tier_meanwhile_checks",
    "transfer_checks",
]
