"""Check the folders of ``results/``, and write ``docs/results.md`` from them.

python docs/make_results.py                # check all folders, and write the page
python docs/make_results.py --run NAME ...   # run the commands of folders, and compare the verdicts

``--run`` writes no file into the folders. The commands run in the environment of this script, so
vLLM's requirements must be installed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from docs.parts import ROOT, with_parts, write
from docs.submissions import (
    CLASSES,
    RED,
    RESULTS,
    WHOLE,
    Report,
    Submission,
    read,
    read_report,
    submissions,
)
from kvview.cli.result_file import Profile
from kvview.errors import ConfigError

PAGE = ROOT / "docs/results.md"
SECONDS = 3600
"""Longest time of a block of commands."""
_LONGEST = 54  # characters of evidence, next to the link to a report
_LONGEST_REASON = 105  # characters
_MOST = 1  # findings of a class
_SIGNS = {"green": "✔", "red": "✘", "not checked": "?", "could not run": "–"}


@dataclass(frozen=True)
class Row:
    """The results of one implementation in one release."""

    submission: Submission
    release: str
    reports: Sequence[Report]

    def profiles(self) -> Iterator[Profile]:
        """The verdicts, in the order of the columns."""
        found = [profile for report in self.reports for profile in report.result.profiles]
        return iter(sorted(found, key=lambda profile: list(CLASSES).index(profile.name)))

    @property
    def replaced(self) -> list[str]:
        """The replaced parts."""
        return sorted({part for each in self.reports for part in each.result.replaced})

    @property
    def verdicts(self) -> Mapping[str, Profile]:
        """The verdict on each class that could run."""
        return {each.name: each for each in self.profiles() if each.verdict != "could not run"}

    @property
    def is_green(self) -> bool:
        """Whether each result is as it should be, without an expected failure."""
        return all(
            profile.verdict == "green" and not profile.counts.get("expected failure")
            for profile in self.verdicts.values()
        )

    @property
    def is_whole(self) -> bool:
        """Whether each class of one kind of implementation has a verdict."""
        is_select = any("--select" in line for r in self.reports for line in r.result.reproduce)
        return not is_select and any(classes <= self.verdicts.keys() for classes in WHOLE)


def faults(folders: Sequence[Path]) -> list[str]:
    """Return the faults of folders, each in one line."""
    found = []
    for folder in folders:
        try:
            lines = [*read(folder).faults()]
        except ConfigError as error:
            lines = [str(error)]
        found += [f"results/{folder.name}/{line}" for line in lines]
    return found


def rows() -> list[Row]:
    """Return all results, by implementation and release."""
    found = []
    for submission in map(read, submissions()):
        releases = sorted({report.release for report in submission.reports}, key=_in_order)
        for release in releases or [""]:
            reports = [each for each in submission.reports if each.release == release]
            found.append(Row(submission, release, reports))
    return sorted(found, key=lambda row: row.submission.name.lower())


def page() -> str:
    """Return the text of ``docs/results.md``."""
    found = rows()
    ran = [row for row in found if row.verdicts]
    lines = ["## Complete", "", *_grid([row for row in ran if row.is_whole])]
    lines += ["", "## Partial", "", *_grid([row for row in ran if not row.is_whole])]
    lines += ["", "## Not run", "", "| implementation | vLLM | reason |", "|---|---|---|"]
    for row in (row for row in found if not row.verdicts):
        errors = [finding.evidence for each in row.profiles() for finding in each.findings]
        reason = _short(errors[0], _LONGEST_REASON) if errors else row.submission.about.reason
        lines.append(f"| {_link(row)} | {row.release} | {reason} |")
    lines += ["", "## Details", ""]
    explained = [row for row in ran if row.replaced or not row.is_green]
    for _, group in groupby(explained, key=lambda row: row.submission.folder):
        lines += _details([*group])
    return with_parts(PAGE, verdicts="\n".join(lines))


def _grid(found: Sequence[Row]) -> Iterator[str]:
    names = [name for name in CLASSES if any(name in row.verdicts for row in found)]
    heads = ["implementation", "vLLM", *(CLASSES[name] for name in names)]
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in found:
        cells = [_cell(row.verdicts[name]) if name in row.verdicts else "" for name in names]
        star = r"\*" if row.replaced else ""
        yield f"| {_link(row)}{star} | {row.release} | {' | '.join(cells)} |"


def _cell(profile: Profile) -> str:
    counts = profile.counts
    total = sum(counts.values()) - counts.get("skipped", 0)
    bad = sum(counts.get(name, 0) for name in RED)
    text = {"red": f"{bad} of {total}", "not checked": f"{counts.get('not checked', 0)} of {total}"}
    expected = counts.get("expected failure", 0)
    more = f", {expected} expected" if expected else ""
    cell = f"{_SIGNS[profile.verdict]} {text.get(profile.verdict, total)}{more}"
    return f"**{cell}**" if profile.verdict == "red" else cell


def _link(row: Row) -> str:
    submission = row.submission
    return f"[{submission.name}](../results/{submission.folder}/README.md)"


def _details(rows: Sequence[Row]) -> Iterator[str]:
    """Describe all rows of one implementation."""
    submission = rows[0].submission
    yield '<details markdown="1">'
    yield f"<summary>{submission.name}, vLLM {'; '.join(map(_signs, rows))}</summary>"
    yield ""
    newest = max(report.result.date for row in rows for report in row.reports)
    about = submission.about
    owner = about.owner if about.project == "none" else f"[{about.owner}]({about.project})"
    yield f"{owner}, reported {newest}."
    for row in rows:
        if row.replaced:
            yield f"{row.release}: replaced, so not checked: {'; '.join(row.replaced)}."
    yield ""
    for name in CLASSES:
        if found := [line for row in rows if name in row.verdicts for line in _findings(row, name)]:
            link = about.upstream.get(name, "")
            yield f"**{CLASSES[name]}**{': ' + link if link else ''}"
            yield ""
            yield from found
            yield ""
    yield "</details>"
    yield ""


def _signs(row: Row) -> str:
    signs = (f"{CLASSES[each.name]} {_SIGNS[each.verdict]}" for each in row.profiles())
    return f"{row.release}: {' '.join(signs)}"


def _findings(row: Row, name: str) -> Iterator[str]:
    """Yield the first findings of a class, in one line each."""
    subjects: dict[tuple[str, str], list[str]] = {}
    for finding in row.verdicts[name].findings:
        if finding.outcome in (*RED, "not checked", "expected failure"):
            key = (finding.outcome, _short(finding.evidence))
            subjects.setdefault(key, []).append(finding.subject)
    for (outcome, evidence), (first, *others) in [*subjects.items()][:_MOST]:
        more = f" and {len(others)} more" if others else ""
        yield f"- {row.release}, {outcome}: {first}{more}{': ' + evidence if evidence else ''}"
    if len(subjects) > _MOST:
        yield f"- {len(subjects) - _MOST} more"


def _short(text: str, longest: int = _LONGEST) -> str:
    text = text if len(text) <= longest else f"{text[:longest]}..."
    return re.sub(r"([|*_{])", r"\\\1", text).replace("<", "&lt;")


def _in_order(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)]


def run(submission: Submission) -> Iterator[str]:
    """Run the commands of a folder; return each report whose verdicts differ, in one line."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    verdicts = {report.file: _verdicts(report) for report in submission.reports}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, submission.folder)
        place.mkdir()
        for script in submission.scripts:
            text = script
            for file in verdicts:
                text = text.replace(f"results/{submission.folder}/{file}", f"{place}/{file}")
            with subprocess.Popen(
                ["bash", "-c", text],
                cwd=ROOT,
                env=os.environ | {"PATH": path},
                start_new_session=True,
            ) as shell:
                try:
                    shell.wait(SECONDS)
                finally:  # servers that the commands started, too
                    with suppress(ProcessLookupError):
                        os.killpg(shell.pid, signal.SIGTERM)
        for file, expected in verdicts.items():
            if not (place / file).exists():
                yield f"results/{submission.folder}/{file}: the commands did not write this report"
                continue
            found = _verdicts(read_report(place / file))
            if found != expected:
                yield f"results/{submission.folder}/{file}: expected {expected}, got {found}"


def _verdicts(report: Report) -> dict[str, str]:
    return {profile.name: profile.verdict for profile in report.result.profiles}


def main() -> int:
    """Check the folders, run those that are named, and write the page; return the exit code."""
    parser = argparse.ArgumentParser(description="Check results/, and write docs/results.md.")
    parser.add_argument("--run", nargs="+", metavar="NAME", help="Folders whose commands run.")
    parser.add_argument("--check", action="store_true", help="Compare the page, and write nothing.")
    arguments = parser.parse_args()
    folders = [RESULTS / name for name in arguments.run or ()]
    wrong = faults([*submissions(), *(each for each in folders if not each.is_dir())])
    if not wrong:
        wrong = [line for folder in folders for line in run(read(folder))]
    for line in wrong:
        print(line)
    if wrong or arguments.run:
        return 1 if wrong else 0
    return write({PAGE: page()})


if __name__ == "__main__":
    sys.exit(main())
