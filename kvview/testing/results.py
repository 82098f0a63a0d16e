"""The table of results of implementations, from the submissions in ``results/``.

    python -m kvview.testing.results add REPORT.json --name NAME --version V --url URL --command C
    python -m kvview.testing.results check [FILE ...]
    python -m kvview.testing.results table

``docs/results.md`` has the format, and the table that the last of these writes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from html import escape
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvview.errors import ConfigError, line_of, printable
from kvview.input_files import read_file
from kvview.testing.runner import NOT_DECLARED
from kvview.testing.schema import ReportModel
from kvview.version import __version__

FORMAT_VERSION: Literal[1] = 1
"""Grows when a field goes or means something else."""

FOLDER = Path("results")
PAGE = Path("docs/results.md")
_BEGIN, _END = "<!-- table -->", "<!-- end of the table -->"
_ABSOLUTE = re.compile(r"(?<![\w.:/])(/(?!/)[\w.-]+/|[A-Za-z]:[\\/]|~/)")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ImplementationModel(_Model):
    """The checked implementation, for people."""

    name: str = Field(min_length=1, max_length=80)
    version: str = Field(min_length=1, max_length=80)
    url: str = Field(pattern=r"^https?://[^\s<>\"|]+$", max_length=300)


class SubmissionModel(_Model):
    """One file of ``results/``."""

    format_version: Literal[1] = FORMAT_VERSION
    implementation: ImplementationModel
    command: str = Field(min_length=1, description="What was run, in a checkout or with a package.")
    date: date
    report: ReportModel = Field(description="docs/report.md, without scripts and timelines.")


def read_submission(path: Path) -> SubmissionModel:
    """Read and check a submission.

    Raises:
        ConfigError: It cannot be read or contradicts itself; the message lists all faults.
    """
    try:
        given = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {line_of(error)}") from None
    version = given.get("format_version", FORMAT_VERSION) if isinstance(given, dict) else 0
    if version != FORMAT_VERSION:
        raise ConfigError(f"{path}: format_version {version!r}, and known is {FORMAT_VERSION}")
    try:
        submission = SubmissionModel.model_validate(given)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise ConfigError(f"{path}: {told}") from None
    if problems := list(_problems(submission)):
        raise ConfigError(f"{path}: {'; '.join(problems)}")
    return submission


def _problems(submission: SubmissionModel) -> Iterator[str]:
    report = submission.report
    counts = dict(Counter(check.outcome for check in report.checks))
    if counts != report.counts:
        yield f"counts are {counts}, not {report.counts}"
    if report.is_interrupted or len(report.checks) != report.num_selected:
        yield "the run did not end"
    if (report.contract == "connector") != (report.runs is not None):
        yield "runs are of connectors, and connectors have them"
    for check in report.checks:
        needs_reason = check.outcome in ("skipped", "expected failure", "unexpected pass")
        if needs_reason and not check.reason.strip():
            yield f"{check.name} is {check.outcome} without a reason"
    for what, text in (("command", submission.command), ("target", report.target)):
        if _ABSOLUTE.search(text):
            yield f"the {what} has a path of one machine: {text}"
    if "kvview" not in report.versions:
        yield "versions does not name kvview"


def _unlike_the_kit(report: ReportModel) -> Iterator[str]:
    """A fresh report has the checks of the kit that adds it."""
    from kvview.testing.checks import checks_for
    from kvview.testing.connector_checks import COVERAGE

    if report.versions.get("kvview") != __version__:
        yield f"it was made with another kvview than this one, {__version__}"
        return
    expected = {check.name for check in checks_for(report.contract)}
    own = {check.name for check in report.checks}
    own = {name for name in own if not name.startswith(f"{COVERAGE}: ")}
    if missing := sorted(expected - own):
        yield f"checks of kvview {__version__} are missing: {', '.join(missing[:3])}"
    if unknown := sorted(own - expected):
        yield f"kvview {__version__} has no such checks: {', '.join(unknown[:3])}"


def make_submission(
    report: ReportModel, name: str, version: str, url: str, command: str, when: date
) -> SubmissionModel:
    """Return a submission of a report, without the parts that only its author needs."""
    kept = report.model_copy(deep=True)
    for check in kept.checks:
        if check.failure is not None:
            check.failure.script, check.failure.timeline = "", []
    if kept.runs is not None:
        kept.runs.typical = []
    about = ImplementationModel(name=name, version=version, url=url)
    return SubmissionModel(implementation=about, command=command, date=when, report=kept)


# --- the table ---


def write_table(submissions: Sequence[SubmissionModel], page: str) -> str:
    """The page with the table of these submissions in its place.

    Raises:
        ConfigError: The page has no place for it.
    """
    head, begin, rest = page.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not (begin and end):
        raise ConfigError(f"no {_BEGIN} and {_END} to write between")
    order = ("pool", "geometry", "offloading", "transfer", "tier", "connector")
    rows = sorted(
        submissions,
        key=lambda one: (order.index(one.report.contract), one.implementation.name.lower()),
    )
    lines = [
        "| implementation | contract | checks | kvview | on | date |",
        "|---|---|---|---|---|---|",
        *map(_row, rows),
        "",
        "What was skipped, or did not pass:",
        "",
        *(line for one in rows for line in _reasons(one)),
    ]
    return f"{head}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{tail}"


def _row(submission: SubmissionModel) -> str:
    about, report = submission.implementation, submission.report
    counts = ", ".join(f"{number} {outcome}" for outcome, number in report.counts.items())
    where = [f"{name} {v}" for name, v in report.versions.items() if name in ("python", "vllm")]
    if report.runs is not None:
        where = [f"{report.runs.engine}, {report.runs.num_seeds} seeds", *where]
    cells = [
        f"[{_text(about.name)}]({about.url}) {_text(about.version)}",
        report.contract,
        _text(counts),
        _text(report.versions.get("kvview", "")),
        _text("; ".join(where)),
        submission.date.isoformat(),
    ]
    return f"| {' | '.join(cells)} |"


def _reasons(submission: SubmissionModel) -> Iterator[str]:
    report = submission.report
    told: dict[str, list[str]] = {}
    undeclared: dict[str, None] = {}
    skipped: dict[str, None] = {}
    for check in report.checks:
        if check.outcome == "skipped" and check.reason.startswith(NOT_DECLARED):
            undeclared |= dict.fromkeys(check.reason.removeprefix(NOT_DECLARED).split(", "))
            skipped[check.law] = None
        elif check.outcome in ("skipped", "expected failure"):
            told.setdefault(f"{check.outcome}: {check.reason}", []).append(check.law)
        elif check.outcome != "passed":
            failure = check.failure
            what = failure.what if failure else "it passed, and was expected to fail"
            told.setdefault(f"{check.outcome}: {what}", []).append(check.law)
    left_out = [name for name in (report.runs.coverage if report.runs else ()) if ": " in name]
    left_out = [name for name in sorted(left_out) if name.startswith("left out: ")]
    if undeclared:
        told[f"not declared, and skipped: {', '.join(undeclared)}"] = list(skipped)
    if not (told or left_out):
        return
    yield f"- {_text(submission.implementation.name)} (`{_code(submission.command)}`)"
    for reason, laws in told.items():
        of = ", ".join(dict.fromkeys(laws))
        yield f"    - {_text(line_of(reason))} ({_text(of)})"
    for name in left_out:
        yield f"    - {_text(name)}"


def _text(text: str) -> str:
    """Text from outside: neither HTML nor a cell's end nor a link."""
    text = " ".join(escape(text, quote=False).split())
    return re.sub(r"([|\[\]`*\\])", r"\\\1", text)


