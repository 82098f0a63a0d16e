"""``kvview check`` in one process for each release, and the outcomes."""

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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvview.errors import KVViewError, line_of
from kvview.testing.upgrade.engine_releases import Change, Releases

_MOST_PROCESSES = 4  # an engine takes about 1 GB
_SAID = "kvview: "


class Verdict(StrEnum):
    """The outcome of a release; only green is good."""

    GREEN = "green"
    FAILED = "failed"
    NOT_CHECKED = "not checked"
    COULD_NOT_RUN = "could not run"
    INTERRUPTED = "interrupted"
    BUG = "a bug of kvview"


_BY_CODE = {  # of kvview check
    0: Verdict.GREEN,
    1: Verdict.FAILED,
    2: Verdict.COULD_NOT_RUN,
    3: Verdict.FAILED,
    4: Verdict.NOT_CHECKED,
    5: Verdict.BUG,
    130: Verdict.INTERRUPTED,
}


@dataclass
class ReleaseResult:
    """The findings in one release.

    Args:
        release: Which.
        verdict: How it ended.
        reason: Why it is not green: the first reason; empty when it is.
        seconds: Its duration in seconds, without the download.
        report: The report of the process, see ``docs/report.md``; None if it wrote none.
    """

    release: str
    verdict: Verdict
    reason: str = ""
    seconds: float = 0.0
    report: dict[str, Any] | None = None

    @property
    def left_out(self) -> list[str]:
        """The scenarios that were skipped because the release cannot play them."""
        coverage = ((self.report or {}).get("runs") or {}).get("coverage", {})
        prefix = "left out: "
        return [name.removeprefix(prefix) for name in coverage if name.startswith(prefix)]


