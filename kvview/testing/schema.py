"""The JSON of ``kvview check --json``: one schema for every contract, with a version.

``docs/report.md`` describes it; ``docs/make_commands.py`` writes it as JSON Schema.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION: Literal[1] = 1
"""Increased when a field is removed or changes its meaning; new fields do not increase it."""


class _Model(BaseModel):
    model_config = ConfigDict(from_attributes=True, extra="forbid")


class SnapshotModel(_Model):
    """The places of all blocks after a step of a simulated run."""

    step: int
    free: int
    engine: int
    held: int
    in_flight: int


class FailureModel(_Model):
    """The failure that a check found."""

    law: str
    what: str
    got: str
    expected: str
    law_url: str = Field(description="Where the law stands in the documentation, or empty.")
    script: str = Field(description="Python that fails as long as the law is broken, or empty.")
    seeds: list[int] = Field(description="Of a connector: all that break the law.")
    timeline: list[SnapshotModel] = Field(description="Of a connector: the run of the script.")


class CheckModel(_Model):
    """One check; the list has the order in which they ran."""

    name: str
    law: str = Field(description="'*' in it: of several; 'coverage': what was exercised.")
    summary: str
    outcome: Literal[
        "passed", "failed", "skipped", "expected failure", "unexpected pass", "not checked"
    ]
    seconds: float
    reason: str = Field(description="Why it was skipped or expected to fail, or empty.")
    failure: FailureModel | None


class GapModel(_Model):
    """The items that simulated runs did not exercise."""

    name: str
    what: str


class UnrunModel(_Model):
    """Consecutive statements of the connector's code that no run reached."""

    place: str = Field(description="file:line of the first of them.")
    function: str
    num_statements: int = Field(description="0 for a branch that never ran, of a line that did.")
    source: str
    condition: str = Field(description="The condition above them, or empty.")
    is_judged: bool = Field(
        description="Whether the check is incomplete without them; false for code that handles "
        "errors, needs a GPU, logs or has no caller, and for a branch."
    )


class RunsModel(_Model):
    """The simulated runs of a connector, which its checks share."""

    engine: str
    first_seed: int
    num_seeds: int = Field(description="How many were played.")
    num_asked: int = Field(
        default=0, description="How many were to be played; the first failure ends the runs."
    )
    steps: int | None = Field(description="Fewest steps of a run, if that was asked for.")
    seconds: float
    coverage: dict[str, int] = Field(description="What happened how often.")
    not_exercised: list[GapModel]
    replaced: list[str] = Field(
        default_factory=list,
        description="Parts of the connector that the engine replaced; they were not checked.",
    )
    notes: list[str] = Field(description="For people; 'not deterministic', for example.")
    num_statements: int = Field(
        default=0, description="Statements of the connector's code; 0 if they were not measured."
    )
    unrun: list[UnrunModel] = Field(
        default_factory=list, description="The statements that no run reached."
    )
    typical: list[SnapshotModel] = Field(
        default_factory=list, description="A run with as many loads as most, step by step."
    )


class ReportModel(_Model):
    """The report of ``kvview check TARGET --json FILE``."""

    schema_version: Literal[1] = SCHEMA_VERSION
    target: str
    contract: Literal["pool", "geometry", "offloading", "transfer", "connector", "tier", "handoff"]
    seed: int = Field(description="The first seed.")
    is_clean: bool
    is_interrupted: bool
    num_selected: int = Field(description="Checks that were to run.")
    seconds: float
    counts: dict[str, int] = Field(description="Checks by outcome.")
    checks: list[CheckModel]
    runs: RunsModel | None = Field(description="Of a connector; null for all others.")
    versions: dict[str, str] = Field(
        default_factory=dict, description="Of kvview, Python, the target and what they use."
    )


class MutantModel(_Model):
    """One injected fault."""

    mutant: str
    what: str
    law: str
    incident: str | None
    killed_by: str | None = Field(description="The law of the first failure; null for a survivor.")
    is_killed: bool
    is_killed_by_its_law: bool


class SelfTestModel(_Model):
    """The report of ``kvview check --self-test --json FILE``."""

    schema_version: Literal[1] = SCHEMA_VERSION
    mutants: list[MutantModel]
    num_survivors: int


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


class UpgradeModel(_Model):
    """The report of ``kvview check TARGET --vllm RELEASE --json FILE``."""

    schema_version: Literal[1] = SCHEMA_VERSION
    target: str
    engine: str
    is_clean: bool = Field(description="Whether every release is green.")
    seconds: float
    releases: list[ReleaseModel] = Field(validation_alias="results")
