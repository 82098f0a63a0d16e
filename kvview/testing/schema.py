"""The JSON of ``kvview check --json``: one schema for every contract, with a version.

``docs/report.md`` describes the JSON; ``docs/make_commands.py`` writes the JSON Schema.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION: Literal[1] = 1
"""Version of the schema, increased when a field is removed or changes its meaning."""


class _Model(BaseModel):
    model_config = ConfigDict(from_attributes=True, extra="forbid")


class FailureModel(_Model):
    """The failure that a check found."""

    law: str
    what: str
    got: str
    expected: str
    law_url: str = Field(description="Address of the law's documentation, or empty.")
    script: str = Field(
        description="Python code that fails as long as the law is broken, or empty."
    )
    seeds: list[int] = Field(description="For a connector, the seeds that break the law.")


class CheckModel(_Model):
    """The result of one check; results are listed in the order of the run."""

    name: str
    law: str = Field(
        description="Number of the law; with '*', several laws; 'coverage' for exercised items."
    )
    summary: str
    outcome: Literal[
        "passed", "failed", "skipped", "expected failure", "unexpected pass", "not checked"
    ]
    seconds: float
    reason: str = Field(description="Why the check was skipped or was expected to fail, or empty.")
    failure: FailureModel | None


class GapModel(_Model):
    """An item that simulated runs did not exercise."""

    name: str
    what: str


class UnrunModel(_Model):
    """Consecutive statements of the connector's code that no run reached."""

    place: str = Field(description="file:line of the first statement.")
    function: str
    num_statements: int = Field(
        description="Number of statements; 0 for a branch never taken in a line that ran."
    )
    source: str
    condition: str = Field(description="The condition that never led to the statements, or empty.")
    is_judged: bool = Field(
        description="Whether a check without the statements is incomplete; false for a branch, and "
        "for code that handles errors, needs a GPU, logs or has no caller."
    )


class RunsModel(_Model):
    """The simulated runs of a connector, which its checks share."""

    engine: str
    first_seed: int
    num_seeds: int = Field(description="Number of seeds that were played.")
    num_asked: int = Field(
        default=0, description="Number of requested seeds; the first failure ends the runs."
    )
    steps: int | None = Field(description="Requested minimum of steps in a run, or null.")
    seconds: float
    coverage: dict[str, int] = Field(description="Number of occurrences of each event.")
    not_exercised: list[GapModel]
    replaced: list[str] = Field(
        default_factory=list,
        description="Parts of the connector that the engine replaced; they were not checked.",
    )
    left_out: list[str] = Field(
        default_factory=list, description="Parts of scenarios that the engine cannot play."
    )
    notes: list[str] = Field(description="Notes for the reader; 'not deterministic', for example.")
    num_statements: int = Field(
        default=0, description="Statements of the connector's code; 0 without a measurement."
    )
    unrun: list[UnrunModel] = Field(
        default_factory=list, description="The statements that no run reached."
    )


class ReportModel(_Model):
    """The report of ``kvview check TARGET --json FILE``."""

    schema_version: Literal[1] = SCHEMA_VERSION
    target: str
    contract: Literal["pool", "geometry", "offloading", "transfer", "connector", "tier", "handoff"]
    seed: int = Field(description="The first seed.")
    is_clean: bool
    is_interrupted: bool
    num_selected: int = Field(description="Number of selected checks.")
    seconds: float
    counts: dict[str, int] = Field(description="Number of checks by outcome.")
    checks: list[CheckModel]
    runs: RunsModel | None = Field(description="The runs of a connector; null for other targets.")
    versions: dict[str, str] = Field(
        default_factory=dict,
        description="Versions of kvview, Python, the target and their libraries.",
    )


class ReleaseModel(_Model):
    """The result of one release."""

    release: str
    verdict: Literal[
        "green", "failed", "not checked", "could not run", "interrupted", "a bug of kvview"
    ]
    reason: str = Field(description="The first reason why the release is not green, or empty.")
    seconds: float
    left_out: list[str] = Field(description="Parts of scenarios that the release cannot play.")
    report: ReportModel | None = Field(
        description="Report of the release's process; null if the process wrote no report."
    )


class UpgradeModel(_Model):
    """The report of ``kvview check TARGET --vllm RELEASE --json FILE``."""

    schema_version: Literal[1] = SCHEMA_VERSION
    target: str
    engine: str
    is_clean: bool = Field(description="Whether every release is green.")
    seconds: float
    releases: list[ReleaseModel] = Field(validation_alias="results")
