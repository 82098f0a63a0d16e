"""How a stateful machine is run: quietly, by the profile, and shrunk when it fails."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from kvview.testing.profiles import current_profile
from kvview.testing.recorder import LawBroken


def run_machine(make: Callable[[], type[RuleBasedStateMachine]]) -> None:
    """Search for a sequence of calls that breaks a law, and shrink it.

    Args:
        make: Makes the class; its rules raise :class:`LawBroken`, whose script
            shows the calls.

    Raises:
        LawBroken: For the shortest sequence found.
    """
    profile = current_profile()
    machine = make()
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
