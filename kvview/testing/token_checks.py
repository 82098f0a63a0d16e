"""Checks of real tokens: a connector in an engine that runs a model.

The engine's own package serves (:mod:`kvview.testing.token_runs`); these report the result, law
by law, with every other check.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvview.testing.checks import Check
from kvview.testing.connector_checks import COVERAGE, check_law, require_exercised
from kvview.testing.harness import Factory

LAWS: Mapping[str, str] = {
    "CONN-3": "Every request is answered, and the engine comes to rest.",
    "CONN-4": "Every block is given back.",
    "CONN-11": "After a reset nothing of other weights is loaded.",
    "XFER-1": "The tokens are those without the connector.",
}


def token_checks() -> list[Check]:
    """The checks, by law."""
    return [*(_check(law, what) for law, what in LAWS.items()), _any_other(), _coverage()]


def _check(law: str, what: str) -> Check:
    def run(factory: Factory) -> None:
        check_law(factory, lambda broken: broken == law, what, law)

    run.__doc__ = what
    name = f"check_{law.lower().replace('-', '_')}_in_real_inference"
    return Check(name, law, "connector", (), run)


def _any_other() -> Check:
    def run(factory: Factory) -> None:
        """The engine continues, and no other law is broken."""
        check_law(factory, lambda broken: broken not in LAWS, "no law broken")

    return Check("check_any_other_law_in_real_inference", "*", "connector", (), run)


def _coverage() -> Check:
    def run(factory: Factory) -> None:
        """Something was loaded, and a fault planted over it changed tokens."""
        require_exercised(factory, lambda gap: True)

    return Check("check_coverage_of_real_inference", COVERAGE, "connector", (), run)
