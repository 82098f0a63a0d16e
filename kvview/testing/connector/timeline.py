"""A simulated run as a picture: blocks against steps, as SVG without a file beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvview.testing.connector.result import Snapshot

_Scale = Callable[[float], float]
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 350, 60, 20, 50, 50
_MAX_X_LABELS, _MAX_Y_LABELS = 15, 6
_AREAS = (
    ("engine", "requests (engine)"),
    ("held", "held by the connector alone"),
    ("free", "free"),
)
_HATCHED = "held"  # not by colour alone; the page's style has the colours, by class
_HATCH = 7  # wide, at least
_IN_FLIGHT_LABEL = "jobs in flight (line)"


def timeline_table(timeline: Sequence[Snapshot]) -> tuple[list[str], list[list[str]]]:
    """The same in numbers: names of the columns, and a row a step."""
    names = ("step", "engine", "held", "free", "in_flight")
    rows = [[str(getattr(snapshot, name)) for name in names] for snapshot in timeline]
    return ["step", *(label for _, label in _AREAS), "jobs in flight"], rows


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
    for name, label in _AREAS:
        upper = [low + getattr(s, name) for low, s in zip(base, timeline, strict=True)]
        points = _steps(upper, x, y) + _steps(base, x, y)[::-1]
        parts.append(
            f'<polygon class="{name}" points="{_points(points)}"><title>{label}</title></polygon>'
        )
        if name == _HATCHED:
            every = max(1, round(_HATCH / width))
            at = [i for i in range(0, len(timeline), every) if upper[i] > base[i]]
            lines = " ".join(f"M{x(i + 0.5)},{y(base[i])} V{y(upper[i])}" for i in at)
            parts.append(f'<path class="hatch" d="{lines}"/>')
        base = upper
    line = _steps([snapshot.in_flight for snapshot in timeline], x, y)
    for kind in ("halo", "jobs"):  # the halo parts it from the areas
        parts.append(
            f'<polyline class="{kind}" points="{_points(line)}">'
            f"<title>{_IN_FLIGHT_LABEL}</title></polyline>"
        )
    parts += [*_axes(timeline, top, x, y), *_legend()]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="blocks against steps">{"".join(parts)}</svg>'
    )


def _axes(timeline: Sequence[Snapshot], top: int, x: _Scale, y: _Scale) -> list[str]:
    left, right, bottom = x(0), x(len(timeline)), y(0)
    parts = [
        f'<path class="axis" d="M{left},{y(top)} V{bottom} H{right}"/>',
        f'<text transform="translate(16,{(y(top) + bottom) / 2}) rotate(-90)" '
        'text-anchor="middle">blocks (and jobs)</text>',
        f'<text x="{(left + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>',
        f'<path class="broken" d="M{right},{y(top) - 8} V{bottom}"/>',
        f'<text class="told" x="{right}" y="{y(top) - 12}" text-anchor="end">'
        "a law is broken here</text>",
    ]
    for blocks in _ticks(0, top, _MAX_Y_LABELS):
        at = y(blocks)
        parts.append(f'<path class="axis" d="M{left - 5},{at} H{left}"/>')
        parts.append(f'<text x="{left - 9}" y="{at + 4.5}" text-anchor="end">{blocks}</text>')
    steps = {snapshot.step: index for index, snapshot in enumerate(timeline)}
    for step in _ticks(timeline[0].step, timeline[-1].step, _MAX_X_LABELS):
        if step in steps:
            at = x(steps[step] + 0.5)
            parts.append(f'<path class="axis" d="M{at},{bottom} V{bottom + 4}"/>')
            parts.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    return parts


def _legend() -> list[str]:
    parts = []
    at = float(_LEFT)
    for name, label in _AREAS:
        parts.append(f'<rect class="{name}" x="{at}" y="6" width="13" height="13"/>')
        if name == _HATCHED:
            parts.append(f'<path class="hatch" d="M{at + 3},6 v13 M{at + 9},6 v13"/>')
        parts.append(f'<text x="{at + 19}" y="17">{label}</text>')
        at += 45 + 7.2 * len(label)
    parts.append(f'<path class="jobs" d="M{at},13 h20"/>')
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