def _code(text: str) -> str:
    return " ".join(text.split()).replace("`", "'").replace("|", "\\|")


# --- the command ---


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kvview.testing.results", description="Results of implementations."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="add|check|table")
    add = commands.add_parser("add", help="make a submission of a report")
    add.add_argument("report", type=Path, help="what kvview check --json wrote")
    for name, what in (
        ("name", "of the implementation"),
        ("version", "of the implementation"),
        ("url", "where it is"),
        ("command", "that was run"),
    ):
        add.add_argument(f"--{name}", dest=f"its_{name}", required=True, help=what)
    add.add_argument("--file", type=Path, help="where to write  [default: results/NAME.json]")
    check = commands.add_parser("check", help="check submissions")
    check.add_argument("files", type=Path, nargs="*", help="[default: results/*.json]")
    commands.add_parser("table", help=f"check all, and write the table into {PAGE}")
    given = parser.parse_args(arguments)
    try:
        return {"add": _add, "check": _check, "table": _table}[given.command](given)
    except ConfigError as error:
        return _refuse(error)


def _add(given: argparse.Namespace) -> int:
    try:
        report = ReportModel.model_validate_json(read_file(given.report))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{given.report}: not a report of kvview check: {line_of(error)}"
        ) from None
    today = datetime.now(UTC).date()
    try:
        submission = make_submission(
            report, given.its_name, given.its_version, given.its_url, given.its_command, today
        )
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(told) from None
    if problems := [*_problems(submission), *_unlike_the_kit(report)]:
        raise ConfigError(f"{given.report}: {'; '.join(problems)}")
    stem = re.sub(r"[^a-z0-9]+", "-", given.its_name.lower()).strip("-") or "result"
    file: Path = given.file or FOLDER / f"{stem}.json"
    try:
        file.write_text(submission.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    print(printable(str(file)))
    return 0


def _check(given: argparse.Namespace) -> int:
    files = given.files or sorted(FOLDER.glob("*.json"))
    if not files:
        raise ConfigError(f"there is nothing in {FOLDER}/")
    code = 0
    for file in files:
        try:
            read_submission(file)
            print(printable(str(file)))
        except ConfigError as error:
            code = _refuse(error)
    return code


def _refuse(error: ConfigError) -> int:
    print(printable(f"kvview: {error}"), file=sys.stderr)
    return 2


def _table(given: argparse.Namespace) -> int:
    submissions = [read_submission(file) for file in sorted(FOLDER.glob("*.json"))]
    try:
        PAGE.write_text(write_table(submissions, PAGE.read_text(encoding="utf-8")), "utf-8")
    except OSError as error:
        raise ConfigError(f"{PAGE}: {error.strerror}") from None
    print(printable(f"{PAGE}: {len(submissions)} rows"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
