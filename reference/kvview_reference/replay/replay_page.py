"""A replay as one self-contained HTML page: its figures, and its hits over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from kvview.version import versions_of
from kvview.web_chart import HIT_KINDS, Chart, hit_areas, round_ticks
from kvview.web_page import facts, made_by, make_table, share_bar, wide, write_page
from kvview_reference.replay.figures import Figure

if TYPE_CHECKING:
    from kvview_reference.engine import Engine
    from kvview_reference.replay.run import ReplayReport
    from kvview_reference.replay.traces import Lost

_MOST_MOMENTS = 160
_HEIGHT, _BOTTOM = 300, 76

_Moment = tuple[int, int, int, int]  # requests, GPU hits, host hits, hash blocks of prompts


class HitsOverTime:
    """Samples the counters of an engine between steps, in memory that does not grow."""

    def __init__(self) -> None:
        self._every = 1
        self._moments: list[_Moment] = []

    def sample_before(self, on_step: Callable[[Engine], None] | None) -> Callable[[Engine], None]:
        """Make a callback for ``replay`` that samples, then calls another callback."""

        def sample(engine: Engine) -> None:
            self._sample(engine)
            if on_step is not None:
                on_step(engine)

        return sample

    def _sample(self, engine: Engine) -> None:
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
        """List the requests so far and the hits and blocks since the row before."""
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
    connector: type,
    figures: Sequence[Figure],
    report: ReplayReport,
    hits: HitsOverTime,
    lost: Lost,
) -> None:
    """Write the page.

    Args:
        path: The file to write.
        title: Name of the trace.
        connector: Class of the connector.
        figures: The lines of the table.
        report: The replay.
        hits: Samples of the run.
        lost: Parts of the trace that could not be read.

    Raises:
        ConfigError: The file cannot be written.
    """
    kind, verdict = "good", "✓ every byte was right, and every block was released"
    if not report.is_clean:
        kind = "bad"
        verdict = (
            f"✗ {report.mismatches:,} mismatches, {report.holds_at_end:,} holds left at the end"
        )
    rates = [
        ("prompt blocks hit on the GPU", report.gpu_hit_rate),
        (f"prompt blocks hit on the {report.tier} tier", report.cpu_hit_rate),
    ]
    parts = [
        f'<p><b class="{kind}">{escape(verdict)}</b>. {escape(connector.__qualname__)}, '
        f"{report.requests:,} requests, {report.blocks:,} blocks, {report.seconds:.1f} s.</p>",
        "<h2>Hit rates</h2>",
        wide(make_table(("blocks", "share"), [(n, share_bar(share)) for n, share in rates])),
        "<h2>Hits over time</h2>",
        _chart(hits.rows()),
        "<h2>Figures</h2>",
        facts([(figure.name, figure.value) for figure in figures]),
        *lost.as_html(),
    ]
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
