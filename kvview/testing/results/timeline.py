"""The last steps of a failing run as an HTML page: requests, jobs and held blocks, by step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from kvview.errors import ConfigError
from kvview.laws import titled
from kvview.testing.results.law_broken import LawBroken

_STEP_ENDS = re.compile(r"step (\d+) ends")
_ALLOCATED = re.compile(r"on_blocks_allocated (\S+)")
_LEFT = re.compile(r"on_request_(finished|preempted) (\S+)")
_PLANNED = re.compile(r"\s*planned job (\d+): (.*)")
_REPORTED = re.compile(r"job (\d+)( failed)?")
_HELD = re.compile(r"\s*(touch_blocks|free_blocks) blocks ([\d, ]+?)(?: (\S+))?$")
_PAGE = Path(__file__).with_suffix(".html")


@dataclass
class Bar:
    """A request, a job or a hold, from its first step to its last one; None until it ends."""

    kind: str
    name: str
    first: int
    last: int | None = None


def write_timeline(failure: LawBroken, path: str) -> None:
    """Write the page about a failure.

    Raises:
        ConfigError: The file cannot be written.
    """
    bars, steps = read_log(failure.log)
    page = Template(_PAGE.read_text(encoding="utf-8")).substitute(
        title=escape(titled(failure.law)),
        what=escape(failure.what),
        steps="".join(f"<th>{step}</th>" for step in steps),
        rows="\n".join(_row(bar, steps) for bar in bars),
        script=escape(failure.script),
        log=escape("\n".join(failure.log)),
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--timeline {path!r}: {error.strerror}") from error


def read_log(log: Sequence[str]) -> tuple[list[Bar], range]:
    """Return the bars of a log in the order of their kinds, and its steps."""
    ends = [int(found[1]) for line in log if (found := _STEP_ENDS.match(line))]
    step = first = ends[0] if ends else 1
    bars: list[Bar] = []

    def end(kind: str, name: str, as_kind: str = "") -> None:
        for bar in bars:
            if (bar.kind, bar.name.partition(":")[0], bar.last) == (kind, name, None):
                bar.kind, bar.last = as_kind or kind, step
                return

    for line in log:
        if found := _STEP_ENDS.match(line):
            step = int(found[1]) + 1
        elif found := _ALLOCATED.match(line):
            bars.append(Bar("request", found[1], step))
        elif found := _LEFT.match(line):
            end("request", found[2])
        elif found := _PLANNED.match(line):
            bars.append(Bar("job", f"job {found[1]}: {found[2]}", step))
        elif line.startswith("on_transfers_finished"):
            for number, failed in _REPORTED.findall(line):
                end("job", f"job {number}", "job failed" if failed else "")
        elif found := _HELD.match(line):
            for block in found[2].split(", "):
                if found[1] == "free_blocks":
                    end("block", f"block {block}")
                else:
                    bars.append(Bar("block", f"block {block}: held at {found[3]}", step))
    end_of_log = step - 1 if log and _STEP_ENDS.match(log[-1]) else step
    return sorted(bars, key=_rank), range(first, end_of_log + 1)


def _rank(bar: Bar) -> int:
    return ("request", "job", "block").index(bar.kind.split()[0])


def _row(bar: Bar, steps: range) -> str:
    last = steps[-1] if bar.last is None else bar.last
    text = "" if bar.last is not None else "does not end"
    cells = "<td></td>" * (bar.first - steps[0])
    cells += f'<td class="{bar.kind}" colspan="{last - bar.first + 1}">'
    cells += f"{'failed' if 'failed' in bar.kind else text}</td>"
    return f"<tr><th>{escape(bar.name)}</th>{cells}{'<td></td>' * (steps[-1] - last)}</tr>"
