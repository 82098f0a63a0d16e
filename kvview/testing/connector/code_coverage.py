"""The lines of an author's code that simulated runs reach, in every process of them.

The library ``coverage`` traces the author's files and no others. A worker half in a process of its
own returns its lines to the process that plays the seed, which returns them with its results.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

Lines = Mapping[str, Collection[int]]
"""Numbers of lines, by file."""

HAS_CHEAP_LINES = sys.version_info >= (3, 12)
"""Whether a line costs nothing once it ran (``sys.monitoring``); else a traced run takes twice the
CPU time."""

_active: list[LineTracer] = []


class LineTracer:
    """Measures the lines of some files that run in this process.

    Args:
        paths: The files; without any, nothing is measured.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._coverage: Any = None
        self._known: dict[str, set[int]] = {}
        self._of_children: dict[str, set[int]] = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the block, its new threads included.

        The block runs unmeasured under another tracer, such as a debugger, and inside of
        another measurement.
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
        """Return the lines that ran since the last call, with those of child processes."""
        ran = self._of_children
        if self._coverage is not None:
            data = self._coverage.get_data()
            for path in data.measured_files():
                ran.setdefault(path, set()).update(data.lines(path) or ())
        new = {path: lines - self._known.get(path, set()) for path, lines in ran.items()}
        self._of_children, self._known = {}, _union(self._known, new)
        return {path: lines for path, lines in new.items() if lines}

    def add(self, lines: Lines) -> None:
        """Add the lines that ran in a child process."""
        self._of_children = _union(self._of_children, lines)


def why_not() -> str | None:
    """The reason why lines cannot be measured; None if they can."""
    if find_spec("coverage") is None:
        return "the package coverage is not installed (pip install 'kvview[testing]')"
    if sys.gettrace() is not None:
        return "another program, such as a debugger, traces this process"
    return None


def take_lines() -> Lines:
    """Return the new lines of this process, which measures since it was forked."""
    return _active[0].take() if _active else {}


def add_lines(lines: Lines) -> None:
    """Add the lines of a child process to the measurement of this one."""
    if _active:
        _active[0].add(lines)


def _union(lines: Lines, more: Lines) -> dict[str, set[int]]:
    return {path: {*lines.get(path, ()), *more.get(path, ())} for path in {*lines, *more}}


def _make_coverage(paths: Sequence[str]) -> Any:
    import coverage

    made = coverage.Coverage(data_file=None, include=list(paths), config_file=False)
    made.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
    if HAS_CHEAP_LINES:
        made.set_option("run:core", "sysmon")
    return made
