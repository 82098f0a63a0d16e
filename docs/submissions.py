"""The folders of ``results/``: one for each implementation, with its reports and a README.

``results/README.md`` describes the format. Each fault of a folder is one line.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from docs.parts import ROOT
from kvview.cli.result_file import Profile, ResultFile
from kvview.errors import ConfigError, line_of

RESULTS = ROOT / "results"
CLASSES: Mapping[str, str] = {
    "connector": "requests",
    "tier": "pages",
    "keys": "keys",
    "layouts": "layouts",
    "inference": "tokens",
    "handoff": "handoff",
}
"""The classes of behaviour, and their columns in the grid."""
WHOLE: Sequence[frozenset[str]] = (
    frozenset({"connector", "keys", "layouts"}),
    frozenset({"tier", "keys", "layouts"}),
    frozenset({"handoff"}),
)
"""The classes that need a verdict; with fewer classes, results are partial."""
RED = ("failed", "unexpected pass", "wrong", "shared wrongly")
"""The outcomes that make a profile red."""

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(r"^## Reproduce$(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_REPORT = re.compile(r"(?P<release>[\w.]+)-(?P<check>[a-z][a-z-]*)\.json")
_WRITTEN = "--report-json"
_FOLDER = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_MISSING = re.compile(r"cannot be imported: ModuleNotFoundError: No module named '(?!vllm)")
_LINK = re.compile(r"\]\(([^)#:]+)[^):]*\)")


class About(BaseModel):
    """The first block of a README, in TOML.

    Args:
        owner: The people or the project that answer questions about the results.
        project: Address of the project; ``none`` for a package that names no address.
        version: Version or commit, which is in the commands; or the name of a package whose version
            is in each report.
        reason: The reason if no command could run; otherwise empty.
        upstream: For each red class, a thread, a report or a reason, in Markdown.
    """

    model_config = ConfigDict(extra="forbid")

    owner: str
    project: str
    version: str
    reason: str = ""
    upstream: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """A file that ``--report-json`` wrote.

    Args:
        file: Its name, RELEASE-CHECK.json.
        release: Release of the engine.
        result: Its contents.
    """

    file: str
    release: str
    result: ResultFile


@dataclass(frozen=True)
class Submission:
    """The folder of one implementation.

    Args:
        folder: Name of the folder.
        name: Heading of its README.
        about: The first block of its README.
        scripts: The blocks of the section *Reproduce*.
        reports: The reports, by release.
    """

    folder: str
    name: str
    about: About
    scripts: Sequence[str]
    reports: Sequence[Report]

    def faults(self) -> Iterator[str]:
        """Return the faults of the folder, each in one line."""
        if not _FOLDER.fullmatch(self.folder):
            yield "the name of the folder has only lower-case letters, digits and hyphens"
        if self.about.project != "none" and not self.about.project.startswith("https://"):
            project = self.about.project
            yield f"README.md: project is {project!r}, expected an https address or 'none'"
        if not self.reports and not self.about.reason:
            yield "README.md: no report; add RELEASE-CHECK.json, or the reason why nothing can run"
        profiles = [profile for report in self.reports for profile in report.result.profiles]
        bad = {profile.name for profile in profiles if profile.verdict != "green"}
        for name in sorted(self.about.upstream.keys() - bad):
            yield f"README.md: upstream.{name}, but no report has a fault of {name}"
        for path in _LINK.findall(" ".join(self.about.upstream.values())):
            if not (ROOT / "docs" / path).exists():
                yield f"README.md: upstream links {path}, which is no file below docs/"
        commands = {
            file: (line, script) for script in self.scripts for file, line in self.written(script)
        }
        for report in self.reports:
            yield from self._faults_of(report)
            if report.file not in commands:
                path = f"results/{self.folder}/{report.file}"
                yield f"README.md: Reproduce has no command with {_WRITTEN} {path}"
                continue
            line, script = commands[report.file]
            *before, command = report.result.reproduce
            if _words(line) != _words(command):
                yield f"{report.file}: its command is {command!r}, but README.md has {line!r}"
            for missing in (each for each in before if each not in script.splitlines()):
                yield f"README.md: the commands for {report.file} lack the line {missing!r}"

    def written(self, script: str) -> Iterator[tuple[str, str]]:
        """Return the reports that a block writes, each with its command."""
        for line in script.replace("\\\n", " ").splitlines():
            for file in re.findall(rf"{_WRITTEN}[= ]results/{self.folder}/(\S+)", line):
                yield file, line

    def _faults_of(self, report: Report) -> Iterator[str]:
        result, version = report.result, self.about.version
        _, _, engine = result.engine.partition(" ")
        release = engine.partition(",")[0]  # without the model runners
        if release and release != report.release:
            right = f"{release}-CHECK.json"
            yield f"{report.file}: the report is about {result.engine}; name it {right}"
        pinned = re.compile(rf"(?<![\w.]){re.escape(version)}(?![\w.]*\w)")
        if version not in result.versions and not any(map(pinned.search, self.scripts)):
            yield (
                f"README.md: the version {version!r} is neither in Reproduce nor a package in the "
                f"versions of {report.file}; pin it"
            )
        for profile in result.profiles:
            expected = verdict_of(profile)
            if profile.name not in CLASSES:
                known = ", ".join(CLASSES)
                yield f"{report.file}: the class {profile.name!r} is not one of {known}"
            if profile.verdict != expected:
                yield (
                    f"{report.file}: {profile.name} is {profile.verdict!r}, but its counts make it "
                    f"{expected!r}; reports are unmodified"
                )
            if absent := next((f for f in profile.findings if _MISSING.search(f.evidence)), None):
                yield f"{report.file}: a module was not installed: {absent.evidence}"
            if profile.verdict == "red" and profile.name not in self.about.upstream:
                yield (
                    f"README.md: {report.file} is red for {profile.name}; link a thread, or give "
                    f"the reason, as upstream.{profile.name}"
                )


def verdict_of(profile: Profile) -> str:
    """Return the verdict that the counts of a profile make."""
    counts = profile.counts
    if any(counts.get(each) for each in RED):
        return "red"
    if profile.verdict == "could not run":
        return profile.verdict
    return "not checked" if counts.get("not checked") or not counts else "green"


def read(folder: Path) -> Submission:
    """Read a folder.

    Raises:
        ConfigError: The README or a report has another format; the message is one line.
    """
    readme = folder / "README.md"
    if not readme.is_file():
        raise ConfigError("README.md: the file is missing; results/README.md describes it")
    reports = [read_report(path) for path in sorted(folder.glob("*.json"))]
    return read_readme(folder.name, readme.read_text(encoding="utf-8"), reports)


def read_readme(folder: str, text: str, reports: Sequence[Report]) -> Submission:
    """Read the text of a README."""
    name = re.match(r"# (\S.*)\n", text)
    first = _BLOCK.search(text)
    section = _SECTION.search(text)
    if name is None or first is None or first[1] != "toml":
        raise ConfigError("README.md: expected a heading, and a first block in toml")
    try:
        about = About.model_validate(tomllib.loads(first[2]))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(f"README.md: the block in toml: {_reason(error)}") from error
    scripts = [code for kind, code in _BLOCK.findall(section[1]) if kind == "sh"] if section else []
    if not scripts and not about.reason:
        raise ConfigError("README.md: expected a section 'Reproduce' with a block in sh")
    return Submission(folder, name[1], about, scripts, reports)


def read_report(path: Path) -> Report:
    """Read a report.

    Raises:
        ConfigError: The name or the format is another one; the message is one line.
    """
    name = _REPORT.fullmatch(path.name)
    if name is None:
        raise ConfigError(f"{path.name}: the name is not RELEASE-CHECK.json, as 0.33.0-check.json")
    try:
        result = TypeAdapter(ResultFile).validate_json(path.read_bytes(), strict=False)
    except ValidationError as error:
        raise ConfigError(f"{path.name}: not a file of {_WRITTEN}: {_reason(error)}") from error
    return Report(path.name, name["release"], result)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        wrong: Mapping[str, Any] = error.errors()[0]
        return f"{'.'.join(map(str, wrong['loc']))}: {line_of(wrong['msg'])}"
    return line_of(error)


def _words(command: str) -> list[str]:
    """Return the arguments of a kvview command, without the report and in one order."""
    words = shlex.split(command)
    start = max((n for n, word in enumerate(words) if word.endswith("kvview")), default=-1)
    parts = [
        part
        for word in words[start + 1 :]
        for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    if _WRITTEN in parts:
        del parts[parts.index(_WRITTEN) : parts.index(_WRITTEN) + 2]
    return sorted(parts)


def submissions() -> list[Path]:
    """Return the folders of all implementations."""
    return sorted(path for path in RESULTS.iterdir() if path.is_dir() and path.name != "upstream")
