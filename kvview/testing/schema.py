"""The JSON of ``kvview check --json``: one schema for every contract, with a version.

``docs/report.md`` describes it; ``python -m kvview.testing.schema`` prints it as JSON Schema.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from kvview.testing.levels import Level
    from kvview.testing.recorder import LawBroken
    from kvview.testing.report import Report
    from kvview.testing.upgrade import UpgradeReport

SCHEMA_VERSION: Literal[1] = 1
"""Grows when a field goes or means something else; new fields may come without."""


class _Model(BaseModel):
    model_config = ConfigDict(from_attributes=True, extra="forbid")


class SnapshotModel(_Model):
    """Where the blocks are after a step of a simulated run."""

    step: int
    free: int
    engine: int
    held: int
    in_flight: int


class FailureModel(_Model):
    """What a check found."""

    law: str
    what: str
    got: str
    expected: str
    law_url: str = Field(description="Where the law stands in the documentation, or empty.")
    script: str = Field(description="Python that fails as long as the law is broken, or empty.")
    seeds: list[int] = Field(description="Of a connector: all that break the law.")
    timeline: list[SnapshotModel] = Field(description="Of a connector: the run of the script.")


class CheckModel(_Model):
    """One check, in the order in which they ran."""

    name: str
    law: str = Field(description="'*' in it: of several; 'coverage': what was exercised.")
    summary: str
    outcome: Literal[
        "passed", "failed", "skipped", "expected failure", "unexpected pass", "not checked"
    ]
    seconds: float
    reason: str = Field(description="Why it was skipped or expected to fail, or empty.")
    failure: FailureModel | None
    level: Literal["core", "full"] | None = Field(
        default=None, description="The level that asks for it; null for neither."
    )


class GapModel(_Model):
    """What simulated runs did not exercise."""

    name: str
    what: str


class RunsModel(_Model):
    """The simulated runs of a connector, which its checks share."""

    engine: str
    first_seed: int
    num_seeds: int
    steps: int | None = Field(description="Fewest steps of a run, if that was asked for.")
    seconds: float
    coverage: dict[str, int] = Field(description="What happened how often.")
    not_exercised: list[GapModel]
    notes: list[str] = Field(description="For people; 'not deterministic', for example.")
    typical: list[SnapshotModel] = Field(
        default_factory=list, description="A run with as many loads as most, step by step."
    )


class ReportModel(_Model):
    """What ``kvview check TARGET --json FILE`` writes."""

    schema_version: Literal[1] = SCHEMA_VERSION
    target: str
    contract: Literal["pool", "geometry", "offloading", "transfer", "connector", "tier"]
    profile: str
    seed: int | None = Field(description="Of everything random; null: the same every time.")
    is_clean: bool
    is_interrupted: bool
    num_selected: int = Field(description="Checks that were to run.")
    seconds: float
    counts: dict[str, int] = Field(description="Checks by outcome.")
    checks: list[CheckModel]
    runs: RunsModel | None = Field(description="Of a connector; null for all others.")
    scope: Literal["all", "core", "part"] = Field(
        default="part", description="What was to be checked; of a part no level is told."
    )
    level: Literal["core", "full"] | None = Field(
        default=None, description="What is reached (docs/report.md); null: no level."
    )
    level_reason: str = Field(default="", description="Why it is not full, or empty.")
    versions: dict[str, str] = Field(
        default_factory=dict, description="Of kvview, Python, the target and what they use."
    )

    @classmethod
    def of(cls, report: Report) -> ReportModel:
        """A report as it is written."""
        runs = report.runs
        level, level_reason = report.level
        return cls(
            target=report.target,
            contract=report.contract,
            profile=report.profile,
            seed=report.seed,
            is_clean=report.is_clean,
            is_interrupted=report.is_interrupted,
            num_selected=report.num_selected,
            seconds=round(report.seconds, 3),
            counts=report.counts(),
            checks=[
                CheckModel(
                    name=result.check.name,
                    law=result.check.law,
                    summary=result.check.summary,
                    outcome=result.outcome.value,
                    seconds=round(result.seconds, 4),
                    reason=result.reason,
                    failure=_failure(result.failure),
                    level=_value(result.check.level),
                )
                for result in report
            ],
            runs=None if runs is None else RunsModel.model_validate(runs),
            scope=report.scope.value,
            level=_value(level),
            level_reason=level_reason,
            versions=dict(report.versions),
        )


class MutantModel(_Model):
    """One planted fault."""

    mutant: str
    what: str
    law: str
    incident: str | None
    check: str
    is_killed: bool
    is_killed_by_its_law: bool = Field(description="By the check and for the law that it names.")


class SelfTestModel(_Model):
    """What ``kvview check --self-test --json FILE`` writes."""

    schema_version: Literal[1] = SCHEMA_VERSION
    mutants: list[MutantModel]
    num_survivors: int
    automatic: dict[str, Any] = Field(description="Automatic mutants, drawn with --seed.")


class ReleaseModel(_Model):
    """One release."""

    release: str
    verdict: Literal[
        "green", "failed", "not checked", "could not run", "interrupted", "a bug of kvview"
    ]
    reason: str = Field(description="The first reason why it is not green, or empty.")
    seconds: float
    left_out: list[str] = Field(description="What the release cannot play.")
    report: ReportModel | None = Field(description="Of its process; null when it wrote none.")


class ChangeModel(_Model):
    """What a release changed of what the connector uses."""

    owner: str
    name: str
    told: str
    breaks: bool = Field(description="Whether the connector, as it is written, fails on it.")
    where: str = Field(description="Where the connector uses it, or empty.")


class UpgradeModel(_Model):
    """What ``kvview check TARGET --vllm RELEASE --json FILE`` writes."""

    schema_version: Literal[1] = SCHEMA_VERSION
    target: str
    engine: str
    is_clean: bool = Field(description="Whether every release is green.")
    seconds: float
    releases: list[ReleaseModel] = Field(validation_alias="results")
    against: str | None
    changes: dict[str, list[ChangeModel]] = Field(description="By release, since `against`.")

    @classmethod
    def of(cls, report: UpgradeReport) -> UpgradeModel:
        """A report as it is written."""
        return cls.model_validate(report)


def _value(level: Level | None) -> Literal["core", "full"] | None:
    return None if level is None else level.value


def _failure(broken: LawBroken | None) -> FailureModel | None:
    return None if broken is None else FailureModel.model_validate(broken)


def json_schema() -> dict[str, Any]:
    """The schema of both files, as JSON Schema."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **ReportModel.model_json_schema(),
    }


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
