"""The conformance kit: the laws of every contract as checks, and what runs them.

A check is a plain function of a factory; one list of them has three runners:
:func:`run_checks` (and ``kvview check``), :func:`parametrize_with_checks`, and
``pytest --pyargs kvview.testing.suite --kvview-target pkg.mod:factory``.
"""

from kvview.targets import load_target
from kvview.testing.checks import CHECKS, Check, check, checks_for
from kvview.testing.connector_checks import NotExercised
from kvview.testing.events import checks as event_checks
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
from kvview.testing.offloading import checks as offloading_checks
from kvview.testing.offloading import completions as completion_checks
from kvview.testing.offloading import conserved as conserved_checks
from kvview.testing.offloading import order as order_checks
from kvview.testing.offloading import turnover as turnover_checks
from kvview.testing.parametrize import BoundCheck, parametrize_with_checks
from kvview.testing.pool import examples as pool_examples
from kvview.testing.pool.player import PoolPlayer
from kvview.testing.profiles import PROFILES, Profile
from kvview.testing.recorder import LawBroken
from kvview.testing.report import CheckResult, Outcome, Report
from kvview.testing.runner import read_expected_failures, run_checks
from kvview.testing.tier import examples as tier_examples
from kvview.testing.tier import guard_examples as tier_guard_examples
from kvview.testing.tier.guard_player import TierGuardPlayer
from kvview.testing.tier.player import TierPlayer
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
    "TierGuardPlayer",
    "TierHarness",
    "TierPlayer",
    "TransferHarness",
    "check",
    "checks_for",
    "completion_checks",
    "conserved_checks",
    "event_checks",
    "geometry_checks",
    "guard_checks",
    "guard_surroundings_checks",
    "guard_trouble_checks",
    "inspect_factory",
    "job_checks",
    "leak_checks",
    "load_mutants",
    "load_target",
    "offloading_checks",
    "order_checks",
    "parametrize_with_checks",
    "pool_examples",
    "read_expected_failures",
    "refusal_checks",
    "run_checks",
    "run_mutants",
    "tier_examples",
    "tier_guard_examples",
    "transfer_checks",
    "turnover_checks",
]
