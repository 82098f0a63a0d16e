"""SVG charts for an HTML page, which can be read without colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP = 900, 72, 34, 14
_HATCHED = "held"  # areas must differ by more than colour
_HATCH = 7  # pixels from one line to the next

Point = tuple[float, float]


@dataclass(frozen=True)
class Area:
    """One of several stacked areas.

    Args:
        kind: The area's class in the page's style: ``engine``, ``held`` (hatched) or ``free``.
        label: The label, as text.
        heights: The height between each two edges.
    """

    kind: str
    label: str
    heights: Sequence[float]


class Chart:
    """A chart: maps values to pixels, and draws axes, areas and a legend.

    Args:
        name: Description of the chart, for screen readers.
        first: First value of the horizontal axis.
        last: Last value of the horizontal axis.
        top: Last value of the vertical axis, which starts at 0.
        height: Height in pixels.
        bottom: Pixels below the axis, for ticks and the legend.
    """

    def __init__(
        self, name: str, first: float, last: float, top: float, height: int, bottom: int
    ) -> None:
        self._name, self._first, self._last = name, first, max(last, first + 1e-9)
        self._top, self.height, self.bottom = top, height, height - bottom

    def x(self, value: float) -> float:
        """Return the pixels from the left."""
        share = (value - self._first) / (self._last - self._first)
        return round(LEFT + (WIDTH - LEFT - RIGHT) * share, 1)

    def y(self, value: float) -> float:
        """Return the pixels from the top."""
        return round(self.bottom - (self.bottom - TOP) * value / self._top, 1)

    def up(self, title: str, ticks: Iterable[tuple[float, str]]) -> list[str]:
        """Draw the lines and labels of the vertical axis."""
        parts = []
        for value, label in ticks:
            at = self.y(value)
            parts.append(f'<path class="grid" d="M{LEFT},{at} H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{at + 4.5}" text-anchor="end">{label}</text>')
        middle = (TOP + self.bottom) / 2
        parts.append(
            f'<text transform="translate(14,{middle}) rotate(-90)" text-anchor="middle">'
            f"{escape(title)}</text>"
        )
        return parts

    def tick(self, at: float, label: str, row: int = 0) -> str:
        """Draw a label of the horizontal axis."""
        y = self.bottom + 18 + 16 * row
        line = f'<path class="axis" d="M{at},{self.bottom} v4"/>' if not row else ""
        return f'{line}<text x="{at}" y="{y}" text-anchor="middle">{escape(label)}</text>'

    def stack(self, edges: Sequence[float], areas: Sequence[Area]) -> list[str]:
        """Draw stacked areas, each as a staircase."""
        parts = []
        base = [0.0] * (len(edges) - 1)
        for area in areas:
            upper = [low + height for low, height in zip(base, area.heights, strict=True)]
            corners = self.stairs(edges, upper) + self.stairs(edges, base)[::-1]
            title = f"<title>{escape(area.label)}</title>"
            parts.append(
                f'<polygon class="{area.kind}" points="{points_of(corners)}">{title}</polygon>'
            )
            if area.kind == _HATCHED:
                parts.append(f'<path class="hatch" d="{self._hatch(edges, base, upper)}"/>')
            base = upper
        return parts

    def _hatch(self, edges: Sequence[float], base: Sequence[float], upper: Sequence[float]) -> str:
        lines = []
        drawn = float("-inf")
        for left, right, low, high in zip(edges, edges[1:], base, upper, strict=False):
            if high <= low:
                continue
            start, end = self.x(left), self.x(right)
            at = max(min(start + _HATCH / 2, (start + end) / 2), drawn + _HATCH)
            while at < end:
                lines.append(f"M{round(at, 1)},{self.y(low)} V{self.y(high)}")
                drawn, at = at, at + _HATCH
        return " ".join(lines)

    def stairs(self, edges: Sequence[float], values: Sequence[float]) -> list[Point]:
        """Return the corners of a staircase, with one value between each two edges."""
        corners = []
        for left, right, value in zip(edges, edges[1:], values, strict=False):
            corners += [(self.x(left), self.y(value)), (self.x(right), self.y(value))]
        return corners

    def legend(self, entries: Iterable[tuple[str, str]]) -> list[str]:
        """Draw the legend: a box for each area and a line for any other kind, with labels."""
        parts, at, y = [], float(LEFT), self.height - 14
        for kind, label in entries:
            if kind in ("engine", "held", "free"):
                parts.append(f'<rect class="{kind}" x="{at}" y="{y - 11}" width="13" height="13"/>')
            else:
                parts.append(f'<path class="{kind}" d="M{at - 3},{y - 4} h18"/>')
            if kind == _HATCHED:
                parts.append(f'<path class="hatch" d="M{at + 4},{y - 11} v13 m5,-13 v13"/>')
            parts.append(f'<text x="{at + 20}" y="{y}">{escape(label)}</text>')
            at += 46 + round(7.2 * len(label))
        return parts

    def svg(self, parts: Iterable[str]) -> str:
        """Join the parts to an SVG element."""
        axes = f'<path class="axis" d="M{LEFT},{TOP} V{self.bottom} H{WIDTH - RIGHT}"/>'
        return (
            f'<div class="wide"><svg viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'aria-label="{escape(self._name)}">{"".join(parts)}{axes}</svg></div>'
        )


def points_of(points: Iterable[Point]) -> str:
    """Format points for SVG."""
    return " ".join(f"{x},{y}" for x, y in points)


def round_ticks(first: int, last: int, limit: int) -> list[int]:
    """Return both ends of an axis and round numbers between them, with a minimum distance."""
    sizes = (factor * 10**power for power in range(9) for factor in (1, 2, 5))
    every = next(size for size in sizes if (last - first) / size < limit)
    inner = [tick for tick in range(first, last) if tick % every == 0]
    gaps = 0.6 * every
    return sorted({first, last, *(t for t in inner if t - first >= gaps and last - t >= gaps)})
