"""The check of a connector in many releases, with one process each (``kvview check --vllm``).

``kvview check`` checks each release, in a process whose imports find that release first. This
process never imports vLLM.

1. A release is green if its process ended with exit code 0, its report is clean, and the report
   states that the runs used this release.
2. A release that could not be downloaded, imported or exercised is reported and not green.
3. Releases run one after another, because a check uses all cores.
4. On Ctrl-C the process of the current release ends with a report, and the findings so far are
   reported.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvview.errors import KVViewError, line_of
from kvview_vllm.releases.sources import VLLMReleases

_PREFIX = "kvview: "  # start of the line in which a command reports its error


class Verdict(StrEnum):
    """The outcome of a release, from the worst to the best; only green is a success."""

    FAILED = "failed"
    BUG = "a bug of kvview"
    INTERRUPTED = "interrupted"
    COULD_NOT_RUN = "could not run"
    NOT_CHECKED = "not checked"
    GREEN = "green"


_CODES: Mapping[int, Verdict] = {
    1: Verdict.FAILED,
    3: Verdict.FAILED,
    5: Verdict.BUG,
    130: Verdict.INTERRUPTED,
    2: Verdict.COULD_NOT_RUN,
    4: Verdict.NOT_CHECKED,
    0: Verdict.GREEN,
}
"""The verdict for each exit code of ``kvview check``, starting with the worst."""


@dataclass
class ReleaseResult:
    """The findings in one release.

    Args:
        release: Name of the release.
        verdict: Outcome of the release.
        reason: The first reason why the release is not green; empty if it is green.
        seconds: Duration of the check in seconds, without the download.
        report: The report of the process (``docs/report.md``); None if it wrote no report.
    """

    release: str
    verdict: Verdict
    reason: str = ""
    seconds: float = 0.0
    report: dict[str, Any] | None = None

    @property
    def left_out(self) -> list[str]:
        """Parts of scenarios that were skipped, because the release cannot simulate them."""
        runs = (self.report or {}).get("runs") or {}
        return [*runs.get("left_out", ())]

    def __str__(self) -> str:
        runs = (self.report or {}).get("runs") or {}
        parts = [f"{self.verdict}", f"{self.seconds:.0f} s"]
        if runs:
            parts += [f"{runs['num_seeds']} seeds", f"{len(self.left_out)} parts left out"]
        if expected := ((self.report or {}).get("counts") or {}).get("expected failure"):
            parts.append(f"{expected} expected failures")
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.release}: {', '.join(parts)}{reason}"


@dataclass
class UpgradeReport:
    """The results of all releases, in the order in which the user named them.

    Args:
        target: Name of the target.
        engine: Name of the engine.
        results: The results, one per release.
        seconds: Duration of the whole check.
    """

    target: str
    engine: str
    results: list[ReleaseResult] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether every release is green."""
        return bool(self.results) and all(r.verdict is Verdict.GREEN for r in self.results)

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if all releases are green, otherwise the code of the worst verdict."""
        found = {result.verdict for result in self.results}
        return next((code for code, verdict in _CODES.items() if verdict in found), 0)

    def summary(self) -> str:
        """Return the numbers of releases by verdict, in one line."""
        found = [(v, sum(r.verdict is v for r in self.results)) for v in reversed(Verdict)]
        counts = ", ".join(f"{number} {verdict}" for verdict, number in found if number)
        return f"{self.target}: {counts} of {len(self.results)} releases, {self.seconds:.0f} s"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON, by :class:`~kvview.testing.results.schema.UpgradeModel`."""
        from kvview.testing.results.schema import UpgradeModel

        return UpgradeModel.model_validate(self).model_dump(mode="json")


def check_releases(
    target: str,
    engine: str,
    releases: VLLMReleases,
    names: Sequence[str],
    options: Sequence[str] = (),
    *,
    on_progress: Callable[[str], None] = lambda text: None,
    on_result: Callable[[ReleaseResult], None] = lambda result: None,
) -> UpgradeReport:
    """Check a target in releases of an engine, with one process per release.

    Args:
        target: The target, as for ``kvview check``.
        engine: Name of the engine.
        releases: Releases of the engine.
        names: The releases, as ``resolve`` returns them.
        options: Further arguments of ``kvview check``.
        on_progress: Called with the progress.
        on_result: Called with each result.

    Returns:
        One result per release, in order. Releases that Ctrl-C ended or that were not started are
        interrupted.
    """
    start = time.monotonic()
    report = UpgradeReport(target, engine)
    is_interrupted = False
    for release in names:
        result = ReleaseResult(release, Verdict.INTERRUPTED, "it was not started")
        try:
            if not is_interrupted:
                on_progress(f"{engine} {release}")
                folder = releases.fetch(release, on_progress)
                command = [f"--engine={engine}", *options]
                environment = _environment(releases, folder)
                result, is_interrupted = _check_one(target, engine, release, command, environment)
        except KVViewError as error:
            result = ReleaseResult(release, Verdict.COULD_NOT_RUN, line_of(error))
        except KeyboardInterrupt:
            is_interrupted = True
        on_result(result)
        report.results.append(result)
    report.seconds = time.monotonic() - start
    return report


