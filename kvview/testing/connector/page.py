"""One self-contained HTML page about a connector: laws broken, and a run as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from kvview.testing.connector.result import ConnectorFailure, ConnectorReport, Snapshot
from kvview.testing.page import make_table, write_page

_Scale = Callable[[float], float]
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 350, 60, 20, 50, 50
_MAX_X_LABELS, _MAX_Y_LABELS = 15, 6
_AREAS = (
    ("engine", "requests (engine)", "#4e79a7"),
    ("held", "held by the connector alone", "#f28e2b"),
    ("free", "free", "#d7dde3"),
)
_IN_FLIGHT = "#b22222"
_IN_FLIGHT_LABEL = "jobs in flight (line)"


def write_report(path: str | Path, report: ConnectorReport, *, max_failures: int = 5) -> None:
    """Write a page; it needs no other file.

    Args:
        path: Of the page.
        report: What :func:`~kvview.testing.connector.check_connector` found.
        max_failures: How many failures are shown with their picture and script.

    Raises:
        ConfigError: The file cannot be written.
    """
    write_page(path, f"kvview check: {report.connector}", _parts(report, max_failures))


def _parts(report: ConnectorReport, max_failures: int) -> list[str]:
    failures = report.failures
    seeds = "seed" if len(failures) == 1 else "seeds"
    verdict = f"{len(failures)} {seeds} broke a law" if failures else "no law broken"
    if report.is_interrupted:
        verdict = f"interrupted: {verdict}"
    parts = [
        f'<p><b class="{"good" if report.is_clean else "bad"}">{verdict}</b> in '
        f"{report.num_seeds} seeds from {report.first_seed}, {report.seconds:.1f} s.</p>",
    ]
    if failures:
        laws = Counter(failure.law for failure in failures)
        first = {failure.law: failure for failure in reversed(failures)}
        rows = [
            (f"<b>{escape(law)}</b>", str(times), str(first[law].seed), escape(first[law].message))
            for law, times in sorted(laws.items())
        ]
        names = ("law", "seeds", "first seed", "what happened there")
        parts += ["<h2>Laws broken</h2>", make_table(names, rows)]
    parts += [_failure(failure) for failure in failures[:max_failures]]
    if len(failures) > max_failures:
        rest = ", ".join(str(failure.seed) for failure in failures[max_failures:])
        parts.append(f'<p class="note">Not shown: seeds {rest}.</p>')
    counts = [(escape(name), f"{times:,}") for name, times in sorted(report.coverage.items())]
    parts += ["<h2>What the runs did</h2>", make_table(("what", "times"), counts, "times")]
    return parts


def _failure(failure: ConnectorFailure) -> str:
    return (
        f"<h2>Seed {failure.seed}: {escape(failure.law)}</h2>\n<p>{escape(failure.message)}</p>\n"
        f"{timeline_svg(failure.timeline)}\n{_numbers(failure.timeline)}\n"
        f"<p>To see it again:</p>\n<pre>{escape(failure.script)}</pre>"
    )


def _numbers(timeline: Sequence[Snapshot]) -> str:
    if not timeline:
        return ""
    names = ("step", "engine", "held", "free", "in_flight")
    rows = [[str(getattr(snapshot, name)) for name in names] for snapshot in timeline]
    shown = ("step", *(label for _, label, _ in _AREAS), "jobs in flight")
    return f"<details><summary>The same in numbers</summary>{make_table(shown, rows)}</details>"


def timeline_svg(timeline: Sequence[Snapshot]) -> str:
    """Blocks against steps, stacked, and the jobs in flight as a line."""
    if not timeline:
        return "<p>It failed before the first step.</p>"
    first = timeline[0]
    num_blocks = first.free + first.engine + first.held
    top = max(num_blocks, *(snapshot.in_flight for snapshot in timeline), 1)
    width = (_WIDTH - _LEFT - _RIGHT) / len(timeline)

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
    for colour, thickness in (("#fff", 5), (_IN_FLIGHT, 2.5)):  # the halo parts it from the areas
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="{thickness}" '
            f'points="{_points(line)}"><title>{_IN_FLIGHT_LABEL}</title></polyline>'
        )
    parts += [*_axes(timeline, top, x, y), *_legend()]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="blocks against steps">{"".join(parts)}</svg>'
    )


def _axes(timeline: Sequence[Snapshot], top: int, x: _Scale, y: _Scale) -> list[str]:
    left, right, bottom = x(0), x(len(timeline)), y(0)
    parts = [
        f'<path d="M{left},{y(top)} V{bottom} H{right}" fill="none" stroke="#333"/>',
        f'<text transform="translate(16,{(y(top) + bottom) / 2}) rotate(-90)" '
        'text-anchor="middle">blocks (and jobs)</text>',
        f'<text x="{(left + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>',
        f'<path d="M{right},{y(top) - 8} V{bottom}" stroke="{_IN_FLIGHT}" stroke-width="1.5" '
        'stroke-dasharray="4 3"/>',
        f'<text x="{right}" y="{y(top) - 12}" text-anchor="end" style="fill:{_IN_FLIGHT}">'
        "a law is broken here</text>",
    ]
    for blocks in _ticks(0, top, _MAX_Y_LABELS):
        at = y(blocks)
        parts.append(f'<path d="M{left - 5},{at} H{left}" stroke="#333"/>')
        parts.append(f'<text x="{left - 9}" y="{at + 4.5}" text-anchor="end">{blocks}</text>')
    steps = {snapshot.step: index for index, snapshot in enumerate(timeline)}
    for step in _ticks(timeline[0].step, timeline[-1].step, _MAX_X_LABELS):
        if step in steps:
            at = x(steps[step] + 0.5)
            parts.append(f'<path d="M{at},{bottom} V{bottom + 4}" stroke="#333"/>')
            parts.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    return parts


def _legend() -> list[str]:
    parts = []
    at = float(_LEFT)
    for label, colour in [(label, colour) for _, label, colour in _AREAS]:
        parts.append(f'<rect x="{at}" y="6" width="13" height="13" fill="{colour}" stroke="#999"/>')
        parts.append(f'<text x="{at + 19}" y="17">{label}</text>')
        at += 45 + 7.2 * len(label)
    parts.append(f'<path d="M{at},13 h20" stroke="{_IN_FLIGHT}" stroke-width="2.5"/>')
    parts.append(f'<text x="{at + 26}" y="17">{_IN_FLIGHT_LABEL}</text>')
    return parts


def _ticks(first: int, last: int, limit: int) -> list[int]:
    """Round numbers for an axis: both ends, and what keeps clear of them."""
    sizes = (factor * 10**power for power in range(9) for factor in (1, 2, 5))
    every = next(size for size in sizes if (last - first) / size < limit)
    inner = [tick for tick in range(first, last) if tick % every == 0]
    gaps = 0.6 * every
    return sorted({first, last, *(t for t in inner if t - first >= gaps and last - t >= gaps)})


def _steps(values: Sequence[int], x: _Scale, y: _Scale) -> list[tuple[float, float]]:
    """A value a step, as corners of a staircase."""
    return [
        (x(index + side), y(value)) for index, value in enumerate(values) for side in (0.0, 1.0)
    ]


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)