@dataclass
class UpgradeReport:
    """All releases, in the order in which they were named.

    Args:
        target: What was checked.
        engine: Of which the releases are.
        results: One a release.
        against: The release that changes are counted from, if one was named.
        changes: The changes since each release; None if they are unknown.
        seconds: All in all.
    """

    target: str
    engine: str
    results: list[ReleaseResult] = field(default_factory=list)
    against: str | None = None
    changes: dict[str, list[Change]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether every release is green."""
        return bool(self.results) and all(r.verdict is Verdict.GREEN for r in self.results)

    def summary(self) -> str:
        """One line: releases by verdict."""
        found = [(v, sum(r.verdict is v for r in self.results)) for v in Verdict]
        counts = ", ".join(f"{number} {verdict}" for verdict, number in found if number)
        return f"{self.target}: {counts} of {len(self.results)} releases, {self.seconds:.0f} s"

    def to_dict(self) -> dict[str, Any]:
        """For JSON, by :class:`~kvview.testing.schema.UpgradeModel`."""
        from kvview.testing.schema import UpgradeModel

        return UpgradeModel.model_validate(self).model_dump(mode="json")


def check_releases(
    target: str,
    engine: str,
    releases: Releases,
    names: Sequence[str],
    options: Sequence[str] = (),
    *,
    on_progress: Callable[[str, str], None] = lambda release, text: None,
    on_result: Callable[[ReleaseResult], None] = lambda result: None,
) -> list[ReleaseResult]:
    """Check a target in releases of an engine, a process each, a few at a time.

    Args:
        target: As for ``kvview check``.
        engine: Its name.
        releases: Of it.
        names: The releases, as :meth:`Releases.resolve` gives them.
        options: Further arguments of ``kvview check``.
        on_progress: Called with the release and its progress, from other threads.
        on_result: Called with each result as it comes, from other threads.

    Returns:
        One a release, in order; those that Ctrl-C left undone are interrupted.
    """
    processes = _Processes()

    def check(release: str) -> ReleaseResult:
        result = _not_begun(release)
        if not processes.are_ended:
            try:
                folder = releases.fetch(release, lambda text: on_progress(release, text))
            except KVViewError as error:
                result = ReleaseResult(release, Verdict.COULD_NOT_RUN, line_of(error))
            else:
                on_progress(release, "checking")
                result = _check_one(target, engine, releases, release, folder, options, processes)
        on_result(result)
        return result

    with ThreadPoolExecutor(min(_MOST_PROCESSES, os.cpu_count() or 1)) as executor:
        futures: list[Future[ReleaseResult]] = []
        try:
            for release in names:
                futures.append(executor.submit(check, release))
            wait(futures)
        except KeyboardInterrupt:
            processes.end()
        begun = [future.result() for future in futures]
    return [*begun, *(_not_begun(release) for release in names[len(begun) :])]


def _not_begun(release: str) -> ReleaseResult:
    return ReleaseResult(release, Verdict.INTERRUPTED, "it was not begun")


def _check_one(
    target: str,
    engine: str,
    releases: Releases,
    release: str,
    folder: Path,
    options: Sequence[str],
    processes: _Processes,
) -> ReleaseResult:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "report.json")
        # -P: the import path is this process's own, behind the release.
        command = [sys.executable, "-P", "-m", "kvview", "check", target, f"--engine={engine}"]
        command += [*options, f"--json={file}"]
        paths = [str(folder), *(path or os.getcwd() for path in sys.path)]
        environment = {
            **releases.environment(),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        code, said = processes.run(command, environment)
        if processes.are_ended and code == -signal.SIGTERM:  # before it could end in order
            code, said = 130, "interrupted"
        text = file.read_text() if file.exists() else ""
    report: dict[str, Any] | None = json.loads(text) if text else None
    verdict, reason = judge(release, code, said, report, engine)
    return ReleaseResult(release, verdict, reason, time.monotonic() - start, report)


def judge(
    release: str, code: int, said: str, report: dict[str, Any] | None, engine: str = ""
) -> tuple[Verdict, str]:
    """Return the findings of a process that checked a release.

    Args:
        release: Which.
        code: Its exit code; negative for a signal.
        said: Its stderr.
        report: Its report, if it wrote one.
        engine: Of which it is a release.

    Returns:
        The verdict and the first reason, which is empty for green.
    """
    if code < 0 or code not in _BY_CODE:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Verdict.COULD_NOT_RUN, f"the process ended by {how}: {_last_line(said)}"
    verdict = _BY_CODE[code]
    if report is None and (missing := re.search(r"No module named '([\w.]+)'", said)):
        name, _, submodule = missing[1].partition(".")
        if submodule and name == engine:
            return verdict, f"{engine} {release} has no module {missing[1]}"
        return verdict, f"importing it needs {name}: pip install {name} (docs/upgrade.md has all)"
    if report is None:
        if verdict in (Verdict.GREEN, Verdict.NOT_CHECKED):
            return Verdict.COULD_NOT_RUN, "the process wrote no report"
        return verdict, _last_line(said)
    engine = (report["runs"] or {}).get("engine", "no engine")
    if release not in engine.replace("+", " ").split():
        return Verdict.COULD_NOT_RUN, f"it ran in {engine}, not in {release}"
    if verdict is Verdict.GREEN and not report["is_clean"]:
        return Verdict.NOT_CHECKED, "its report is not clean"
    return verdict, _first_reason(report, verdict)


def _first_reason(report: dict[str, Any], verdict: Verdict) -> str:
    bad = {
        Verdict.FAILED: ("failed", "unexpected pass"),
        Verdict.NOT_CHECKED: ("not checked",),
    }.get(verdict, ())
    found = next((check for check in report["checks"] if check["outcome"] in bad), None)
    if found is None:
        return "" if verdict is Verdict.GREEN else "it ended before its runs did"
    failure = found["failure"]
    if failure is None:
        return line_of(f"{found['name']} passed, expected: {found['reason']}")
    if verdict is Verdict.NOT_CHECKED:
        return line_of(failure["what"])
    seeds = failure["seeds"]
    many = f" ({len(seeds)} of {report['runs']['num_seeds']} seeds)" if seeds else ""
    return line_of(f"{failure['law']}: {failure['what'].removeprefix(failure['law'] + ': ')}{many}")


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line.removeprefix(_SAID) for line in lines if line.startswith(_SAID)]
    return line_of((told or lines or ["it said nothing"])[-1])


class _Processes:
    """Those that run now; in sessions of their own, so that Ctrl-C ends them once."""

    def __init__(self) -> None:
        self.are_ended = False
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()

    def run(self, command: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
        with self._lock:
            if self.are_ended:
                return 130, "interrupted"
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._running.add(process)
        try:
            _, said = process.communicate()
        finally:
            with self._lock:
                self._running.discard(process)
        return process.returncode, said

    def end(self) -> None:
        """Send SIGTERM to all processes: each still writes its report."""
        with self._lock:
            self.are_ended = True
            for process in self._running:
                process.terminate()
