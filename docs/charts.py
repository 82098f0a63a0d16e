"""Charts of the site, drawn from the tables of ``docs/performance.md`` when the site is built."""

from __future__ import annotations

import re
from dataclasses import dataclass

import altair as alt
import vl_convert

_TEXT = "var(--md-typeset-color)"  # follows the theme, light or dark
_RULE = "var(--md-default-fg-color--lighter)"
_BAR = "var(--kvview-chart-color)"
_FIRST_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


@dataclass(frozen=True)
class Chart:
    """A bar chart of one column of a table.

    Args:
        column: Head of the column.
        title: Title of the axis.
        rows: Pattern of the labels of the rows that are drawn.
        reference: A value to compare with, drawn as a line.
    """

    column: str
    title: str
    rows: str = ""
    reference: float | None = None


CHARTS = {
    "Prefix search": Chart(
        "speedup", "times the speed of vLLM 0.33.0, 64,000 blocks", "64000$", reference=1
    ),
    "The block pool": Chart("speedup", "times the speed of vLLM 0.33.0, ns per block", reference=1),
    "View and guard compared with direct calls": Chart(
        "ratio", "time compared with the row above that is called directly", reference=1
    ),
    "The manager of the CPU tier": Chart("speedup", "times the speed of vLLM 0.33.0", reference=1),
    "Transfers compared with one plain copy": Chart(
        "median", "share of the speed of one plain copy", "copy", reference=1
    ),
    "Replay": Chart("blocks/s", "blocks per second"),
    "What a connector costs a step": Chart("connector", "microseconds per step of the scheduler"),
}
"""Charts by the heading whose first table they show."""


def with_charts(markdown: str) -> str:
    """Draw the charts of a page, and fold the tables below them."""
    parts = re.split(r"^(## .*)$", markdown, flags=re.MULTILINE)
    for at, head in enumerate(parts):
        if chart := CHARTS.get(head.removeprefix("## ")):
            parts[at + 1] = _FIRST_TABLE.sub(
                lambda table, chart=chart: _section(chart, table[0]), parts[at + 1], count=1
            )
    return "".join(parts)


def _section(chart: Chart, table: str) -> str:
    picture = f'<div class="scrolling" tabindex="0">{draw(chart, table)}</div>'
    summary = '<details markdown="1"><summary>The figures</summary>'
    return f"{picture}\n\n{summary}\n\n{table}\n</details>\n"


def values(chart: Chart, table: str) -> list[tuple[str, float]]:
    """Return labels and numbers of a Markdown table; a row without a number is skipped."""
    head, _, *rows = [[c.strip() for c in row.split("|")[1:-1]] for row in table.splitlines()]
    column = head.index(chart.column)
    num_labels = head.index("us") if "us" in head else 1
    labels = [""] * num_labels
    found = []
    for row in rows:
        labels = [new or old for new, old in zip(row, labels, strict=False)]
        label = " ".join(labels).strip()
        number = re.match(r"[\d,]*\.?\d+", row[column])
        if number and re.search(chart.rows, label):
            found.append((label, float(number[0].replace(",", ""))))
    return found


def draw(chart: Chart, table: str) -> str:
    """Return a chart as SVG, whose colours follow the theme of the page."""
    rows = [{"label": label, "value": value} for label, value in values(chart, table)]
    data = alt.Data(values=rows)
    y = alt.Y("label:N", sort=None, title=None, axis=alt.Axis(labelLimit=300))
    x = alt.X("value:Q", title=chart.title, axis=alt.Axis(tickCount=6))
    bars = alt.Chart(data).mark_bar(color=_BAR).encode(x=x, y=y)
    texts = alt.Chart(data).mark_text(align="left", dx=4, color=_TEXT).encode(x, y, text="value:Q")
    layers = [bars, texts]
    if chart.reference is not None:
        line = alt.Data(values=[{"value": chart.reference}])
        layers.append(alt.Chart(line).mark_rule(color=_TEXT, strokeDash=[4, 3]).encode(x="value:Q"))
    picture = (
        alt.layer(*layers)
        .properties(width=420, height=alt.Step(20), background="transparent")
        .configure(font="inherit")
        .configure_axis(
            labelColor=_TEXT,
            titleColor=_TEXT,
            domainColor=_RULE,
            tickColor=_RULE,
            gridColor=_RULE,
            labelFontSize=12,
            titleFontSize=12,
        )
        .configure_text(fontSize=12)
        .configure_view(stroke=None)
    )
    svg: str = vl_convert.vegalite_to_svg(picture.to_dict())
    return svg.replace("<svg ", f'<svg role="img" aria-label="{chart.title}" ', 1)