def _environment(releases: VLLMReleases, folder: Path) -> dict[str, str]:
    """Return the environment variables with which imports find a release first."""
    paths = [str(folder), *(path or os.getcwd() for path in sys.path)]
    return {**releases.environment(), **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def _ctrl_c_afterwards() -> Iterator[None]:
    """Deliver Ctrl-C after the block. A blocked signal would stay blocked in a new process."""
    if threading.current_thread() is not threading.main_thread():  # has no handlers
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _check_one(
    target: str, engine: str, release: str, options: Sequence[str], environment: Mapping[str, str]
) -> tuple[ReleaseResult, bool]:
    """Return the result of a release, and whether Ctrl-C ended its process."""
    start = time.monotonic()
    is_interrupted = False
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "report.json")
        # -P: the import path is the release, followed by the path of this process.
        command = [sys.executable, "-P", "-m", "kvview", "check", target, f"--json={file}"]
        try:
            with _ctrl_c_afterwards():  # otherwise it may leave a process that runs on
                process = subprocess.Popen(
                    [*command, *options],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # one Ctrl-C ends the process; it writes its report
                )
            _, errors = process.communicate()
        except KeyboardInterrupt:
            is_interrupted = True
            process.terminate()
            _, errors = process.communicate()
        text = file.read_text() if file.exists() else ""
    code = process.returncode
    if is_interrupted and code == -signal.SIGTERM:  # before the process could write its report
        code, errors = 130, "interrupted"
    report: dict[str, Any] | None = json.loads(text) if text else None
    verdict, reason = judge(release, code, errors, report, engine)
    result = ReleaseResult(release, verdict, reason, time.monotonic() - start, report)
    return result, is_interrupted


def judge(
    release: str, code: int, errors: str, report: dict[str, Any] | None, engine: str = ""
) -> tuple[Verdict, str]:
    """Return the verdict on a release from the process that checked it.

    Args:
        release: Name of the release.
        code: Exit code of the process; negative for a signal.
        errors: Stderr of the process.
        report: Report of the process, or None.
        engine: Name of the engine.

    Returns:
        The verdict and the first reason, which is empty for green.
    """
    if code not in _CODES:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Verdict.COULD_NOT_RUN, f"the process ended by {how}: {_last_line(errors)}"
    verdict = _CODES[code]
    if report is None and (missing := re.search(r"No module named '([\w.]+)'", errors)):
        name, _, submodule = missing[1].partition(".")
        if submodule and name == engine:
            return verdict, f"{engine} {release} has no module {missing[1]}"
        return verdict, f"importing it needs {name}: pip install {name} (docs/upgrade.md has all)"
    if report is None:
        if verdict in (Verdict.GREEN, Verdict.NOT_CHECKED):
            return Verdict.COULD_NOT_RUN, "the process wrote no report"
        return verdict, _last_line(errors)
    engine = (report["runs"] or {}).get("engine", "no engine")
    if release not in re.split(r"[ +,]", engine):
        return Verdict.COULD_NOT_RUN, f"the runs used {engine}, not {release}"
    if verdict is Verdict.GREEN and not report["is_clean"]:
        return Verdict.NOT_CHECKED, "the report of the process is not clean"
    return verdict, _first_reason(report, verdict)


def _first_reason(report: dict[str, Any], verdict: Verdict) -> str:
    bad = {
        Verdict.FAILED: ("failed", "unexpected pass"),
        Verdict.NOT_CHECKED: ("not checked",),
    }.get(verdict, ())
    found = next((check for check in report["checks"] if check["outcome"] in bad), None)
    if found is None:
        return "" if verdict is Verdict.GREEN else "the process ended before the last run"
    failure = found["failure"]
    if failure is None:
        return line_of(f"{found['name']} passed, but is expected to fail: {found['reason']}")
    if verdict is Verdict.NOT_CHECKED:
        return line_of(failure["what"])
    seeds = failure["seeds"]
    many = f" ({len(seeds)} of {report['runs']['num_seeds']} seeds)" if seeds else ""
    return line_of(f"{failure['law']}: {failure['what'].removeprefix(failure['law'] + ': ')}{many}")


def _last_line(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    reported = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
    return line_of((reported or lines or ["the process printed no text"])[-1])
