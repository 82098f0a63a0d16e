"""The report as one self-contained HTML page: the curves, and the text of the terminal."""

from __future__ import annotations

from html import escape
from math import log10

from kvview.version import versions_of
from kvview.web_chart import LEFT, TOP, Chart, Point, points_of
from kvview.web_page import made_by, write_page
from kvview_reference.replay.traces import Lost
from kvview_reference.sizing.sweep import SizeReport

_HEIGHT, _BOTTOM = 400, 84
_NUM_COLOURS = 4
_DASHES = ("", "9 3", "9 3 2 3", "4 3")  # besides colours
_MARKS = ("", "M-4,-4 h8 v8 h-8 z", "M0,-5 L5,4 H-5 z", "M0,-5 L5,0 L0,5 L-5,0 z")
_SHARE = "share of the prompt blocks"


def write_size_page(path: str, report: SizeReport, text: str, lost: Lost) -> None:
    """Write the page.

    Args:
        path: The file to write.
        report: The report.
        text: The report as the terminal shows it.
        lost: Parts of the trace that could not be read.

    Raises:
        ConfigError: The file cannot be written.
    """
    parts = [_curves(report), f"<pre>{escape(text)}</pre>", *lost.as_html()]
    title = f"kvview size: {report.trace}"
    write_page("--html", path, title, [*parts, *made_by(versions_of())])


def _curves(report: SizeReport) -> str:
    sizes = [size for size, _ in report.lru_curve if size]
    shown = [point.host_blocks for point in report.curves[0].points if point.host_blocks]
    low, high = min(sizes + shown), max(sizes + shown)
    # Far below the size of the GPU cache, the host gains nothing.
    low = min(max(low, report.gpu_blocks // 4, high // 1000, 1), high)
    top = min(1.0, 1.08 * max(report.unlimited_hit_rate, *(rate for _, rate in report.optimum)))
    name = "hit rate against the size of the host"
    last = log10(max(high, low + 1))
    chart = Chart(name, log10(low), last, max(top, 0.01), _HEIGHT, _BOTTOM)
    lines: list[tuple[str, str, str, list[Point]]] = []
    for number, curve in enumerate(report.curves):
        points = [
            (float(point.host_blocks), 1 - point.computed_rate)
            for point in curve.points
            if point.host_blocks >= low
        ]
        if not number:
            points = [(float(s), rate) for s, rate in report.lru_curve if s >= low]
        kind = f"curve c{number % _NUM_COLOURS}"
        dash = _DASHES[number % len(_DASHES)]
        lines.append((curve.policy, kind, dash, points))
    ends = [(float(low), report.no_connector_hit_rate), (float(high), report.no_connector_hit_rate)]
    lines.append(("no connector", "curve alone", "", ends))
    bound = [(float(size), rate) for size, rate in report.optimum if size >= low]
    lines.append(("at most (MIN)", "curve most", "", bound))
    parts = [*chart.shares(_SHARE), *_sizes(report, chart, low, high)]
    if report.knee_host_blocks > low:
        at = chart.x(log10(report.knee_host_blocks))
        parts.append(f'<path class="knee" d="M{at},{TOP} V{chart.bottom}"/>')
        parts.append(f'<text x="{at - 6}" y="{chart.bottom - 8}" text-anchor="end">knee</text>')
    legend_x = LEFT
    for number, (label, kind, dash, points) in enumerate(lines):
        style = f' stroke-dasharray="{dash}"' if dash else ""
        mark = _MARKS[number % len(_MARKS)] if kind.startswith("curve c") else ""
        path = points_of((chart.x(log10(size)), chart.y(rate)) for size, rate in points)
        parts.append(f'<polyline class="{kind}"{style} points="{path}">')
        parts.append(f"<title>{escape(label)}</title></polyline>")
        marked = [(chart.x(log10(size)), chart.y(rate)) for size, rate in points] if mark else []
        y = _HEIGHT - 12
        parts.append(f'<path class="{kind}"{style} d="M{legend_x},{y} h34"/>')
        for x, at_y in [*marked, (legend_x + 17, y)] if mark else []:
            shape = f'<path class="mark {kind.split()[1]}" d="{mark}"/>'
            parts.append(f'<g transform="translate({x},{at_y})">{shape}</g>')
        parts.append(f'<text x="{legend_x + 40}" y="{y + 4}">{escape(label)}</text>')
        legend_x += 62 + round(7.2 * len(label))
    return chart.svg(parts)


def _sizes(report: SizeReport, chart: Chart, low: int, high: int) -> list[str]:
    """Draw the axis of sizes, in blocks, and in GiB with a model."""
    parts = []
    decades = range(int(log10(low)), int(log10(high)) + 1)
    ticks = [factor * 10**decade for decade in decades for factor in (1, 2, 5)]
    for size in ticks:
        if low <= size <= high:
            parts.append(chart.tick(chart.x(log10(size)), f"{size:,}"))
            if report.model is not None:
                gib = size * report.model.block_bytes / 2**30
                parts.append(
                    chart.tick(
                        chart.x(log10(size)),
                        f"{gib:,.0f} GiB" if gib >= 10 else f"{gib:.2g} GiB",
                        1,
                    )
                )
    return parts
