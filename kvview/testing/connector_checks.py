"""The laws of connectors as checks, one for each law that a simulated run can break.

The checks share one set of runs (:func:`shared_runs`), which the first check starts. A run ends at
the first broken law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvview.laws import laws as all_laws
from kvview.testing.checks import CHECKS, EXCEPTIONS, Check, coverage_check
from kvview.testing.effort import Effort, current_effort
from kvview.testing.results.law_broken import Gap, LawBroken, NotExercised
from kvview.testing.suites.capability import Factory

if TYPE_CHECKING:
    from kvview.testing.connector import ConnectorFailure, ConnectorRuns
    from kvview.testing.connector.check import GoesOn

NUM_SEEDS = 200
"""Default number of simulated runs of a connector."""

_NO_EXCEPTION = "No hook and no thread raises, and hooks return values that an engine can use."

_NUMBERS = {
    "CONN": (1, 2, 3, 4, 5, 6, 8, 10, 11, 12, 13),
    "EVENT": (1, 2, 3, 4, 5),
    "OFF": (1, 2, 4),
    "XFER": (1, 2, 4, 5, 6),
    "POOL": (1, 2, 4, 10),
}
LAWS = frozenset(f"{family}-{one}" for family, numbers in _NUMBERS.items() for one in numbers)
"""The laws that a simulated run can break, each with its own check.

If a run breaks a law that is not listed, the check of any other law fails.
"""


class NotJudged(Exception):
    """The runs ended at a failure, so they do not show whether the law of the check holds."""


class NotApplicable(Exception):
    """The runs ended without a failure, and none of them could break the law of the check."""


def shared_runs(factory: Factory) -> ConnectorRuns:
    """Return the runs of a connector class with the current settings, which are made once.

    Raises:
        ConfigError: The connector refuses its options.
        ModuleNotFoundError: A library of the reference engine is not installed.
    """
    from kvview.testing.connector import check_connector, load_engines
    from kvview.testing.connector.tally import merge_shards

    effort = current_effort()
    if factory not in effort.shared and effort.inference:
        effort.shared[factory] = _token_runs(factory, effort)
    if factory not in effort.shared and effort.merged:
        effort.shared[factory] = merge_shards(
            factory,  # type: ignore[arg-type]
            effort.merged,
            effort.shared.get("lines", {}),
        )
    if factory not in effort.shared:
        number = len(effort.scenarios) or effort.seeds or NUM_SEEDS
        goes_on: GoesOn | None = effort.shared.get("goes_on")
        on_progress = effort.shared.get("on_progress", _ignore)
        effort.shared[factory] = check_connector(
            factory,  # type: ignore[arg-type]
            seeds=number,
            first_seed=effort.seed,
            options=effort.options,
            engines=load_engines("reference" if effort.engine is None else effort.engine),
            steps=effort.steps,
            hook_seconds=effort.hook_seconds,
            on_progress=lambda done, failed: on_progress(
                f"{done} of {number} seeds, {failed} failed"
            ),
            keep_going=goes_on or effort.keep_going,
            shard=effort.shard,
            scenarios=effort.scenarios,
            lines=effort.shared.get("lines", {}),
        )
    runs: ConnectorRuns = effort.shared[factory]
    return runs


def _token_runs(factory: Factory, effort: Effort) -> ConnectorRuns:
    from kvview.testing.token_runs import ENGINE, load_token_check

    return load_token_check(ENGINE if effort.engine is None else effort.engine)(
        factory,
        seeds=effort.seeds or 1,
        first_seed=effort.seed,
        options=effort.options,
        hook_seconds=effort.hook_seconds,
        on_progress=effort.shared.get("on_progress", _ignore),
    )


def _ignore(text: str) -> None:
    pass


def checks_in(runs: str, laws: Sequence[str], coverage: str) -> list[Check]:
    """Make the checks of some runs: one for each law, one for all other laws, and the coverage.

    Args:
        runs: Name of the runs, for the names of the checks.
        laws: The laws, each with its own check.
        coverage: Summary of the coverage that the runs require.
    """
    checks = [_law_check(law, runs) for law in laws]

    def any_other(factory: Factory) -> None:
        check_law(factory, lambda broken: broken not in laws, "no law broken")

    name = f"check_any_other_law_in_{runs}"
    checks.append(Check(name, "No other law is broken.", "*", "connector", (), any_other))
    name = f"check_coverage_of_{runs}"
    return [*checks, coverage_check(name, coverage, "connector", _gaps)]


def _law_check(law: str, runs: str) -> Check:
    summary = _NO_EXCEPTION if law == EXCEPTIONS else f"{all_laws()[law].title}."

    def run(factory: Factory) -> None:
        check_law(factory, lambda broken: broken == law, summary, law)

    name = f"check_{law.lower().replace('-', '_')}_in_{runs}"
    return Check(name, summary, law, "connector", (), run)


def _gaps(factory: Factory) -> Sequence[Gap]:
    """List the items that the runs did not exercise."""
    runs = shared_runs(factory)
    _require_all_seeds(runs)
    return runs.not_exercised


def check_law(factory: Factory, laws: Callable[[str], bool], expected: str, law: str = "") -> None:
    """Fail if the runs of a connector broke one of these laws.

    Args:
        factory: Makes the connector.
        laws: Returns whether a law is one of the checked laws.
        expected: Meaning of the laws, for the message.
        law: The law, if only one law is checked. A law of transfers is not checked if the engine
            replaced a part of the connector, because the replaced parts copy the bytes.
    """
    runs = shared_runs(factory)
    failures = [failure for failure in runs.failures if laws(failure.filed_under)]
    if failures:
        raise _broken(failures, runs, expected)
    _require_all_seeds(runs)
    if runs.laws is not None and law in LAWS:
        if law not in runs.laws:
            raise NotApplicable(f"runs of a connector of {runs.engine} itself do not show this law")
        if law.startswith("EVENT-") and not runs.coverage.get("events"):
            raise NotApplicable("the connector reported no event")
    if runs.replaced and law.startswith("XFER-"):
        parts = ", ".join(runs.replaced)
        text = f"{law} depends on a part of the connector that the check replaced: {parts}"
        raise NotExercised([Gap(law, text)])


def _require_all_seeds(runs: ConnectorRuns) -> None:
    """Skip the check if the runs ended early, because the missing runs might break the law."""
    if runs.is_interrupted:
        raise KeyboardInterrupt
    if runs.is_cut_short:
        first = runs.failures[-1]
        told = f"the runs ended at seed {first.seed}, which breaks {first.filed_under}"
        raise NotJudged(f"{told}: {runs.progress()}")


def _broken(failures: Sequence[ConnectorFailure], runs: ConnectorRuns, expected: str) -> LawBroken:
    message = current_effort().expected_message
    first = next((failure for failure in failures if message not in failure.message), failures[0])
    alike = [failure for failure in failures if failure.filed_under == first.filed_under]
    return LawBroken(
        first.filed_under,
        first.message,
        got=f"{len(alike)} of {runs.num_seeds} seeds break it",
        expected=expected,
        script=first.script,
        seeds=[failure.seed for failure in alike],
        log=first.log,
        hint=first.hint,
    )


CHECKS.extend(
    checks_in(
        "simulated_runs",
        [EXCEPTIONS, *sorted(LAWS)],
        "Every event that simulated runs require has happened.",
    )
)
