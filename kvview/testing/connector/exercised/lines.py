"""The lines of the author's code that simulated runs execute, in all processes.

The library ``coverage`` traces the author's files only, and finds the statements that did not run.
A worker half in a separate process returns its lines to the process that plays the seed, which adds
them to its results.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

Lines = Mapping[str, Collection[int]]
"""Numbers of the lines that ran, by file."""

_NORMAL = "KeyError|IndexError|LookupError|AttributeError|StopIteration|FileNotFoundError"
_NORMAL += "|FileExistsError|BlockingIOError|Empty|Full"  # normal return values in Python
_CONSTANT = r"None|True|False|-?[\d.]+|\[\]|\{\}|\(\)|\"[^\"]*\"|'[^']*'"
_LISTED_ONLY = (
    r"^\s*raise\b",
    rf"^\s*except\b(?!.*\b({_NORMAL})\b)",
    r"(?i:^\s*([\w.]*\b_?(log|logger|logging|warnings)\.\w+|print)\()",
    r"(?i:^\s*(el)?if\b.*(cuda|\bhip\b|\bxpu\b|sys\.platform|version_info|TYPE_CHECKING))",
    r"^\s*def __(repr|str)__\b",
    rf"^\s*return( ({_CONSTANT}))?\s*(#.*)?$",
    r"^\s*(pass|break|continue|import|from)\b",
)
"""Patterns of lines that handle errors, logs, devices or display, or have no effect.

The block of statements under such a line is excluded, too.
"""

_active: list[LineTracer] = []


@dataclass(frozen=True)
class Region:
    """The statements of a function, and the statements that ran.

    Args:
        statements: Lines of the statements, in order.
        executed: Lines that ran.
        missing: Lines that did not run, and without which the check is incomplete.
    """

    statements: list[int]
    executed: set[int]
    missing: set[int]

    def unrun(self) -> Iterator[list[int]]:
        """Yield each maximal sequence of consecutive statements that did not run."""
        for has_run, group in groupby(self.statements, self.executed.__contains__):
            if not has_run:
                yield list(group)


def regions_of(ran: Lines) -> Mapping[str, Mapping[str, Region]]:
    """Find the statements of functions that ran, and the statements that did not run.

    Args:
        ran: Lines that ran, by file.

    Returns:
        The functions of each file, by qualified name.
    """
    cover = _make_coverage(list(ran))
    cover.get_data().add_lines(ran)
    with tempfile.TemporaryDirectory(prefix="kvview-") as folder:
        file = Path(folder, "report.json")
        cover.json_report(outfile=str(file))
        report = json.loads(file.read_text())["files"]
    found = {os.path.realpath(path): one["functions"] for path, one in report.items()}
    return {
        path: {
            name: _region(one, lines)
            for name, one in found.get(os.path.realpath(path), {}).items()
            if name
        }
        for path, lines in ran.items()
    }


def _region(report: Mapping[str, Any], ran: Collection[int]) -> Region:
    excluded, missing = report["excluded_lines"], report["missing_lines"]
    executed = {*report["executed_lines"], *(line for line in excluded if line in ran)}
    return Region(sorted({*executed, *excluded, *missing}), executed, set(missing))


class LineTracer:
    """Measures the lines of some files that run in this process.

    Args:
        paths: The files; without files nothing is measured.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._coverage: Any = None
        self._ran: dict[str, set[int]] = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the ``with`` block, including the threads that it starts.

        The block is not measured under another tracer, such as a debugger, or inside another
        measurement.
        """
        if not self._paths or _active or why_not() is not None:
            yield
            return
        if self._coverage is None:
            self._coverage = _make_coverage(self._paths)
        _active.append(self)
        self._coverage.start()
        try:
            yield
        finally:
            self._coverage.stop()
            _active.clear()

    def take(self) -> Lines:
        """Return the lines that have run so far, also in child processes."""
        if self._coverage is not None:
            data = self._coverage.get_data()
            self.add({path: data.lines(path) or () for path in data.measured_files()})
        return self._ran

    def add(self, lines: Lines) -> None:
        """Add lines that ran in a child process."""
        for path, some in lines.items():
            self._ran.setdefault(path, set()).update(some)


def why_not() -> str | None:
    """Return the reason why lines cannot be measured; None if they can be measured."""
    if find_spec("coverage") is None:
        return "the package coverage is not installed (pip install 'kvview[testing]')"
    if sys.gettrace() is not None:
        return "another program, such as a debugger, traces this process"
    return None


def take_lines() -> Lines:
    """Return the lines of this process so far."""
    return _active[0].take() if _active else {}


def add_lines(lines: Lines) -> None:
    """Add the lines of a child process to the measurement of this process."""
    if _active:
        _active[0].add(lines)


def _make_coverage(paths: Sequence[str]) -> Any:
    import coverage

    made = coverage.Coverage(data_file=None, include=list(paths), config_file=False)
    made.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
    # Coverage reads exclude_also from a file only.
    usual: Any = made.get_option("report:exclude_lines")
    made.set_option("report:exclude_lines", [*usual, *_LISTED_ONLY])
    if sys.version_info >= (3, 12):
        made.set_option("run:core", "sysmon")  # traces only the first run of a line
    return made
