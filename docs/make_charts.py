"""Draw the charts of the pages from tables of the pages and of the benchmarks.

    python docs/make_charts.py

The site draws them again when it is built. Their colors follow the color scheme of the reader.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from kvview.testing.results.timeline import read_log

DOCS = Path(__file__).parent
CHARTS = DOCS / "images/charts"

_COLORS = {
    "#050505": ("page", "#ffffff", "#1b1f24"),
    "#010101": ("text", "#1f2328", "#e6e8ea"),
    "#020202": ("rule", "#d0d7de", "#444c56"),
    "#030303": ("one", "#0a5bc4", "#79b8ff"),
    "#040404": ("two", "#9a4a00", "#ffb77c"),
}
"""A color that matplotlib writes, its name in the file, and its values in light and dark."""
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvview",
    "font.family": "sans-serif",
    "font.size": 10,
    "savefig.facecolor": "#050505",
    "axes.facecolor": "#050505",
    "text.color": "#010101",
    "axes.edgecolor": "#010101",
    "axes.labelcolor": "#010101",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#020202",
    "xtick.color": "#010101",
    "ytick.color": "#010101",
    "legend.frameon": False,
}

_SPEED = [f"{policy} {size}" for policy in ("lru", "arc") for size in ("1,000", "10,000", "50,000")]
"""The rows of the measurements that are drawn."""


def rows(page: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables of a page, those in code blocks included.

    Args:
        page: Its path, relative to the folder of the docs.
    """
    for line in (DOCS / page).read_text("utf-8").splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("|").split("|")]
        elif re.match(r" +[\d,]+ +[\d,.]+ +[\d.]+%", line):
            yield line.split()


def hit_curve() -> Figure:
    """Draw the hits of LRU and the optimum by the size of the cache, with the knee."""
    points = [row for row in rows("sizing.md") if len(row) > 4 and row[2].endswith("%")]
    sizes = [int(row[0].replace(",", "")) for row in points]
    lru, optimum = ([float(row[n].strip("%")) for row in points] for n in (2, 4))
    knee = re.search(r"Knee: with ([\d,]+) blocks", (DOCS / "sizing.md").read_text("utf-8"))
    assert knee is not None
    at = int(knee[1].replace(",", ""))
    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(sizes, optimum, "--", color="#040404", label="optimum, which knows the future")
    axes.plot(sizes, lru, color="#030303", label="LRU")
    axes.axvline(at, color="#010101", linewidth=0.8, linestyle=":")
    axes.annotate(f"knee: {at:,} blocks ", (at, 1), ha="right")
    axes.set(xscale="log", ylim=(0, 50), xlabel="blocks in the cache", ylabel="% of blocks hit")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.legend(loc="upper left")
    axes.grid(alpha=0.6)
    return figure


def speed() -> Figure:
    """Draw the speed of the manager of host memory as a multiple of vLLM's."""
    found: dict[str, float] = {}
    for row in rows("../benchmarks/tables.md"):
        ratio = next((cell for cell in row[1:] if re.fullmatch(r"[\d.]+x", cell)), None)
        if ratio and row[0] in _SPEED:
            found[row[0]] = float(ratio[:-1])
    labels = [f"{name.upper()} blocks" for name in _SPEED[::-1]]
    values = [found[name] for name in _SPEED[::-1]]
    figure = Figure(figsize=(5.4, 2.8), layout="constrained")
    axes = figure.subplots()
    axes.bar_label(axes.barh(labels, values, color="#030303"), fmt="%.1fx", padding=3)
    axes.axvline(1, color="#010101", linewidth=0.8)
    axes.set(xlabel="speed compared with vLLM 0.33.0 (1x)", xlim=(0, max(values) * 1.15))
    return figure


def timeline() -> Figure:
    """Draw the failing run of the README as ``kvview check --timeline`` does."""
    log = (DOCS / "images/charts/timeline.txt").read_text("utf-8").splitlines()
    bars, steps = read_log(log)
    colors = {"request": "#020202", "job": "#030303", "job failed": "#040404", "block": "#040404"}
    figure = Figure(figsize=(5.4, 1.8), layout="constrained")
    axes = figure.subplots()
    for row, bar in enumerate(reversed(bars)):
        last = steps[-1] if bar.last is None else bar.last
        axes.barh(row, last - bar.first + 1, left=bar.first - 0.5, color=colors[bar.kind])
        note = "failed" if "failed" in bar.kind else "" if bar.last else "does not end"
        axes.text(last + 0.6, row, note, va="center")
    names = [bar.name.replace(": held at ", "\nheld at ") for bar in reversed(bars)]
    axes.set_yticks(range(len(bars)), names)
    axes.set_xticks(list(steps))
    axes.set(xlim=(steps[0] - 0.5, steps[-1] + 2), xlabel="step")
    return figure


def svg(figure: Figure) -> str:
    """Return a figure as SVG whose colors follow the reader's color scheme."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    found = text.getvalue()
    light = dark = ""
    for drawn, (name, in_light, in_dark) in _COLORS.items():
        found = found.replace(drawn, f"var(--{name})")
        light += f"--{name}: {in_light}; "
        dark += f"--{name}: {in_dark}; "
    style = f":root {{ {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}"
    return re.sub(r"(<svg[^>]*>)", rf"\1\n<style>\n{style}\n</style>", found, count=1)


def write() -> None:
    """Write the charts that have changed."""
    CHARTS.mkdir(exist_ok=True)
    with rc_context(_STYLE):
        for name, figure in {
            "hit-curve": hit_curve(),
            "speed": speed(),
            "timeline": timeline(),
        }.items():
            path, text = CHARTS / f"{name}.svg", svg(figure)
            if not path.exists() or path.read_text("utf-8") != text:
                path.write_text(text, "utf-8")


if __name__ == "__main__":
    write()
