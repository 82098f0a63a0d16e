"""``kvview replay``."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Any

import click
from rich.table import Table

from kvview.cli.console import Console, progress
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import Whole, json_option, naming, target_options, write_json
from kvview.targets import load_connector
from kvview_reference.traces.command import open_source, trace_options

DEFAULT_CONNECTOR = "kvview_reference.store_connector:StoreConnector"
_NUM_GENERATED = 2000
_CLOSED_LOOP = 16


@click.command()
@trace_options(_NUM_GENERATED)
@click.option(
    "--connector",
    default=DEFAULT_CONNECTOR,
    metavar="TARGET",
    help=f"Connector to run, as file.py:Class or pkg.mod:Class.  [default: {DEFAULT_CONNECTOR}]",
)
@target_options(
    "Option of the connector, such as cpu_blocks=5000; VALUE is JSON or text. Repeatable."
)
@click.option(
    "--gpu-blocks", type=Whole(), help=("Number of GPU blocks. [default: about a million tokens]")
)
@click.option(
    "--block-bytes", type=Whole(), default=1024, show_default=True, help="Bytes to move per block."
)
@click.option(
    "--closed-loop",
    type=Whole(1),
    default=_CLOSED_LOOP,
    show_default=True,
    metavar="N",
    help="Number of requests that run at once.",
)
@json_option({"replay": "kvview_reference.replay.run:ReplayReport"})
def replay(
    connector: str,
    options: tuple[str, ...],
    gpu_blocks: int | None,
    block_bytes: int,
    closed_loop: int,
    json_file: str | None,
    **source_options: Any,
) -> None:
    """Run a request trace through the reference engine, with a connector.

    TRACE is a trace in the Mooncake, Bailian or Weka format, with or without
    sessions (JSONL or JSONL.gz), a folder of such files, or a recording of KV
    events. --closed-loop N runs N requests at once, in the order of the trace.
    Without TRACE, a seeded workload is generated. Every byte that the connector
    loads is verified.
    """
    from kvview.options import read_options
    from kvview_reference.replay.figures import explain, figures_of
    from kvview_reference.replay.run import ReplayConfig, replay as run

    connector_class = load_connector(connector)
    source = open_source(_NUM_GENERATED, **source_options)
    config = ReplayConfig(gpu_blocks, block_bytes, closed_loop, read_options(options))
    with progress(source.title) as show, naming(connector):
        result = run(
            source.requests,
            source.block_size,
            connector_class,
            config,
            lambda number: show(f"{number:,} of {len(source.requests):,} requests"),
        )
    result = replace(
        result, malformed_rows=source.skipped.num_requests, lost=source.skipped.reasons
    )
    table = Table(title=source.headline, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value, is_bad in figures_of(result):
        table.add_row(name, value, style="red" if is_bad else None)
    console = Console()
    console.print(table)
    for line in explain(result):
        console.print(line, highlight=False, soft_wrap=True)
    write_json(json_file, asdict(result))
    if not result.is_clean:
        sys.exit(ExitCode.WRONG)
