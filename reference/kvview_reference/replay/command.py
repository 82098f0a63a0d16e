"""``kvview replay``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click
from rich.table import Table

from kvview.cli.console import Console, progress
from kvview.cli.echo import echo
from kvview.cli.exit_codes import ExitCode
from kvview.cli.interrupt import UntilInterrupted
from kvview.cli.output import Seconds, Whole, json_option, naming, target_options, write_json
from kvview.errors import ConfigError
from kvview.targets import load_connector
from kvview_reference.traces.command import open_source, trace_options

if TYPE_CHECKING:
    from kvview import CacheGeometry
    from kvview_reference.engine import Engine
    from kvview_reference.traces.sessions import Turns

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
@click.option(
    "--groups",
    default="full",
    show_default=True,
    help="KV-cache groups, comma-separated: full, window:TOKENS, chunked:TOKENS, mamba; @K makes "
    "the blocks of a group K times larger.",
)
@click.option(
    "--publish",
    metavar="ENDPOINT",
    help="Endpoint at which KV events are published, in the format of the newest vLLM.",
)
@click.option(
    "--publish-replay",
    metavar="ENDPOINT",
    help="Endpoint at which subscribers of --publish can request missed messages.",
)
@click.option(
    "--publish-wait",
    type=Seconds(),
    default=1.0,
    show_default=True,
    help="Seconds to wait for subscribers, before and after the run.",
)
@json_option({"replay": "kvview_reference.replay.run:ReplayReport"})
def replay(
    trace: str | None,
    requests: int | None,
    seed: int,
    block_size: int | None,
    turns: Turns | None,
    skip_bad_rows: bool,
    connector: str,
    options: tuple[str, ...],
    gpu_blocks: int | None,
    block_bytes: int,
    closed_loop: int,
    groups: str,
    publish: str | None,
    publish_replay: str | None,
    publish_wait: float,
    json_file: str | None,
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
    from kvview_reference.replay.run import ReplayConfig, make_geometry
    from kvview_reference.replay.run import replay as run

    if publish is None and publish_replay is not None:
        raise ConfigError("--publish-replay serves missed messages of --publish; add --publish")
    publishes = publish is not None and connector == DEFAULT_CONNECTOR
    connector_options = {"enable_events": True} if publishes else {}
    connector_class = load_connector(connector)
    source = open_source(
        trace, requests or (_NUM_GENERATED if trace is None else None), seed, block_size, turns,
        skip_bad_rows,
    )  # fmt: skip
    config = ReplayConfig(
        gpu_blocks,
        block_bytes,
        closed_loop,
        groups,
        connector_options | read_options(options),
    )
    until = UntilInterrupted(source.requests)
    with (
        progress(source.title) as show,
        _published(
            publish, publish_replay, publish_wait, make_geometry(groups, source.block_size)
        ) as on_step,
        naming(connector),
    ):
        result = run(
            until,
            source.block_size,
            connector_class,
            config,
            lambda number: show(f"{number:,} of {len(source.requests):,} requests"),
            on_step,
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
    sys.exit(ExitCode.INTERRUPTED if until.is_interrupted else ExitCode.CLEAN)


@contextmanager
def _published(
    endpoint: str | None, replay_endpoint: str | None, wait: float, geometry: CacheGeometry
) -> Iterator[Callable[[Engine], None] | None]:
    if endpoint is None:
        yield None
        return
    from kvview.events.channel import Publisher
    from kvview.events.formats import WIRE_FORMATS
    from kvview_reference.replay.publish import EventFeed

    newest = [known for known in WIRE_FORMATS if known.producer == "vllm"][-1]
    with Publisher(endpoint, replay_endpoint, topic="kv-events") as publisher:
        feed = EventFeed(publisher, geometry, newest)
        echo(f"publishing at {publisher.endpoint}", err=True)
        time.sleep(wait)
        yield feed.publish
        time.sleep(wait)
    echo(f"{feed.num_events:,} events published", err=True)
