"""The conformance kit: the laws of every contract as checks, and the commands that run them.

A check is a plain function that takes a factory. Two runners run the same list of checks:
:func:`run_checks` (and ``kvview check``), and :func:`parametrize_with_checks` for pytest.
"""

from importlib import import_module

from kvview.targets import load_target
from kvview.testing.checks import CHECKS, Check, check, checks_for
from kvview.testing.connector_checks import NotExercised
from kvview.testing.effort import Effort
from kvview.testing.harness import (
    Capability,
    ManagerHarness,
)
from kvview.testing.inspect_factory import inspect_factory
from kvview.testing.law_broken import LawBroken
from kvview.testing.offloading.player import ManagerPlayer
from kvview.testing.parametrize import BoundCheck, parametrize_with_checks
from kvview.testing.pool.suite import PoolConformance
from kvview.testing.report import CheckResult, Outcome, Report
from kvview.testing.runner import read_expected_failures, run_checks
from kvview.testing.tier.suite import TierConformance
from kvview.testing.transfer.compute import GatedComputeStream
from kvview.testing.transfer.suite import TransferConformance

# These imports register the checks that a model cannot state.
for _module in ("offloading.examples",):
    import_module(f"{__name__}.{_module}")

__all__ = [
    "CHECKS",
    "BoundCheck",
    "Capability",
    "Check",
    "CheckResult",
    "Effort",
    "GatedComputeStream",
    "LawBroken",
    "ManagerHarness",
    "ManagerPlayer",
    "NotExercised",
    "Outcome",
    "PoolConformance",
    "Report",
    "TierConformance",
    "TransferConformance",
    "check",
    "checks_for",
    "inspect_factory",
    "load_target",
    "parametrize_with_checks",
    "read_expected_failures",
    "run_checks",
]
