"""The report of a run of checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvview.laws import titled
from kvview.testing.checks import Check
from kvview.testing.harness import Contract
from kvview.testing.recorder import LawBroken

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
"""The outcomes that make a run fail; one that is not checked leaves it without a verdict."""


@dataclass(frozen=True)
class CheckResult:
    """The end of one check.

    Args:
        check: The check.
        outcome: How it ended.
        seconds: Its duration in seconds.
        reason: Why it was skipped or expected to fail; empty otherwise.
        failure: The failure, expected or not; None if it passed.
    """

    check: Check
    outcome: Outcome
    seconds: float = 0.0
    reason: str = ""
    failure: LawBroken | None = None


@dataclass(frozen=True)
class Report:
    """Results of a run, in the order in which the checks ran.

    Args:
        target: What was checked.
        contract: Of the harness.
        profile: Name of the profile.
        seed: Of everything random; None when derandomised.
        results: One for each check that ended.
        num_selected: Checks that were to run.
        is_interrupted: Whether Ctrl-C or SIGTERM ended the run.
        runs: Of a connector, the simulated runs that its checks share; None before them.
        versions: Versions of the packages used, by name.
    """

    target: str
    contract: Contract
    profile: str
    seed: int | None
    results: Sequence[CheckResult]
    num_selected: int
    is_interrupted: bool = False
    runs: ConnectorRuns | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Whether every check ended, as it should."""
        has_ended = len(self.results) == self.num_selected
        return has_ended and not (self.is_interrupted or self.failures or self.not_checked)

    @property
    def not_checked(self) -> list[CheckResult]:
        """The results of checks whose subject was not exercised."""
        return [result for result in self.results if result.outcome is Outcome.NOT_CHECKED]

    @property
    def seconds(self) -> float:
        """Duration of all checks, in seconds."""
        return sum(result.seconds for result in self.results)

    @property
    def failures(self) -> list[CheckResult]:
        """The results that make the run fail."""
        return [result for result in self.results if result.outcome in BAD]

    def counts(self) -> dict[str, int]:
        """Results by outcome; only those that occur."""
        found = Counter(result.outcome for result in self.results)
        return {outcome.value: found[outcome] for outcome in Outcome if found[outcome]}

    def verdict(self) -> str:
        """The verdict in one line: the colour, and the first reason for it with its place."""
        for result in self.failures:
            failure = result.failure
            if failure is None:
                return f"red: {result.check.name} passed, but is expected to fail"
            return f"red: {titled(failure.law)}: {failure.what}"
        if self.is_interrupted:
            checks = f"{len(self.results)} of {self.num_selected} checks"
            return f"interrupted: {checks if self.runs is None else self.runs.progress()}"
        for result in self.not_checked:
            return f"not checked: {result.failure.what if result.failure else result.check.name}"
        if self.is_clean:
            return "green: every law that was checked holds"
        return "not checked: no check has a result"

    def summary(self) -> str:
        """One line: counts, profile, seed, and how far it came if it did not end."""
        return f"{self.target}: {self.outcome()} (profile {self.profile}, {self.effort()})"

    def outcome(self) -> str:
        """Results by outcome, and how far a run came that did not end."""
        parts = [f"{number} {outcome}" for outcome, number in self.counts().items()]
        if self.is_interrupted:
            parts.append(self.interruption())
        elif self.runs is not None and self.runs.is_cut_short:
            parts.append(f"in {self.runs.num_seeds} of {self.runs.num_asked} seeds")
        return ", ".join(parts or ["nothing ran"])

    def interruption(self) -> str:
        """The progress of an interrupted run."""
        if self.runs is not None:
            return f"{self.runs.progress()}, interrupted"
        return f"interrupted after {len(self.results)} of {self.num_selected} checks"

    def effort(self) -> str:
        """The random parts, in a few words."""
        if self.runs is not None:
            first, number = self.runs.first_seed, self.runs.num_asked or self.runs.num_seeds
            return f"engine {self.runs.engine}, {number} seeds from {first}"
        return "derandomised" if self.seed is None else f"seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON, by :class:`~kvview.testing.schema.ReportModel`."""
        from kvview.testing.schema import CheckModel, FailureModel, ReportModel, RunsModel

        checks = [
            CheckModel(
                name=result.check.name,
                law=result.check.law,
                summary=result.check.summary,
                outcome=result.outcome.value,
                seconds=round(result.seconds, 4),
                reason=result.reason,
                failure=None
                if result.failure is None
                else FailureModel.model_validate(result.failure),
            )
            for result in self
        ]
        return ReportModel(
            target=self.target,
            contract=self.contract,
            profile=self.profile,
            seed=self.seed,
            is_clean=self.is_clean,
            is_interrupted=self.is_interrupted,
            num_selected=self.num_selected,
            seconds=round(self.seconds, 3),
            counts=self.counts(),
            checks=checks,
            runs=None if self.runs is None else RunsModel.model_validate(self.runs),
            versions=dict(self.versions),
        ).model_dump(mode="json")

    def __iter__(self) -> Iterator[CheckResult]:
        return iter(self.results)
