"""The registry: every check of every contract, in one list.

A check is a plain function of a factory. It makes a harness, calls it, and
raises :class:`~kvview.testing.LawBroken` if a law does not hold; it can be called
alone. A runner finds it here with its law and the capabilities that it requires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import NoReturn, Protocol, TypeVar

from kvview.testing import watchdog
from kvview.testing.harness import Capability, Contract, Factory

EXCEPTIONS = "exceptions"
"""In place of a law where a hook or a thread of a connector raised an exception, or a hook
returned a value that no engine can use."""

_FAMILIES = ("CONN", "HAND", "POOL", "GUARD", "GEO", "OFF", "EVENT", "XFER", "TIER")

_CALL_SECONDS = 10.0
"""CPU seconds that one call may take; one that uses none is given four times as long."""

CheckFunction = Callable[[Factory], None]


class Ends(Protocol):
    """The object that makes the calls of one check."""

    def end(self) -> None:
        """Release everything that was taken, also after a failure."""

    def does_not_return(self, error: BaseException) -> NoReturn:
        """A call was ended by the watchdog: the law is broken."""


DriverT = TypeVar("DriverT", bound=Ends)


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        name: Name of the function, which ``expected_failures`` and ``select`` take.
        law: The law that it checks; ``POOL-*`` when it is all of a contract.
        contract: The contract of the harnesses that its factory makes.
        requires: Capabilities without which it is skipped.
        function: The check itself.
    """

    name: str
    law: str
    contract: Contract
    requires: tuple[Capability, ...]
    function: CheckFunction

    @property
    def summary(self) -> str:
        """The promise, in one line."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]


CHECKS: list[Check] = []
"""All checks, in no special order."""

_running: ContextVar[CheckFunction | None] = ContextVar("kvview_check", default=None)


def running_check() -> CheckFunction | None:
    """The check that is running, for a script that runs it again; None outside any."""
    return _running.get()


def check(
    law: str, *requires: Capability, contract: Contract
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a function of a factory as a check of a law."""

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


def run_watched(made: Ends, moves: Callable[[], None]) -> None:
    """Make moves, and end their maker; a call that does not return breaks the law."""
    with watchdog.limit(_CALL_SECONDS), watchdog.watching(), watchdog.calling():
        try:
            try:
                moves()
            finally:
                made.end()
        except watchdog.HookTimeout as error:
            made.does_not_return(error)


def checks_driving(
    driver: Callable[[Factory, str], DriverT], *, contract: Contract
) -> Callable[..., Callable[[Callable[[DriverT], None]], CheckFunction]]:
    """Make the decorator ``(law, *requires)`` of checks that take a driver instead of a factory.

    Args:
        driver: Makes one from a factory and the law; it is ended whatever comes of the check.
        contract: The contract of the harnesses that its factories make.
    """

    def of_law(
        law: str, *requires: Capability
    ) -> Callable[[Callable[[DriverT], None]], CheckFunction]:
        def register(body: Callable[[DriverT], None]) -> CheckFunction:
            @check(law, *requires, contract=contract)
            @wraps(body)
            def run(factory: Factory) -> None:
                made = driver(factory, law)
                run_watched(made, partial(body, made))

            return run

        return register

    return of_law


def checks_for(contract: Contract) -> Sequence[Check]:
    """The checks of one contract, by law; the long searches come last."""
    return sorted((check for check in CHECKS if check.contract == contract), key=_place)


def _place(check: Check) -> tuple[bool, int, int]:
    family, _, number = check.law.partition("-")
    if check.law == EXCEPTIONS:  # first, because exceptions are causes
        return False, -1, 0
    if not number.isdigit():
        return True, 0, 0
    return False, _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES), int(number)
