"""The result of one command for one implementation: ``--report-json``.

The form follows the conformance reports of the Gateway API: one file for each implementation and
version, which states the replaced parts and how to reproduce the result. ``docs/results.md`` is
made from such files.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Literal

import click

from kvview.cli.output import arguments_of, report_option, write_json
from kvview.errors import ConnectorError, KVViewError, line_of
from kvview.version import versions_of

_ENVIRONMENT = re.compile(r"PYTHONHASHSEED|(LMCACHE|MOONCAKE)_(?!\w*LOG)\w+")
_OF_EVERY_RUN = frozenset({"hypothesis", "kvview", "machine", "python", "torch", "vllm"})
_FOLDERS = (
    (re.compile(r"[^\s(]*/site-packages/"), ""),
    (re.compile(r"[^\s(]*/(?=vllm/)"), ""),
    (re.compile(rf"{re.escape(tempfile.gettempdir())}/[\w.-]+"), "{tmp}"),
)


Colour = Literal["red", "not checked", ""]
"""The effect of an outcome on a verdict; empty: it is listed and no failure."""


@dataclass(frozen=True)
class ResultFinding:
    """One result that is not as it must be.

    Args:
        subject: The law, the pair of requests, or the kind of layers and the memory layout.
        outcome: Name of it in the report of the command.
        evidence: The first wrong thing, or the reason; one line.
    """

    subject: str
    outcome: str
    evidence: str


@dataclass(frozen=True)
class Profile:
    """The verdict on one class of behaviour.

    Args:
        name: The contract, such as connector (the life of requests); keys, layouts or inference.
        verdict: Red with one failure; not checked if nothing failed and a part was not exercised.
        counts: Results by outcome.
        findings: Every result that is red, refused or not checked.
    """

    name: str
    verdict: Literal["green", "red", "not checked", "could not run"]
    counts: dict[str, int]
    findings: list[ResultFinding]


@dataclass(frozen=True)
class ResultFile:
    """The result of one command for one implementation in one engine.

    Args:
        target: The connector or store.
        engine: Name and version.
        date: Day of the run, in UTC.
        versions: Of kvview, Python, the machine and the libraries used.
        replaced: Parts of the implementation that the check replaced; empty if it is unmodified.
        profiles: One for each class of behaviour that the command checks.
        reproduce: Lines for a shell in a checkout of kvview that repeat the run.
        schema_version: Version of the JSON; grows when a field is removed or changes its meaning.
    """

    target: str
    engine: str
    date: str
    versions: dict[str, str]
    replaced: list[str]
    profiles: list[Profile]
    reproduce: list[str]
    schema_version: Literal[1] = 1


RESULT_OPTION = report_option(
    "--report-json",
    "result_file",
    {"result": "kvview.cli.result_file:ResultFile"},
    "Write the verdict of each class, the replaced parts and the command to FILE ('-' for stdout).",
)


def make_profile(
    name: str,
    outcomes: Mapping[str, Colour],
    results: Sequence[ResultFinding],
) -> Profile:
    """Make the verdict on a class from its results.

    Args:
        name: The class.
        outcomes: The colour of each outcome that is a finding.
        results: All of them; those with another outcome are counted only.
    """
    findings = [each for each in results if each.outcome in outcomes]
    colours = {outcomes[each.outcome] for each in findings}
    verdict: Literal["green", "red", "not checked"] = "green"
    if "red" in colours:
        verdict = "red"
    elif "not checked" in colours or not results:
        verdict = "not checked"
    return Profile(name, verdict, dict(Counter(each.outcome for each in results)), findings)


def write_result(
    path: str | None,
    target: str,
    profiles: Sequence[Profile],
    versions: Mapping[str, str],
    replaced: Sequence[str] = (),
    engine: str = "",
) -> None:
    """Write the file of the running command; None writes nothing.

    Args:
        path: The file.
        target: The connector or store.
        profiles: The verdicts.
        versions: By name.
        replaced: Parts of the implementation that were replaced.
        engine: Name and version; empty for the installed vLLM.
    """
    if path is None:
        return
    vllm = versions.get("vllm", "").partition("+")[0]  # without the build
    result = ResultFile(
        target,
        engine or f"vllm {vllm}".strip(),
        datetime.now(UTC).date().isoformat(),
        dict(versions),
        list(replaced),
        [_without_folders(profile) for profile in profiles],
        [
            *([f"export PYTHONPATH=$(python tests/vllm/sources.py {vllm})"] if vllm else []),
            *(
                f"pip install {name}=={version}"
                for name, version in versions.items()
                if name not in _OF_EVERY_RUN
            ),
            *(
                f"export {name}={shlex.quote(value)}"
                for name, value in sorted(os.environ.items())
                if _ENVIRONMENT.fullmatch(name)
            ),
            command_line(click.get_current_context()),
        ],
    )
    write_json(path, asdict(result), "--report-json")


@contextmanager
def or_could_not_run(path: str | None, target: str, *names: str) -> Iterator[None]:
    """Write a file with the error if the block raises one that is not the implementation's.

    Args:
        path: The file; None writes nothing.
        target: The connector or store.
        *names: The classes that have no verdict then.
    """
    try:
        yield
    except ConnectorError:
        raise
    except KVViewError as error:
        finding = ResultFinding(target, "could not run", line_of(error))
        profiles = [Profile(name, "could not run", {}, [finding]) for name in names]
        write_result(path, target, profiles, versions_of())
        raise


def command_line(context: click.Context) -> str:
    """Return the command with the arguments that the user set, without files that it writes."""
    written = [each.name or "" for each in context.command.params if "file" in each.type.name]
    return shlex.join(["kvview", context.info_name or "", *arguments_of(context, written)])


def _without_folders(profile: Profile) -> Profile:
    """Shorten paths: those of this machine mean nothing to a reader."""
    findings = []
    for finding in profile.findings:
        evidence = finding.evidence
        for pattern, text in _FOLDERS:
            evidence = pattern.sub(text, evidence)
        findings.append(ResultFinding(finding.subject, finding.outcome, evidence))
    return Profile(profile.name, profile.verdict, profile.counts, findings)
