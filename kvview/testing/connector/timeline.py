"""A simulated run as a picture: blocks against steps, as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence

from kvview.testing.connector.result import Snapshot
from kvview.web_chart import TOP, Area, Chart, points_of, round_ticks

_HEIGHT, _BOTTOM = 350, 76
_MAX_X_LABELS, _MAX_Y_LABELS = 15, 6
_AREAS = (
    ("engine", "requests (engine)"),
    ("held", "held by the connector alone"),
    ("free", "free"),
)
_IN_FLIGHT_LABEL = "jobs in flight (line)"


def timeline_table(timeline: Sequence[Snapshot]) -> tuple[list[str], list[list[str]]]:
    """The picture as a table: names of the columns, and one row for each step."""
    names = ("step", "engine", "held", "free", "in_flight")
    rows = [[str(getattr(snapshot, name)) for name in names] for snapshot in timeline]
    return ["step", *(label for _, label in _AREAS), "jobs in flight"], rows


def timeline_svg(timeline: Sequence[Snapshot], told_at_the_end: str = "") -> str:
    """Blocks against steps, stacked, and the jobs in flight as a line.

    Args:
        timeline: One snapshot for each step.
        told_at_the_end: The fault at the last step; empty if there is none.
    """
    if not timeline:
        return "<p>It failed before the first step.</p>"
    first = timeline[0]
    num_blocks = first.free + first.engine + first.held
    top = max(num_blocks, *(snapshot.in_flight for snapshot in timeline), 1)
    chart = Chart("blocks against steps", 0, len(timeline), top, _HEIGHT, _BOTTOM)
    edges = range(len(timeline) + 1)
    areas = [
        Area(kind, label, [getattr(snapshot, kind) for snapshot in timeline])
        for kind, label in _AREAS
    ]
    parts = chart.up("blocks (and jobs)", [(n, str(n)) for n in round_ticks(0, top, _MAX_Y_LABELS)])
    parts += chart.stack(edges, areas)
    line = points_of(chart.stairs(edges, [snapshot.in_flight for snapshot in timeline]))
    for kind in ("halo", "jobs"):  # the halo parts it from the areas
        title = f"<title>{_IN_FLIGHT_LABEL}</title>"
        parts.append(f'<polyline class="{kind}" points="{line}">{title}</polyline>')
    steps = {snapshot.step: index for index, snapshot in enumerate(timeline)}
    for step in round_ticks(timeline[0].step, timeline[-1].step, _MAX_X_LABELS):
        if step in steps:
            parts.append(chart.tick(chart.x(steps[step] + 0.5), str(step)))
    parts.append(chart.tick(chart.x(len(timeline) / 2), "step", 1))
    parts += chart.legend([*_AREAS, ("jobs", _IN_FLIGHT_LABEL)])
    if told_at_the_end:
        right = chart.x(len(timeline))
        parts.append(f'<path class="broken" d="M{right},{TOP - 6} V{chart.bottom}"/>')
        parts.append(
            f'<text class="told" x="{right - 6}" y="{TOP - 3}" text-anchor="end">'
            f"{told_at_the_end}</text>"
        )
    return chart.svg(parts)
