"""A replay as one self-contained HTML page: what came of it, and its hits over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from kvview.version import versions_of
from kvview.web_chart import HIT_KINDS, Chart, hit_areas, round_ticks
from kvview.web_page import facts, made_by, make_table, share_bar, wide, write_page

if TYPE_CHECKING:
    from kvview_reference.engine import Engine
    from kvview_reference.replay.run import ReplayReport
    from kvview_reference.replay.traces import Lost

_MOST_MOMENTS = 160
_HEIGHT, _BOTTOM = 300, 76
_SHOWN = 100

_Moment = tuple[int, int, int, int]  # requests, GPU hits, host hits, hash blocks of prompts


class HitsOverTime:
    """Samples an engine as it steps; what it keeps does not grow with the trace."""

    def __init__(self) -> None:
        self._every = 1
        self._moments: list[_Moment] = []

    def seen_before(self, then: Callable[[Engine], None] | None) -> Callable[[Engine], None]:
        """What a replay shows its engine to: this, and then another."""

        def see(engine: Engine) -> None:
            self._see(engine)
            if then is not None:
                then(engine)

        return see

    def _see(self, engine: Engine) -> None:
        stats = engine.stats
        last = self._moments[-1][0] if self._moments else 0
        if stats.requests < last + self._every:
            return
        now = stats.requests, stats.gpu_hit_blocks, stats.cpu_hit_blocks, stats.prompt_blocks
        self._moments.append(now)
        if len(self._moments) > _MOST_MOMENTS:
            self._moments = self._moments[1::2]
            self._every *= 2

    def rows(self) -> list[_Moment]:
        """Requests so far, and what came to prompts since the row before."""
        before: _Moment = (0, 0, 0, 0)
        rows = []
        for moment in self._moments:
            requests, gpu, host, blocks = moment
            rows.append((requests, gpu - before[1], host - before[2], blocks - before[3]))
            before = moment
        return rows


def write_replay_page(
    path: str,
    title: str,
    connector: object,
    shown: Sequence[tuple[str, str]],
    report: ReplayReport,
    hits: HitsOverTime,
    lost: Lost,
) -> None:
    """Write the page.

    Args:
        path: Where.
        title: Of the trace.
        connector: The class of the connector.
        shown: The figures, as they are printed.
        report: The replay.
        hits: Sampled while it ran.
        lost: What of the trace could not be read.

    Raises:
        ConfigError: The file cannot be written.
    """
    kind, told = ("good", "✓ every byte was right, and every block came back")
    if not report.is_clean:
        kind = "bad"
        told = f"✗ {report.mismatches:,} mismatches, {report.holds_at_end:,} holds left at the end"
    name = getattr(connector, "__qualname__", str(connector))
    rates = [
        ("of the prompt blocks, hit on the GPU", report.gpu_hit_rate),
        (f"of the prompt blocks, hit on the {report.tier} tier", report.cpu_hit_rate),
    ]
    parts = [
        f'<p><b class="{kind}">{escape(told)}</b>. {escape(name)}, {report.requests:,} requests, '
        f"{report.blocks:,} blocks, {report.seconds:.1f} s.</p>",
        "<h2>Hit rates</h2>",
        wide(make_table(("of what", "share"), [(n, share_bar(share)) for n, share in rates])),
        "<h2>Hits over time</h2>",
        _chart(hits.rows()),
        "<h2>What happened</h2>",
        facts(shown),
    ]
    if lost.rows:
        parts.append(f'<p class="bad">✗ {lost.num_rows:,} parts of the trace were lost:</p>')
        parts.append("<pre>" + escape("\n".join([*lost.rows[:_SHOWN], *lost.cut])) + "</pre>")
    write_page("--html", path, f"kvview replay: {title}", parts + made_by(versions_of(connector)))


def _chart(rows: Sequence[_Moment]) -> str:
    if not rows:
        return "<p>No request was run.</p>"
    chart = Chart("hits over requests", 0, rows[-1][0], 1.0, _HEIGHT, _BOTTOM)
    edges = [0, *(row[0] for row in rows)]
    parts = chart.shares("share of the prompt blocks")
    parts += chart.stack(edges, hit_areas(row[1:] for row in rows))
    for tick in round_ticks(0, rows[-1][0], 10):
        parts.append(chart.tick(chart.x(tick), f"{tick:,}"))
    parts.append(chart.tick(chart.x(rows[-1][0] / 2), "requests", 1))
    return chart.svg([*parts, *chart.legend(HIT_KINDS)])
