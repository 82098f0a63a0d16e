"""``kvview size``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE
from rich.table import Table

from kvview.cli.console import Console, progress
from kvview.cli.output import OutputFile, Whole, json_option, write_json
from kvview_reference.traces.command import open_source, trace_options

if TYPE_CHECKING:
    from kvview_reference.sizing.hit_curve import SizeReport

_NUM_GENERATED = 12_000
_BAR = 30


@click.command()
@trace_options(_NUM_GENERATED)
@click.option(
    "--sizes",
    metavar="SIZE,...",
    help="Sizes of the cache, comma-separated: 5000 (blocks) or, with --block-bytes, 64GiB.  "
    "[default: fourteen sizes]",
)
@click.option(
    "--block-bytes",
    type=Whole(1),
    help="KV bytes of a block on all ranks together, for sizes in GiB.",
)
@click.option(
    "--skip",
    type=Whole(0),
    default=0,
    show_default=True,
    help="Number of first requests that fill the cache and are not counted.",
)
@click.option(
    "--chart",
    type=OutputFile(may_be_stdout=False),
    metavar="FILE.svg",
    help="Draw the hit curve; needs the extra 'chart'.",
)
@json_option({"size": "kvview_reference.sizing.hit_curve:SizeReport"})
def size(
    sizes: str | None,
    block_bytes: int | None,
    skip: int,
    chart: str | None,
    json_file: str | None,
    **source_options: Any,
) -> None:
    """Compute the share of a trace's prompt blocks that a cache of each size hits.

    TRACE is a trace in the Mooncake, Bailian or Weka format, with or without
    sessions (JSONL or JSONL.gz), a folder of such files, or a recording of KV
    events (kvview events --record). Without TRACE, a seeded workload is generated.
    """
    from kvview_reference.sizing.hit_curve import parse_sizes, size as run

    if chart is not None:
        from kvview_reference.sizing.chart import write_chart  # fails before the trace is read
    chosen = None if sizes is None else parse_sizes(sizes, block_bytes)
    source = open_source(_NUM_GENERATED, **source_options)
    with progress(source.title) as show:
        report = run(source, sizes=chosen, block_bytes=block_bytes, skip=skip, on_progress=show)
    if json_file != "-":
        _show(report, source.headline)
    if chart is not None:
        write_chart(report, chart)
    write_json(json_file, asdict(report))


def _show(report: SizeReport, headline: str) -> None:
    console = Console()
    counted = f"{report.requests:,} requests, {report.blocks:,} blocks of {report.block_size:,} "
    after = (
        f", after {report.warmup_requests:,} to fill the cache" if report.warmup_requests else ""
    )
    console.print(headline, f"{counted}tokens{after}", sep="\n", highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    has_bytes = report.block_bytes is not None
    for name in ("blocks", *(["GiB"] if has_bytes else []), "LRU", "tokens", "optimum"):
        table.add_column(name, justify="right")
    table.add_column("")
    top = max(point.optimum_hit_rate for point in report.points) or 1.0
    for point in report.points:
        lru, best = (
            round(_BAR * rate / top) for rate in (point.lru_hit_rate, point.optimum_hit_rate)
        )
        table.add_row(
            f"{point.blocks:,}",
            *([_gib(point.gib)] if point.gib is not None else []),
            *(f"{point.lru_hit_rate:.1%}", f"{point.lru_token_rate:.1%}"),
            *(f"{point.optimum_hit_rate:.1%}", "█" * lru + "░" * (best - lru)),
        )
    console.print(table)
    for line in _explain(report):
        console.print(line, highlight=False, soft_wrap=True)


def _explain(report: SizeReport) -> list[str]:
    """Write the largest gain and the knee, and then the meaning of the columns."""
    most = f"{report.unlimited_hit_rate:.1%} of the prompt blocks"
    lines = ["No cache gains anything: no full block is used again."]
    if report.knee_blocks:
        lines = [
            f"A cache of every block hits {most} ({report.unlimited_token_rate:.1%} of the prompt "
            f"tokens); LRU reaches this with {_blocks(report, report.full_blocks)}.",
            f"Knee: with {_blocks(report, report.knee_blocks)}, LRU has {report.knee_share:.0%} of "
            "these hits. Beyond the knee a block gains less than on average.",
        ]
    return [
        *lines,
        "LRU: share of the prompt blocks that are hit, exact; tokens: the same as a share of the "
        "prompt tokens; optimum: the share that no policy exceeds, even if it knows the future.",
    ]


def _blocks(report: SizeReport, blocks: int) -> str:
    gib = report.gib(blocks)
    return f"{blocks:,} blocks" + ("" if gib is None else f" ({_gib(gib)} GiB)")


def _gib(gib: float) -> str:
    return f"{gib:,.{0 if gib >= 100 else 2}f}"
