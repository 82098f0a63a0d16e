"""An injected fault: a wrong implementation that shows which faults the checks detect."""

from __future__ import annotations

from dataclasses import dataclass

from kvview.testing.effort import Effort
from kvview.testing.results.law_broken import LawBroken
from kvview.testing.runner import PlannedCheck, plan_checks, run_planned
from kvview.testing.suites.capability import Factory


@dataclass(frozen=True)
class Mutant:
    """One wrong implementation.

    Args:
        factory: Factory of the wrong harness.
        law: The law that the implementation breaks.
        what: The fault, in one line.
        incident: The public thread about this fault in a real system, or None.
    """

    factory: Factory
    law: str
    what: str
    incident: str | None = None

    @property
    def name(self) -> str:
        """Name of the factory."""
        return getattr(self.factory, "__name__", repr(self.factory))

    def first_failure(self) -> LawBroken | None:
        """Run the kit until a check fails, and return the failure, which is not shrunk.

        The checks of the broken law come first, then the checks of its family.

        A check whose capabilities the harness does not declare is skipped, as for any target.
        """
        effort = Effort(is_brief=True)
        planned = plan_checks(self.factory, effort)[1]
        family = self.law.partition("-")[0]

        def place(one: PlannedCheck) -> tuple[bool, bool]:  # because a family shares one search
            return one.check.law != self.law, not one.check.law.startswith(f"{family}-")

        for one in sorted(planned, key=place):
            failure = run_planned(one, effort).failure
            if failure is not None:
                return failure
        return None
