"""What a run of checks found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvview.testing.checks import Check
from kvview.testing.harness import Contract
from kvview.testing.levels import Level, Scope, judge_level
from kvview.testing.recorder import LawBroken

if TYPE_CHECKING:
    from kvview.testing.connector import ConnectorRuns


class Outcome(StrEnum):
    """How one check ended."""

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
        seconds: How long it took.
        reason: Why it was skipped or expected to fail; empty otherwise.
        failure: What broke, when it failed, expected or not.
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
        scope: What of the contract was to be checked.
        asked_level: The level that must be reached, if one was named.
        versions: Of what the run rests on, by name.
    """

    target: str
    contract: Contract
    profile: str
    seed: int | None
    results: Sequence[CheckResult]
    num_selected: int
    is_interrupted: bool = False
    runs: ConnectorRuns | None = None
    scope: Scope = Scope.ALL
    asked_level: Level | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Whether every check ended, as it should, and the level asked for is reached."""
        return not (
            self.is_interrupted or self.failures or self.not_checked or self.misses_its_level
        )

    @property
    def level(self) -> tuple[Level | None, str]:
        """The level that is reached, and why not the next one."""
        checks = [(one.check.level, one.outcome.value, one.check.name) for one in self.results]
        runs = None if self.runs is None else (self.runs.num_seeds, self.runs.coverage)
        return judge_level(self.scope, checks, runs, self.is_interrupted)

    @property
    def misses_its_level(self) -> bool:
        """Whether a level was asked for and is not reached."""
        reached, _ = self.level
        return self.asked_level is not None and reached not in (self.asked_level, Level.FULL)

    @property
    def not_checked(self) -> list[CheckResult]:
        """The results that say that something was not exercised."""
        return [result for result in self.results if result.outcome is Outcome.NOT_CHECKED]

    @property
    def seconds(self) -> float:
        """How long the checks took."""
        return sum(result.seconds for result in self.results)

    @property
    def failures(self) -> list[CheckResult]:
        """The results that make the run fail."""
        return [result for result in self.results if result.outcome in BAD]

    def counts(self) -> dict[str, int]:
        """Results by outcome; only those that occur."""
        found = Counter(result.outcome for result in self.results)
        return {outcome.value: found[outcome] for outcome in Outcome if found[outcome]}

    def summary(self) -> str:
        """One line: counts, profile, seed, and how far an interrupted run came."""
        counts = ", ".join(f"{number} {outcome}" for outcome, number in self.counts().items())
        text = f"{self.target}: {counts or 'nothing ran'} (profile {self.profile}, {self.effort()})"
        if self.is_interrupted:
            text += f"; interrupted after {len(self.results)} of {self.num_selected} checks"
        return text

    def told_level(self) -> str:
        """The level in one line, and why not the next one."""
        reached, why = self.level
        told = "no level" if reached is None else f"level {reached}"
        return f"{told}: {why}" if why else told

    def effort(self) -> str:
        """What was random, in a few words."""
        if self.runs is not None:
            first, number = self.runs.first_seed, self.runs.num_seeds
            return f"engine {self.runs.engine}, {number} seeds from {first}"
        return "derandomised" if self.seed is None else f"seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON, by :class:`~kvview.testing.schema.ReportModel`."""
        from kvview.testing.schema import ReportModel

        return ReportModel.of(self).model_dump(mode="json")

    def __iter__(self) -> Iterator[CheckResult]:
        return iter(self.results)
