"""The report of a run of checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvview.laws import titled
from kvview.testing.checks import Check
from kvview.testing.results.law_broken import LawBroken, NotExercised
from kvview.testing.suites.capability import Contract

if TYPE_CHECKING:
    from kvview.testing.connector import ConnectorRuns


class Outcome(StrEnum):
    """The outcome of one check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    EXPECTED_FAILURE = "expected failure"
    UNEXPECTED_PASS = "unexpected pass"
    NOT_CHECKED = "not checked"


BAD = (Outcome.FAILED, Outcome.UNEXPECTED_PASS)
"""The outcomes that make a run fail. With the outcome *not checked* a run has no verdict."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Args:
        check: The check.
        outcome: Outcome of the check.
        seconds: Duration of the check in seconds.
        reason: Reason why the check was skipped or expected to fail; otherwise empty.
        failure: The failure, expected or not; None if the check passed.
        part: Name of the part that was checked; empty for the target itself.
        link: Address of the thread about an expected failure; otherwise empty.
    """

    check: Check
    outcome: Outcome
    seconds: float = 0.0
    reason: str = ""
    failure: LawBroken | None = None
    part: str = ""
    link: str = ""

    @property
    def name(self) -> str:
        """Name of the check."""
        return self.check.name

    @property
    def full_name(self) -> str:
        """Name of the check, after the name of its part if it checks one."""
        return f"{self.part} {self.check.name}".lstrip()

    @property
    def law(self) -> str:
        """Law of the check."""
        return self.check.law

    @property
    def summary(self) -> str:
        """The promise that the check tests, in one line."""
        return self.check.summary


def _names_a_cause(failure: LawBroken | None) -> bool:
    """Whether jobs failed by themselves, because of which other checks may be incomplete."""
    return isinstance(failure, NotExercised) and failure.gaps[0].name.startswith("failed ")


@dataclass(frozen=True)
class Report:
    """Results of a run, in the order in which the checks ran.

    Args:
        target: Name of the checked target.
        contract: Contract of the harness.
        seed: The first seed.
        num_seeds: Number of runs of a search.
        results: One result for each check that ended.
        num_selected: Number of selected checks.
        is_interrupted: Whether Ctrl-C or SIGTERM ended the run early.
        runs: For a connector, the simulated runs that its checks share; None until the runs have
            ended.
        engine: Name of the engine that ran the target; empty for a target without an engine.
        versions: Versions of the packages used, by name.
    """

    target: str
    contract: Contract
    seed: int
    num_seeds: int
    results: Sequence[CheckResult]
    num_selected: int
    is_interrupted: bool = False
    runs: ConnectorRuns | None = None
    engine: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Whether every check ended with its expected outcome."""
        has_ended = len(self.results) == self.num_selected
        return has_ended and not (self.is_interrupted or self.failures or self.not_checked)

    @property
    def not_checked(self) -> list[CheckResult]:
        """The results of checks whose law or event was not exercised; the causes come first."""
        found = [result for result in self.results if result.outcome is Outcome.NOT_CHECKED]
        return sorted(found, key=lambda result: not _names_a_cause(result.failure))

    @property
    def seconds(self) -> float:
        """Duration of all checks, in seconds."""
        return round(sum(result.seconds for result in self.results), 3)

    @property
    def failures(self) -> list[CheckResult]:
        """The results because of which the run fails."""
        return [result for result in self.results if result.outcome in BAD]

    @property
    def counts(self) -> dict[str, int]:
        """Number of results by outcome, for the outcomes that occur."""
        found = Counter(result.outcome for result in self.results)
        return {outcome.value: found[outcome] for outcome in Outcome if found[outcome]}

    def verdict(self) -> str:
        """Return the verdict in one line: green, red or another outcome, and the first reason."""
        for result in self.failures:
            failure = result.failure
            if failure is None:
                return (
                    f"red: {result.check.name} passed, but is expected to fail; remove it from the "
                    "expected failures"
                )
            part = f"{result.part}: " if result.part else ""
            return f"red: {part}{titled(failure.law)}: {failure.what}"
        if self.is_interrupted:
            checks = f"{len(self.results)} of {self.num_selected} checks"
            return f"interrupted: {checks if self.runs is None else self.runs.progress()}"
        for result in self.not_checked:
            part = f"{result.part}: " if result.part else ""
            what = result.failure.what if result.failure else result.check.name
            return f"not checked: {part}{what}"
        if self.is_clean and (number := self.counts.get(Outcome.EXPECTED_FAILURE, 0)):
            plural = "" if number == 1 else "s"
            return f"green, {number} expected failure{plural}: every other law checked holds"
        if self.is_clean:
            return "green: every law that was checked holds"
        return "not checked: no check has a result"

    def require_clean(self) -> None:
        """Raise the first failure, or else the first missing part, in a test of pytest.

        Examples:
            >>> def test_connector():
            ...     run_checks(MyConnector, seeds=50).require_clean()

        Raises:
            LawBroken: A law is broken, or a part of the check is missing.
            AssertionError: The run is not clean for another reason.
        """
        for result in (*self.failures, *self.not_checked):
            if result.failure is not None:
                raise result.failure
        assert self.is_clean, self.verdict()

    def summary(self) -> str:
        """Return one line with the counts, the seeds, and the progress of an unfinished run."""
        return f"{self.target}: {self.outcome()} ({self.effort()})"

    def outcome(self) -> str:
        """Return the results by outcome, and the progress of an unfinished run."""
        parts = [f"{number} {outcome}" for outcome, number in self.counts.items()]
        if self.is_interrupted:
            parts.append(self.interruption())
        elif self.runs is not None and self.runs.is_cut_short:
            parts.append(f"in {self.runs.num_seeds} of {self.runs.num_asked} seeds")
        return ", ".join(parts or ["nothing ran"])

    def interruption(self) -> str:
        """Return the progress of an interrupted run."""
        if self.runs is not None:
            return f"{self.runs.progress()}, interrupted"
        return f"interrupted after {len(self.results)} of {self.num_selected} checks"

    def effort(self) -> str:
        """Return the engine and the seeds, in a few words."""
        engine = f"engine {self.engine}, " if self.engine else ""
        if self.runs is None:
            return f"{engine}{self.num_seeds} seeds from {self.seed}"
        number = self.runs.num_asked or self.runs.num_seeds
        if (shard := self.runs.shard) is not None:
            return f"{engine}shard {shard.number}/{shard.of}: {number} seeds"
        return f"{engine}{number} seeds from {self.runs.first_seed}"

    @property
    def checks(self) -> Sequence[CheckResult]:
        """Return the results under the name that the JSON uses."""
        return self.results

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON, as :class:`~kvview.testing.schema.ReportModel` defines it."""
        from kvview.testing.results.schema import ReportModel

        return ReportModel.model_validate(self).model_dump(mode="json")

    def __iter__(self) -> Iterator[CheckResult]:
        return iter(self.results)
