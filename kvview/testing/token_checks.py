"""Checks of real tokens, which a connector in an engine with a model produces.

The engine's package runs the model (:mod:`kvview.testing.token_runs`); these checks report the
result by law.
"""

from __future__ import annotations

from kvview.testing.checks import Check
from kvview.testing.connector_checks import COVERAGE, check_law, law_check, require_exercised
from kvview.testing.harness import Factory

LAWS = ("CONN-3", "CONN-4", "CONN-11", "XFER-1")


def token_checks() -> list[Check]:
    """Make the checks, sorted by law."""
    runs = {law: law_check(law, "real_inference") for law in LAWS}
    named = [Check(run.__name__, law, "connector", (), run) for law, run in runs.items()]
    return [*named, _any_other(), _coverage()]


def _any_other() -> Check:
    def run(factory: Factory) -> None:
        """The engine continues to run, and no other law is broken."""
        check_law(factory, lambda broken: broken not in LAWS, "no law broken")

    return Check("check_any_other_law_in_real_inference", "*", "connector", (), run)


def _coverage() -> Check:
    def run(factory: Factory) -> None:
        """Blocks were loaded, and a fault that was injected into loads changed tokens."""
        require_exercised(factory, lambda gap: True)

    return Check("check_coverage_of_real_inference", COVERAGE, "connector", (), run)
