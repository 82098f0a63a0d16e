"""One self-contained HTML page about a connector: laws broken, and a run as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from kvview import ConfigError
from kvview_reference.simulation_result import ConnectorFailure, ConnectorReport, Snapshot

_Scale = Callable[[float], float]
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 900, 300, 50, 40, 15
_AREAS = (
    ("engine", "requests", "#4e79a7"),
    ("held", "held by the connector alone", "#f28e2b"),
    ("free", "free", "#d7dde3"),
)
_IN_FLIGHT = "#b22222"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em;
  color: #222; background: #fff }
table { border-collapse: collapse } th, td { text-align: left; padding: .2em 1.2em .2em 0 }
pre { background: #f4f5f7; padding: 1em; overflow-x: auto; font-size: 13px }
svg { width: 100%; height: auto } .bad { color: #b22222 } .good { color: #2e7d32 }
svg text { font: 12px system-ui, sans-serif; fill: #333 }
"""


def write_report(path: str | Path, report: ConnectorReport, *, max_failures: int = 5) -> None:
    """Write a page; it needs no other file.

    Args:
        path: Of the page.
        report: What :func:`~kvview_reference.simulation.check_connector` found.
        max_failures: How many failures are shown with their picture and script.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        Path(path).write_text(_page(report, max_failures), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"report {str(path)!r}: {error.strerror}") from error


def _page(report: ConnectorReport, max_failures: int) -> str:
    title = escape(f"kvview check: {report.connector}")
    verdict = "no law broken" if report.is_clean else f"{len(report.failures)} seeds broke a law"
    end = ", interrupted" if report.is_interrupted else ""
    parts = [
        f"<h1>{title}</h1>",
        f'<p><b class="{"good" if report.is_clean else "bad"}">{verdict}</b> in '
        f"{report.num_seeds} seeds from {report.first_seed}, {report.seconds:.1f} s{end}.</p>",
    ]
    if report.failures:
        laws = Counter(failure.law for failure in report.failures)
        first = {failure.law: failure for failure in reversed(report.failures)}
        rows = [
            (law, str(times), str(first[law].seed), first[law].message)
            for law, times in sorted(laws.items())
        ]
        parts += ["<h2>Laws</h2>", _table(("law", "seeds", "first", "what happened"), rows)]
    for failure in report.failures[:max_failures]:
        parts.append(_failure(failure))
    counts = [(name, str(times)) for name, times in sorted(report.coverage.items())]
    parts += ["<h2>What the runs did</h2>", _table(("what", "times"), counts)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _failure(failure: ConnectorFailure) -> str:
    return (
        f"<h2>Seed {failure.seed}: {escape(failure.law)}</h2>\n<p>{escape(failure.message)}</p>\n"
        f"{timeline_svg(failure.timeline)}\n<pre>{escape(failure.script)}</pre>"
    )


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def timeline_svg(timeline: Sequence[Snapshot]) -> str:
    """Blocks against steps, stacked, and the jobs in flight as a line."""
    if not timeline:
        return "<p>It failed before the first step.</p>"
    first = timeline[0]
    num_blocks = first.free + first.engine + first.held
    top = max(num_blocks, *(snapshot.in_flight for snapshot in timeline))
    width = (_WIDTH - _LEFT - 10) / len(timeline)

    def x(step: float) -> float:
        return round(_LEFT + step * width, 1)

    def y(blocks: float) -> float:
        return round(_HEIGHT - _BOTTOM - blocks * (_HEIGHT - _BOTTOM - _TOP) / top, 1)

    parts = []
    base = [0] * len(timeline)
    for name, label, colour in _AREAS:
        upper = [low + getattr(s, name) for low, s in zip(base, timeline, strict=True)]
        points = _steps(upper, x, y) + _steps(base, x, y)[::-1]
        parts.append(
            f'<polygon fill="{colour}" points="{_points(points)}"><title>{label}</title></polygon>'
        )
        base = upper
    line = _steps([snapshot.in_flight for snapshot in timeline], x, y)
    parts.append(
        f'<polyline fill="none" stroke="{_IN_FLIGHT}" stroke-width="2" points="{_points(line)}"/>'
    )
    for blocks in sorted({0, num_blocks // 2, num_blocks}):
        parts.append(f'<text x="{_LEFT - 6}" y="{y(blocks) + 4}" text-anchor="end">{blocks}</text>')
    every = max(1, len(timeline) // 12)
    for index in range(0, len(timeline), every):
        parts.append(
            f'<text x="{x(index + 0.5)}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">'
            f"{timeline[index].step}</text>"
        )
    at = _LEFT
    for label, colour in [(a[1], a[2]) for a in _AREAS] + [("jobs in flight (line)", _IN_FLIGHT)]:
        parts.append(f'<rect x="{at}" y="{_HEIGHT - 14}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{at + 16}" y="{_HEIGHT - 4}">{label}</text>')
        at += 40 + 7 * len(label)
    parts.append(
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 4}" text-anchor="end">blocks / step</text>'
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="blocks against steps">{"".join(parts)}</svg>'
    )


def _steps(values: Sequence[int], x: _Scale, y: _Scale) -> list[tuple[float, float]]:
    """A value a step, as corners of a staircase."""
    return [
        (x(index + side), y(value)) for index, value in enumerate(values) for side in (0.0, 1.0)
    ]


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)
