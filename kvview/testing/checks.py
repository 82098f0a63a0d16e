"""The registry: every check of every contract, in one list.

A check is a function that takes a target, and raises :class:`~kvview.testing.LawBroken` if its law
does not hold. A runner finds each check in this list, with its law and the capabilities that it
requires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from kvview.testing.results.law_broken import COVERAGE, Gap, NotExercised
from kvview.testing.suites.capability import Capability, Contract, Factory

EXCEPTIONS = "exceptions"
"""Name used instead of a law if a hook or thread raised, or a hook returned a wrong value."""

_FAMILIES = ("CONN", "HAND", "POOL", "GUARD", "GEO", "OFF", "EVENT", "XFER", "TIER")

CheckFunction = Callable[[Factory], None]
FindGaps = Callable[[Factory], Sequence[Gap]]


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        name: Name of the check, for expected failures and ``select``.
        summary: Summary of the part of the law that the check tests, in one line.
        law: The law that the check tests; ``POOL-*`` for all laws of a contract.
        contract: The contract of the harnesses that the check accepts.
        requires: Capabilities without which the check is skipped.
        function: The check itself.
        gaps: For a check of the coverage, lists the parts of the check that are missing.
    """

    name: str
    summary: str
    law: str
    contract: Contract
    requires: tuple[Capability, ...]
    function: CheckFunction
    gaps: FindGaps | None = None


def coverage_check(name: str, summary: str, contract: Contract, gaps: FindGaps) -> Check:
    """Make the check that nothing is missing.

    Args:
        name: Name of the check.
        summary: Its promise, in one line.
        contract: The contract of its targets.
        gaps: Lists the missing parts.
    """

    def run(factory: Factory) -> None:
        if found := gaps(factory):
            raise NotExercised(found)

    return Check(name, summary, COVERAGE, contract, (), run, gaps)


CHECKS: list[Check] = []
"""The checks that were registered so far; see :func:`all_checks`."""

_SUITES = ("pool", "offloading", "transfer", "tier", "handoff")


def all_checks() -> Sequence[Check]:
    """Return the checks of all contracts, in no special order."""
    import_module("kvview.testing.connector_checks")  # each module registers its checks
    for contract in _SUITES:
        import_module(f"kvview.testing.{contract}.suite")
    import_module("kvview.testing.tier.transform_suite")
    return CHECKS


def checks_for(contract: Contract) -> Sequence[Check]:
    """Return the checks of one contract, sorted by law; its suite has registered them."""
    return sorted((check for check in CHECKS if check.contract == contract), key=_place)


def _place(check: Check) -> tuple[bool, int, int]:
    family, _, number = check.law.partition("-")
    if check.law == EXCEPTIONS:  # exceptions come first, because they cause other failures
        return False, -1, 0
    if not number.isdigit():
        return True, 0, 0
    return False, _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES), int(number)
