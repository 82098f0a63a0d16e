"""The JSON of ``kvview check --json``: one schema for every contract, with a version.

``docs/report.md`` describes the JSON; ``docs/make_commands.py`` writes the JSON Schema.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvview.testing.results.law_broken import Gap, Unrun

SCHEMA_VERSION: Literal[1] = 1
"""Version of the schema, increased when a field is removed or changes its meaning."""


class _Model(BaseModel):
    model_config = ConfigDict(from_attributes=True, extra="forbid")


class FailureModel(_Model):
    """The failure that a check found.

    Args:
        law_url: Address of the law's documentation, or empty.
        script: Python code that fails as long as the law is broken, or empty.
        seeds: For a connector, the seeds that break the law.
    """

    law: str
    what: str
    got: str
    expected: str
    law_url: str
    script: str
    seeds: list[int]


class CheckModel(_Model):
    """The result of one check; results are listed in the order of the run.

    Args:
        law: Number of the law; with '*', several laws; 'coverage' for exercised items.
        reason: Why the check was skipped or was expected to fail, or empty.
        part: Name of the part of a connector that was checked, such as its store, or empty.
        link: Address of the thread about an expected failure, or empty.
    """

    name: str
    law: str
    summary: str
    outcome: Literal[
        "passed", "failed", "skipped", "expected failure", "unexpected pass", "not checked"
    ]
    seconds: float
    reason: str
    failure: FailureModel | None
    part: str = ""
    link: str = ""


class FailedSeedModel(_Model):
    """The failure of one seed.

    Args:
        filed_under: The broken law, or 'exceptions'.
        hint: The remedy; null for the hint of the law.
        log: The last hooks, transfers and holds.
    """

    seed: int
    law: str
    message: str
    script: str
    filed_under: str
    hint: str | None
    log: list[str]


class ShardModel(_Model):
    """The data of a shard that 'kvview check --merge' adds up.

    Args:
        number: Number of the shard, from 1.
        of: Number of shards.
        lines: Lines of the author's code that ran, by file.
        of_chance: One note for each seed whose two runs differed.
        first_error: The first exception behind a job that failed by itself, or empty.
        laws: Laws that a run can break; null for all laws of connectors.
    """

    number: int
    of: int
    options: dict[str, Any]
    failures: list[FailedSeedModel]
    notes: list[str]
    lines: dict[str, list[int]]
    of_chance: list[str]
    first_error: str
    laws: list[str] | None


class RunsModel(_Model):
    """The simulated runs of a connector, which its checks share.

    Args:
        num_seeds: Number of seeds that were played.
        num_asked: Number of requested seeds; the first failure ends the runs.
        steps: Requested minimum of steps in a run, or null.
        coverage: Number of occurrences of each event.
        replaced: Parts of the connector that the engine replaced; they were not checked.
        left_out: Parts of scenarios that the engine cannot play.
        notes: Notes for the reader; 'not deterministic', for example.
        num_statements: Statements of the connector's code; 0 without a measurement.
        unrun: The statements that no run reached.
        shard: The data of a shard; null if the runs are a whole check.
    """

    engine: str
    first_seed: int
    num_seeds: int
    num_asked: int = 0
    steps: int | None
    seconds: float
    coverage: dict[str, int]
    not_exercised: list[Gap]
    replaced: list[str] = Field(default_factory=list)
    left_out: list[str] = Field(default_factory=list)
    notes: list[str]
    num_statements: int = 0
    unrun: list[Unrun] = Field(default_factory=list)
    is_interrupted: bool = False
    shard: ShardModel | None = None


class ReportModel(_Model):
    """The report of ``kvview check TARGET --json FILE``.

    Args:
        seed: The first seed.
        num_selected: Number of selected checks.
        counts: Number of checks by outcome.
        runs: The runs of a connector; null for other targets.
        versions: Versions of kvview, Python, the target and their libraries.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    target: str
    contract: Literal["pool", "offloading", "transfer", "connector", "tier", "transform", "handoff"]
    seed: int
    is_clean: bool
    is_interrupted: bool
    num_selected: int
    seconds: float
    counts: dict[str, int]
    checks: list[CheckModel]
    runs: RunsModel | None
    versions: dict[str, str] = Field(default_factory=dict)


class ReleaseModel(_Model):
    """The result of one release.

    Args:
        reason: The first reason why the release is not green, or empty.
        left_out: Parts of scenarios that the release cannot play.
        report: Report of the release's process; null if the process wrote no report.
    """

    release: str
    verdict: Literal[
        "green", "failed", "not checked", "could not run", "interrupted", "a bug of kvview"
    ]
    reason: str
    seconds: float
    left_out: list[str]
    report: ReportModel | None


class UpgradeModel(_Model):
    """The report of ``kvview check TARGET --vllm RELEASE --json FILE``.

    Args:
        is_clean: Whether every release is green.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    target: str
    engine: str
    is_clean: bool
    seconds: float
    releases: list[ReleaseModel] = Field(validation_alias="results")
