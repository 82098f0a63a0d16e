"""What a run of checks found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvview.testing.checks import Check
from kvview.testing.harness import Contract
from kvview.testing.recorder import LawBroken


class Outcome(StrEnum):
    """How one check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    EXPECTED_FAILURE = "expected failure"
    UNEXPECTED_PASS = "unexpected pass"


BAD = (Outcome.FAILED, Outcome.UNEXPECTED_PASS)
"""The outcomes that make a run fail."""


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

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the failure's parts one by one."""
        failure = self.failure
        return {
            "name": self.check.name,
            "law": self.check.law,
            "summary": self.check.summary,
            "outcome": self.outcome.value,
            "seconds": round(self.seconds, 4),
            "reason": self.reason,
            "failure": failure
            and {
                "law": failure.law,
                "what": failure.what,
                "got": failure.got,
                "expected": failure.expected,
                "script": failure.script,
            },
        }


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
        is_interrupted: Whether Ctrl-C ended the run.
    """

    target: str
    contract: Contract
    profile: str
    seed: int | None
    results: Sequence[CheckResult]
    num_selected: int
    is_interrupted: bool = False

    @property
    def is_clean(self) -> bool:
        """Whether every check ended, and as it should."""
        return not self.is_interrupted and not any(r.outcome in BAD for r in self.results)

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
        seed = "derandomised" if self.seed is None else f"seed {self.seed}"
        text = f"{self.target}: {counts or 'nothing ran'} (profile {self.profile}, {seed})"
        if self.is_interrupted:
            text += f"; interrupted after {len(self.results)} of {self.num_selected} checks"
        return text

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "target": self.target,
            "contract": self.contract,
            "profile": self.profile,
            "seed": self.seed,
            "is_clean": self.is_clean,
            "is_interrupted": self.is_interrupted,
            "counts": self.counts(),
            "checks": [result.to_dict() for result in self.results],
        }

    def __iter__(self) -> Iterator[CheckResult]:
        return iter(self.results)
