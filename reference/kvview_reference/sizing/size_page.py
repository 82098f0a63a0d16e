"""The report as one self-contained HTML page: the curves, the timeline and the figures."""

from __future__ import annotations

from html import escape
from math import log10

from kvview.version import versions_of
from kvview.web_chart import HIT_KINDS, LEFT, TOP, Chart, Point, hit_areas, points_of
from kvview.web_page import made_by, make_table, wide, write_page
from kvview_reference.replay.traces import Lost
from kvview_reference.sizing.explain import blocks_and_gib, conclusions, explain
from kvview_reference.sizing.sweep import PolicyCurve, SizeReport

_HEIGHT, _BOTTOM = 400, 84
_TIMELINE_HEIGHT, _TIMELINE_BOTTOM = 260, 70
_NUM_COLOURS = 4
_DASHES = ("", "9 3", "9 3 2 3", "4 3")  # besides colours
_MARKS = ("", "M-4,-4 h8 v8 h-8 z", "M0,-5 L5,4 H-5 z", "M0,-5 L5,0 L0,5 L-5,0 z")
_SHARE = "share of the prompt blocks"


def write_size_page(path: str, report: SizeReport, lost: Lost) -> None:
    """Write the page.

    Args:
        path: The file to write.
        report: The report.
        lost: Parts of the trace that could not be read.

    Raises:
        ConfigError: The file cannot be written.
    """
    paragraphs = [f"<p>{escape(line)}</p>" for line in explain(report)]
    num_first = len(conclusions(report))
    parts = [
        *paragraphs[:num_first],
        "<h2>Hits against the size of the host</h2>",
        _curves(report),
        "<h2>Costs by size</h2>",
        *(_table(report, curve) for curve in report.curves),
        "<h2>Over time</h2>",
        f"<p>With LRU and {escape(blocks_and_gib(report, report.knee_host_blocks))}.</p>",
        _timeline(report),
        "<h2>Basis</h2>",
        *paragraphs[num_first:],
        f"<p>{report.requests:,} requests, {report.blocks:,} blocks of {report.block_size} "
        f"tokens, {report.different_blocks:,} different ones, {report.trace_seconds:,.0f} s.</p>",
        *lost.as_html(),
        *made_by(versions_of()),
    ]
    write_page("--html", path, f"kvview size: {report.trace}", parts)


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


def _table(report: SizeReport, curve: PolicyCurve) -> str:
    has_bytes = report.model is not None
    names = ["host blocks", *["GiB"] * has_bytes, "all hits", "host hits", "offloaded"]
    names += ["per loaded", "prefill s saved", "load s", *["GB/s in", "GB/s out"] * has_bytes]
    if not has_bytes:
        names.remove("load s")
    rows = []
    for point in curve.points:
        cells = [f"{point.host_blocks:,}"]
        if point.host_gib is not None:
            cells.append(f"{point.host_gib:,.1f}")
        cells += [f"{1 - point.computed_rate:.1%}", f"{point.host_hit_rate:.1%}"]
        ratio = point.offloaded_per_loaded
        cells += [f"{point.offloaded_blocks:,}", "-" if ratio is None else f"{ratio:.1f}"]
        cells.append(f"{point.prefill_seconds_saved:,.0f}")
        if has_bytes:
            figures = (point.load_seconds, point.peak_load_gb_per_s, point.peak_offload_gb_per_s)
            cells += ["-" if value is None else f"{value:,.2f}" for value in figures]
        rows.append(cells)
    title = f"<h3>{escape(curve.policy)} ({escape(curve.method)})</h3>"
    return title + wide(make_table(names, rows, names))


def _timeline(report: SizeReport) -> str:
    moments = report.timeline
    end = max(report.trace_seconds, 1e-9)
    chart = Chart("hits over time", 0.0, end, 1.0, _TIMELINE_HEIGHT, _TIMELINE_BOTTOM)
    edges = [moment.start_s for moment in moments] + [end]
    hits = [(moment.gpu_hit_blocks, moment.host_hit_blocks, moment.blocks) for moment in moments]
    parts = [*chart.shares(_SHARE), *chart.stack(edges, hit_areas(hits))]
    unit, name = (3600, "h") if end > 2 * 3600 else (60, "min") if end > 120 else (1, "s")
    for number in range(7):
        at = end * number / 6
        parts.append(chart.tick(chart.x(at), f"{at / unit:.3g} {name}"))
    return chart.svg([*parts, *chart.legend(HIT_KINDS)])
