"""The conformance kit: the laws of every contract as checks, and the commands that run them.

An implementer of a pool, a manager, a worker or a store derives one small class from the suite of
the contract, such as :class:`PoolConformance`; pytest and ``kvview check`` run this class. A class
of connectors is checked as it is, by ``kvview check`` or :func:`run_checks`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvview.targets import load_target as load_target
    from kvview.testing.checks import Check as Check, all_checks as all_checks
    from kvview.testing.effort import Effort as Effort
    from kvview.testing.handoff.suite import HandoffConformance as HandoffConformance
    from kvview.testing.offloading.suite import OffloadingConformance as OffloadingConformance
    from kvview.testing.pool.suite import PoolConformance as PoolConformance
    from kvview.testing.results.expected import (
        ExpectedFailure as ExpectedFailure,
        read_expected as read_expected,
    )
    from kvview.testing.results.law_broken import (
        LawBroken as LawBroken,
        NotExercised as NotExercised,
    )
    from kvview.testing.results.report import (
        CheckResult as CheckResult,
        Outcome as Outcome,
        Report as Report,
    )
    from kvview.testing.runner import run_checks as run_checks
    from kvview.testing.suites.capability import Capability as Capability
    from kvview.testing.suites.inspect_target import inspect_target as inspect_target
    from kvview.testing.tier.suite import TierConformance as TierConformance
    from kvview.testing.transfer.compute import GatedComputeStream as GatedComputeStream
    from kvview.testing.transfer.suite import TransferConformance as TransferConformance


# Loaded on first use, because an engine imports rooms of this package, but no Hypothesis.
_MODULES = {
    "kvview.targets": ("load_target",),
    "kvview.testing.checks": ("Check", "all_checks"),
    "kvview.testing.effort": ("Effort",),
    "kvview.testing.handoff.suite": ("HandoffConformance",),
    "kvview.testing.offloading.suite": ("OffloadingConformance",),
    "kvview.testing.pool.suite": ("PoolConformance",),
    "kvview.testing.results.expected": ("ExpectedFailure", "read_expected"),
    "kvview.testing.results.law_broken": ("LawBroken", "NotExercised"),
    "kvview.testing.results.report": ("CheckResult", "Outcome", "Report"),
    "kvview.testing.runner": ("run_checks",),
    "kvview.testing.suites.capability": ("Capability",),
    "kvview.testing.suites.inspect_target": ("inspect_target",),
    "kvview.testing.tier.suite": ("TierConformance",),
    "kvview.testing.transfer.compute": ("GatedComputeStream",),
    "kvview.testing.transfer.suite": ("TransferConformance",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Return a name of this package from its module."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
