"""The laws of connectors as checks: one for each that a simulated run can break.

They share one set of runs (:func:`shared_runs`), which the first check starts. A run ends at
the first law that it breaks.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvview.errors import ConfigError
from kvview.testing.checks import Check, CheckFunction, check
from kvview.testing.harness import Factory
from kvview.testing.profiles import Profile, current_profile
from kvview.testing.recorder import LawBroken

if TYPE_CHECKING:
    from kvview.testing.connector import ConnectorFailure, ConnectorRuns
    from kvview.testing.connector.all_seeds import GoesOn
    from kvview.testing.connector.coverage import Gap

COVERAGE = "coverage"
"""What stands for a law where something was not exercised, and its name in expectations:
``coverage: loads``."""
_GAPS_IN_WORDS = 4

LAWS: Mapping[str, str] = {
    "CONN-1": "The halves are made, bound and told of the engine in order.",
    "CONN-2": "What match_prefix promises is there, and it answers.",
    "CONN-3": "Every job that is planned is reported, once, and work comes to an end.",
    "CONN-4": "Every block that is held is given back, whatever happens to its request.",
    "CONN-5": "A request id that comes again is another request.",
    "CONN-6": "A block is held while a store reads it.",
    "CONN-8": "Only KV that is computed, and whole, is stored.",
    "CONN-10": "What a connector's own tier has room for does not become less.",
    "CONN-11": "A reset is done when nothing is in flight.",
    "CONN-12": "No thread outlives the shutdown of its half.",
    "CONN-13": "Nothing is counted as not stored while there is room for all.",
    "EVENT-1": "No event removes what its medium does not hold.",
    "EVENT-2": "What the events advertise can be found, and what is found is advertised.",
    "EVENT-3": "Events are taken once.",
    "EVENT-4": "A store that failed is not advertised.",
    "EVENT-5": "After a reset nothing is advertised.",
    "OFF-1": "A page that is read is not stored over.",
    "OFF-2": "A load takes only what is stored and ready.",
    "OFF-4": "A store that failed is never loaded.",
    "XFER-1": "Every byte that is loaded is the one that was stored.",
    "XFER-2": "A transfer writes the pages it names, and no others.",
    "XFER-4": "What failed, or has not arrived, is not reported as a success.",
    "XFER-5": "Starting a plan does not wait for its copies.",
    "XFER-6": "Transfers are ordered after the compute that they depend on.",
    "POOL-1": "A block is in the free queue exactly when nobody refers to it.",
    "POOL-2": "A block is in the free queue once.",
    "POOL-4": "Only what is held is released, as often as it was touched.",
    "POOL-10": "A closed view is not called.",
}
"""What must hold, by law. What breaks a law that is not here fails the check for all others."""


class NotJudged(Exception):
    """Its runs ended at a failure, before they could show whether a law holds."""


class NotExercised(LawBroken):
    """Nothing is wrong, and something was not checked that must be."""


def shared_runs(factory: Factory) -> ConnectorRuns:
    """The runs of a connector class, simulated or real, by the current profile; made once.

    Raises:
        ConfigError: A library is not installed, or the connector refuses its options.
    """
    try:
        from kvview.testing import watchdog
        from kvview.testing.connector import check_connector, load_engines
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the target is a connector, and checking one needs {error.name}: "
            "pip install 'kvview[reference]'"
        ) from error
    profile = current_profile()
    if factory not in profile.shared and profile.inference:
        profile.shared[factory] = _token_runs(factory, profile)
    if factory not in profile.shared:
        goes_on: GoesOn | None = profile.shared.get("goes_on")
        on_seed: Callable[[int, int, int], None] | None = profile.shared.get("on_progress")

        def on_progress(num_seeds: int, num_failed: int) -> None:
            if on_seed is not None:
                on_seed(num_seeds, profile.num_seeds, num_failed)

        profile.shared[factory] = check_connector(
            factory,  # type: ignore[arg-type]
            seeds=profile.num_seeds,
            first_seed=profile.seed or 0,
            options=profile.options,
            engines=load_engines("reference" if profile.engine is None else profile.engine),
            steps=profile.run_steps,
            hook_seconds=profile.hook_seconds or watchdog.HOOK_SECONDS,
            on_progress=on_progress,
            keep_going=goes_on or profile.keep_going,
        )
    runs: ConnectorRuns = profile.shared[factory]
    return runs


def _token_runs(factory: Factory, profile: Profile) -> ConnectorRuns:
    from kvview.testing import watchdog
    from kvview.testing.token_runs import ENGINE, load_token_check

    on_step: Callable[[str], None] | None = profile.shared.get("on_step")
    return load_token_check(ENGINE if profile.engine is None else profile.engine)(
        factory,  # type: ignore[arg-type]
        seeds=profile.num_seeds,
        first_seed=profile.seed or 0,
        options=profile.options,
        hook_seconds=profile.hook_seconds or watchdog.HOOK_SECONDS,
        on_progress=on_step or (lambda text: None),
    )


def coverage_check(pattern: str) -> Check:
    """Make the check that one item, or all items that match a pattern, were exercised."""
    name = f"{COVERAGE}: {pattern}"

    def run(factory: Factory) -> None:
        require_exercised(factory, lambda gap: fnmatch.fnmatchcase(gap.name, pattern))

    run.__name__ = name
    run.__doc__ = f"{pattern} is exercised."
    return Check(name, COVERAGE, "connector", (), run)


def coverage_check_without(patterns: Sequence[str]) -> CheckFunction:
    """Make :func:`check_coverage_of_simulated_runs` without the items that have their own check."""

    def run(factory: Factory) -> None:
        require_exercised(
            factory, lambda gap: not any(fnmatch.fnmatchcase(gap.name, p) for p in patterns)
        )

    run.__doc__ = check_coverage_of_simulated_runs.__doc__
    return run


def require_exercised(factory: Factory, concerns: Callable[[Gap], bool]) -> None:
    """Raise for the items that the runs did not exercise and that concern the caller."""
    runs = shared_runs(factory)
    gaps = [gap for gap in runs.not_exercised if concerns(gap)]
    _require_all_seeds(runs)
    if gaps:
        num_more = len(gaps) - _GAPS_IN_WORDS
        more = [f"and {num_more} more, as in 'coverage' of --json"] if num_more > 0 else []
        raise NotExercised(
            COVERAGE,
            "; ".join([gap.what for gap in gaps[:_GAPS_IN_WORDS]] + more),
            got=", ".join(gap.name for gap in gaps),
            expected=f"each of them in {runs.num_seeds} seeds",
            script="",
        )


def check_law(factory: Factory, laws: Callable[[str], bool], expected: str, law: str = "") -> None:
    """Refuse a connector whose runs broke one of these laws.

    Args:
        factory: Makes the connector.
        laws: Whether a law is one of them.
        expected: Meaning of the laws, for the message.
        law: The law, if it is one only. A law of transfers is not checked if the engine replaced
            a part of the connector, because the replaced parts copy the bytes.
    """
    runs = shared_runs(factory)
    failures = [failure for failure in runs.failures if laws(failure.law)]
    if failures:
        raise _broken(failures, runs, expected)
    _require_all_seeds(runs)
    if runs.replaced and law.startswith("XFER-"):
        parts = ", ".join(runs.replaced)
        raise NotExercised(
            law,
            f"{law} depends on a part of the connector that the check replaced: {parts}",
            got=f"replaced: {parts}",
            expected="the connector's own code",
            script="",
        )


def _require_all_seeds(runs: ConnectorRuns) -> None:
    """Skip: the law held until the runs ended early, which is not a verdict."""
    if runs.is_interrupted:
        raise KeyboardInterrupt
    if runs.is_cut_short:
        first = runs.failures[-1]
        told = f"the runs ended at seed {first.seed}, which breaks {first.law}"
        raise NotJudged(f"{told}: {runs.progress()}")


def _broken(failures: Sequence[ConnectorFailure], runs: ConnectorRuns, expected: str) -> LawBroken:
    first = failures[0]
    alike = [failure for failure in failures if failure.law == first.law]
    return LawBroken(
        first.law,
        first.message,
        got=f"{len(alike)} of {runs.num_seeds} seeds break it",
        expected="no hook raises, or returns what no engine can use"
        if first.is_hook_error
        else expected,
        script=first.script,
        seeds=[failure.seed for failure in alike],
        timeline=first.timeline,
    )


def _register(law: str, summary: str) -> None:
    def run(factory: Factory) -> None:
        check_law(factory, lambda broken: broken == law, summary, law)

    run.__name__ = f"check_{law.lower().replace('-', '_')}_in_simulated_runs"
    run.__doc__ = summary
    globals()[run.__name__] = check(law, contract="connector")(run)


for _law, _summary in LAWS.items():
    _register(_law, _summary)


@check("*", contract="connector")
def check_any_other_law_in_simulated_runs(factory: Factory) -> None:
    """No other law is broken either."""
    check_law(factory, lambda broken: broken not in LAWS, "no law broken")


@check(COVERAGE, contract="connector")
def check_coverage_of_simulated_runs(factory: Factory) -> None:
    """Every event that simulated runs require happened."""
    require_exercised(factory, lambda gap: True)
