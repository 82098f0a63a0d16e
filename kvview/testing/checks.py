"""The registry: every check of every contract, in one list.

A check is a plain function that takes a factory. The check makes a harness, calls its methods, and
raises :class:`~kvview.testing.LawBroken` if a law does not hold. A test may call a check directly.
A runner finds each check in this list, with its law and the capabilities that it requires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps

from kvview.testing.harness import Capability, Contract, Factory

EXCEPTIONS = "exceptions"
"""Name used instead of a law if a hook or thread raised, or a hook returned a wrong value."""

_FAMILIES = ("CONN", "HAND", "POOL", "GUARD", "GEO", "OFF", "EVENT", "XFER", "TIER")

CheckFunction = Callable[[Factory], None]


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        name: Name of the function, for ``expected_failures`` and ``select``.
        law: The law that the check tests; ``POOL-*`` for all laws of a contract.
        contract: The contract of the harnesses that the check accepts.
        requires: Capabilities without which the check is skipped.
        function: The check itself.
    """

    name: str
    law: str
    contract: Contract
    requires: tuple[Capability, ...]
    function: CheckFunction

    @property
    def summary(self) -> str:
        """Summary of the part of the law that the check tests, in one line."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]


CHECKS: list[Check] = []
"""All checks, in no special order."""

_running: ContextVar[CheckFunction | None] = ContextVar("kvview_check", default=None)


def running_check() -> CheckFunction | None:
    """Return the check that is running, for a script that repeats it; None outside of checks."""
    return _running.get()


def check(
    law: str, *requires: Capability, contract: Contract
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a function as a check of a law."""

    def register(function: CheckFunction) -> CheckFunction:
        @wraps(function)
        def run(factory: Factory) -> None:
            token = _running.set(run)
            try:
                function(factory)
            finally:
                _running.reset(token)

        CHECKS.append(Check(function.__name__, law, contract, requires, run))
        return run

    return register


def checks_for(contract: Contract) -> Sequence[Check]:
    """Return the checks of one contract, sorted by law, with the long searches last."""
    return sorted((check for check in CHECKS if check.contract == contract), key=_place)


def _place(check: Check) -> tuple[bool, int, int]:
    family, _, number = check.law.partition("-")
    if check.law == EXCEPTIONS:  # exceptions come first, because they cause other failures
        return False, -1, 0
    if not number.isdigit():
        return True, 0, 0
    return False, _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES), int(number)
