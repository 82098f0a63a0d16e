"""How a stateful machine is run: quietly, by the profile, and shrunk when it fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from kvview.testing.profiles import current_profile
from kvview.testing.recorder import LawBroken

MAX_SHRINK_RUNS = 1000


def run_machine(make: Callable[[], type[RuleBasedStateMachine]]) -> None:
    """Search for a sequence of calls that breaks a law, and shrink it.

    Args:
        make: Makes the class; its rules raise :class:`LawBroken`, whose script
            shows the calls.

    Raises:
        LawBroken: For the shortest sequence found.
    """
    profile = current_profile()
    found: list[LawBroken] = []
    machine = _bounded(make(), found)
    if profile.seed is not None:
        seed(profile.seed)(machine)
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=profile.num_examples,
                stateful_step_count=profile.num_steps,
                derandomize=profile.seed is None,
                database=None,
                deadline=None,
                phases=(Phase.generate, Phase.shrink),
                print_blob=False,
                report_multiple_bugs=False,
                verbosity=Verbosity.normal,
                suppress_health_check=list(HealthCheck),
            ),
        )
    except LawBroken as broken:
        # Hypothesis adds its own account of the calls; the script says it better.
        vars(broken).pop("__notes__", None)
        raise
    except BaseException:
        if machine.num_runs <= MAX_SHRINK_RUNS:
            raise
        raise min(found, key=lambda broken: len(broken.script)) from None


class _ShrunkLongEnough(BaseException):
    """Ends a search: Hypothesis takes an ``Exception`` for one more failure."""


def _bounded(machine: type[RuleBasedStateMachine], found: list[LawBroken]) -> Any:
    """The machine, with an end to shrinking: Hypothesis itself stops after five minutes."""

    class Bounded(machine):  # type: ignore[misc,valid-type]
        num_runs = 0

        def __init__(self) -> None:
            if found:
                Bounded.num_runs += 1
                if Bounded.num_runs > MAX_SHRINK_RUNS:
                    raise _ShrunkLongEnough
            super().__init__()

        def teardown(self) -> None:
            super().teardown()
            error = sys.exc_info()[1]  # Hypothesis tears down while it flies
            if isinstance(error, LawBroken):
                found.append(error)

    return Bounded
