"""``kvview replay``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.table import Table

from kvview.cli.console import Console, progress
from kvview.cli.echo import echo
from kvview.cli.exit_codes import ExitCode
from kvview.cli.interrupt import UntilInterrupted
from kvview.cli.output import Rate, Seconds, Whole, json_option, naming, target_options, write_json
from kvview.errors import ConfigError
from kvview.targets import load_connector
from kvview_reference.replay.time_model import TimeModel

if TYPE_CHECKING:
    from kvview import CacheGeometry
    from kvview_reference.engine import Engine

DEFAULT_CONNECTOR = "kvview_reference.store_connector:StoreConnector"
NUM_GENERATED = 2000
_CLOSED_LOOP = 16
_TIMES: dict[str, tuple[str, click.ParamType[Any], str]] = {
    "--speed": ("speed", Rate(), "Speed of the arrivals; with 2, requests arrive twice as fast."),
    "--prefill-rate": ("prefill_tokens_per_s", Rate(), "Prompt tokens computed per second."),
    "--decode-step": ("decode_step_s", Rate(), "Seconds per generated token of a request."),
    "--load-bandwidth": ("load_gb_per_s", Rate(), "Bandwidth from host to GPU, in 10**9 bytes/s."),
    "--store-bandwidth": (
        "store_gb_per_s",
        Rate(),
        "Bandwidth from GPU to host, in 10**9 bytes/s.",
    ),
    "--token-bytes": ("token_bytes", Whole(1), "KV bytes of a token on all ranks together."),
    "--step-tokens": ("step_tokens", Whole(1), "Maximum number of prompt tokens per step."),
    "--max-running": (
        "max_running",
        Whole(1),
        "Maximum number of requests that are computed at once.",
    ),
}
"""For each option, its field of the time model, its type and its help text."""


def _time_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option, (field, kind, text) in reversed(_TIMES.items()):
        default = getattr(TimeModel(), field)
        command = click.option(
            option, field, type=kind, default=default, show_default=True, help=text
        )(command)
    return command


def trace_options(num_generated: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add TRACE and its options, which are the arguments of ``open_source``."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option("--strict", is_flag=True, help="Stop at damaged input, with exit code 2."),
            click.option(
                "--seed",
                type=Whole(),
                default=0,
                show_default=True,
                help="Seed of the generated workload.",
            ),
            click.option(
                "--requests",
                type=Whole(1),
                help=f"Stop after this many requests.  [default: all; {num_generated} generated]",
            ),
            click.argument("trace", required=False),
        ):
            command = option(command)
        return command

    return add


@click.command()
@trace_options(NUM_GENERATED)
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
    metavar="N",
    help="Run N requests at once and ignore arrival times.  "
    f"[default: {_CLOSED_LOOP} without a TRACE]",
)
@click.option(
    "--model",
    "model_file",
    metavar="FILE",
    help="config.json of the model, which sets --token-bytes and --groups.",
)
@_time_options
@click.option(
    "--groups",
    help="KV-cache groups, comma-separated: full, window:TOKENS, chunked:TOKENS, mamba; @K makes "
    "the blocks of a group K times larger.  [default: the groups of --model, or full]",
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
@json_option({"replay": "kvview_reference.replay.run:ReplayFile"})
@click.pass_context
def replay(
    ctx: click.Context,
    /,
    trace: str | None,
    requests: int | None,
    seed: int,
    strict: bool,
    connector: str,
    options: tuple[str, ...],
    gpu_blocks: int | None,
    block_bytes: int,
    closed_loop: int | None,
    groups: str | None,
    publish: str | None,
    publish_replay: str | None,
    publish_wait: float,
    json_file: str | None,
    model_file: str | None,
    **times: float,
) -> None:
    """Run a request trace through the reference engine, with a connector.

    TRACE is a trace in the Mooncake, Bailian or cc-traces schema (JSONL or
    JSONL.gz), a folder of such files, or a recording of KV events. Requests
    arrive at their recorded times, in simulated seconds; --closed-loop N runs N
    requests at once instead. Without TRACE, a seeded workload of the same shape is
    generated. Every byte that the connector loads is verified.
    """
    from kvview.options import read_options
    from kvview_reference.replay.arrivals import by_arrival
    from kvview_reference.replay.figures import explain, figures_of
    from kvview_reference.replay.run import ReplayConfig, ReplayFile, make_geometry
    from kvview_reference.replay.run import replay as run
    from kvview_reference.replay.trace_input import open_source

    if publish is None and publish_replay is not None:
        raise ConfigError("--publish-replay serves missed messages of --publish; add --publish")
    timed = [
        option
        for option, (field, *_) in _TIMES.items()
        if ctx.get_parameter_source(field) is not ParameterSource.DEFAULT
    ]
    if model_file is not None:
        if "--token-bytes" in timed:
            raise ConfigError("--token-bytes and --model cannot be combined; drop one of them")
        timed.insert(0, "--model")
    if closed_loop is not None and timed:
        raise ConfigError(
            f"{timed[0]} needs arrival times, which --closed-loop ignores; drop one of them"
        )
    publishes = publish is not None and connector == DEFAULT_CONNECTOR
    connector_options = {"enable_events": True} if publishes else {}
    connector_class = load_connector(connector)
    report = partial(echo, err=True)
    source = open_source(trace, requests, seed, NUM_GENERATED, strict=strict, report=report)
    if trace is None and not timed:
        closed_loop = closed_loop or _CLOSED_LOOP
    if source.trace is not None and not source.trace.has_times and closed_loop is None:
        if timed and timed != ["--model"]:
            raise ConfigError(f"{timed[-1]} needs arrival times, but {trace!r} has no timestamps")
        closed_loop = _CLOSED_LOOP
        echo(
            f"kvview: {source.title} has no timestamps, so {closed_loop} requests run at once "
            "(--closed-loop)",
            err=True,
        )
    groups, time_model = _time_model(times, model_file, groups, source.block_size)
    config = ReplayConfig(
        gpu_blocks,
        block_bytes,
        closed_loop,
        groups,
        connector_options | read_options(options),
        time_model,
    )
    rows = source.requests
    if source.trace is not None and source.trace.schema == "cc-traces":
        rows = by_arrival(rows)
    until = UntilInterrupted(rows)
    with (
        progress(source.title) as show,
        _published(
            publish, publish_replay, publish_wait, make_geometry(groups, source.block_size)
        ) as on_step,
        naming(connector),
    ):

        def on_progress(num_requests: int) -> None:
            done = f"{num_requests:,} requests"
            if source.trace is not None:
                done += f", {source.trace.bytes_read / source.trace.total_bytes:.0%} of the trace"
            show(done)

        result = run(
            until,
            source.block_size,
            connector_class,
            config,
            on_progress,
            on_step,
        )
    lost = source.lost
    table = Table(title=source.title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value, is_bad in figures_of(result, lost.num_rows):
        table.add_row(name, value, style="red" if is_bad else None)
    console = Console()
    console.print(table)
    for line in explain(result):
        console.print(line, highlight=False, soft_wrap=True)
    report_file = ReplayFile(
        **vars(result), malformed_rows=lost.num_rows, lost=lost.rows, cut=lost.cut
    )
    write_json(json_file, asdict(report_file))
    if lost.rows:
        echo(f"kvview: {lost.summary(source.title)}", err=True)
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


def _time_model(
    times: dict[str, Any], model_file: str | None, groups: str | None, block_size: int
) -> tuple[str, TimeModel]:
    """Determine the KV-cache groups and the time model."""
    from kvview_reference.replay.model_groups import block_bytes_of, groups_of
    from kvview_reference.replay.run import make_geometry
    from kvview_reference.sizing.model_file import read_model

    if model_file is not None:
        model = read_model(model_file)
        # Every connector stores each block of each group.
        times["token_bytes"] = model.read_token_bytes
        if model.is_hybrid:
            groups = groups_of(model) if groups is None else groups
            times["group_bytes"] = block_bytes_of(model, make_geometry(groups, block_size))
    return "full" if groups is None else groups, TimeModel(**times)
