"""``kvview replay``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from kvview.cli.console import Console
from kvview.cli.echo import echo
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import JSONOption, OutputFile, Seconds, Whole, naming, write_json
from kvview.errors import ConfigError, KVViewError, line_of
from kvview.targets import load_connector
from kvview_reference.replay.time_model import TimeModel

if TYPE_CHECKING:
    from kvview import CacheGeometry
    from kvview_reference.engine import Engine
    from kvview_reference.replay.run import ReplayReport
    from kvview_reference.replay.traces import Trace, TraceRequest

DEFAULT_CONNECTOR = "kvview_reference.connector:OffloadConnector"
_SYNTHETIC_BLOCK_SIZE = 512
_CLOSED_LOOP = 16
_BEHIND = 1.25  # times the trace's seconds: the engine is too slow for it
_SHORTEST_S = 60.0
_FIELDS = {
    "prefill_rate": "prefill_tokens_per_s",
    "decode_step": "decode_step_s",
    "load_bandwidth": "load_gb_per_s",
    "store_bandwidth": "store_gb_per_s",
}  # of the time model, by option


def _time_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Fields of the time model, and the file that gives one of them."""
    default = TimeModel()
    for name, kind, what in reversed(
        [
            ("speed", float, "Play a trace X times as fast as it was."),
            ("prefill-rate", float, "Prompt tokens computed a second."),
            ("decode-step", float, "Seconds for a token of each running request."),
            ("load-bandwidth", float, "Host to GPU, GB/s (10**9 bytes)."),
            ("store-bandwidth", float, "GPU to host, GB/s."),
            ("token-bytes", Whole(), "KV bytes of a token, all ranks together."),
            ("step-tokens", Whole(), "Prompt tokens of one engine step."),
            ("max-running", Whole(), "Requests computed at once."),
        ]
    ):
        field = name.replace("-", "_")
        value = f"{getattr(default, _FIELDS.get(field, field)):,g}"
        command = click.option(f"--{name}", type=kind, help=f"{what}  [default: {value}]")(command)
    return click.option(
        "--model",
        "model_file",
        metavar="FILE",
        help="config.json of the model, for --token-bytes and --groups.",
    )(command)


@click.command()
@click.argument("trace", required=False)
@click.option(
    "--connector",
    default=DEFAULT_CONNECTOR,
    metavar="TARGET",
    help=f"file.py:Class or pkg.mod:Class.  [default: {DEFAULT_CONNECTOR}]",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option for the connector; the value is JSON, or else text. Repeatable.",
)
@click.option("--gpu-blocks", type=Whole(), help="GPU blocks.  [default: about a million tokens]")
@click.option(
    "--cpu-blocks",
    type=Whole(),
    help="Its option cpu_blocks.  [default: the connector's]",
)
@click.option("--policy", help="Its option policy, of the tier.  [default: the connector's]")
@click.option("--block-bytes", type=Whole(), default=1024, show_default=True, help="Bytes a block.")
@click.option(
    "--closed-loop",
    "--concurrency",
    type=Whole(),
    metavar="N",
    help=f"N requests at once, whenever they came.  [default: {_CLOSED_LOOP} without a TRACE]",
)
@_time_options
@click.option(
    "--groups",
    help="KV-cache groups: full, window:TOKENS, chunked:TOKENS, mamba, comma-separated; @K makes "
    "a group's blocks K times larger.  [default: those of --model, or full]",
)
@click.option(
    "--requests", type=Whole(), help="Stop after so many requests.  [default: all; 2000 generated]"
)
@click.option(
    "--seed", type=Whole(), default=0, show_default=True, help="Of the generated workload."
)
@click.option(
    "--publish", metavar="ENDPOINT", help="Publish KV events there, as the newest vLLM does."
)
@click.option("--publish-replay", metavar="ENDPOINT", help="Answer there who missed some.")
@click.option(
    "--publish-wait",
    type=Seconds(),
    default=1.0,
    show_default=True,
    help="Seconds for readers to connect before, and to ask after.",
)
@click.option("--strict", is_flag=True, help="Damaged input ends the run, with exit code 2.")
@click.option(
    "--json",
    "json_file",
    cls=JSONOption,
    schemas={"replay": "kvview_reference.replay.run:ReplayFile"},
)
@click.option(
    "--html",
    "html_file",
    type=OutputFile(may_be_stdout=False),
    metavar="FILE",
    help="Write a page with hits over time.",
)
def replay(
    trace: str | None,
    connector: str,
    options: tuple[str, ...],
    gpu_blocks: int | None,
    cpu_blocks: int | None,
    policy: str | None,
    block_bytes: int,
    closed_loop: int | None,
    groups: str | None,
    requests: int | None,
    seed: int,
    publish: str | None,
    publish_replay: str | None,
    publish_wait: float,
    strict: bool,
    json_file: str | None,
    html_file: str | None,
    model_file: str | None,
    **times: float | None,
) -> None:
    """Run a request trace through the reference engine, with a connector.

    TRACE is JSONL or JSONL.gz in the Mooncake, Bailian or cc-traces schema, or a
    folder of such files. Its requests come when it says, in simulated seconds;
    --closed-loop N plays N at once instead. Without one, a seeded workload of the
    same shape is generated. Every byte that the connector loads is verified.

    An option of your connector with another name is given by --option NAME=VALUE.
    """
    from kvview_reference.replay.arrivals import by_arrival
    from kvview_reference.replay.replay_page import HitsOverTime, write_replay_page
    from kvview_reference.replay.run import ReplayConfig, ReplayFile, make_geometry
    from kvview_reference.replay.run import replay as run
    from kvview_reference.replay.traces import Lost, open_trace
    from kvview_reference.replay.workload import generate_trace

    if requests is not None and requests < 1:
        raise ConfigError(f"--requests must be at least 1, got {requests}")
    if publish is None and publish_replay is not None:
        raise ConfigError("--publish-replay is for --publish")
    tells = True if publish is not None and connector == DEFAULT_CONNECTOR else None
    named = {"cpu_blocks": cpu_blocks, "policy": policy, "enable_events": tells}
    connector_options = _parse_options(options, **named)
    times = {name: value for name, value in times.items() if value is not None}
    if closed_loop is not None and (times or model_file):
        names = ["model"] * bool(model_file) + list(times)
        raise ConfigError(f"{_option(names[0])} is for time as it was, not for --closed-loop")
    connector_class = load_connector(connector)
    hits = HitsOverTime() if html_file else None

    lost = Lost()
    source: Trace | None = None
    rows: Iterable[TraceRequest]
    if trace is None:
        total = requests or 2000
        rows = generate_trace(num_requests=total, seed=seed, block_size=_SYNTHETIC_BLOCK_SIZE)
        block_size = _SYNTHETIC_BLOCK_SIZE
        title = f"generated workload (seed {seed})"
        if closed_loop is None and not times and not model_file:
            closed_loop = _CLOSED_LOOP
    else:

        def report(error: KVViewError) -> None:
            if lost.add(error):
                echo(f"kvview: skipped: {error}", err=True)

        source = open_trace(trace, on_error=None if strict else report)
        rows, block_size, title = source, source.block_size, Path(trace).resolve().name
        if not source.has_times and closed_loop is None:
            if times:
                raise ConfigError(f"{_option(next(iter(times)))}: {trace!r} has no timestamps")
            closed_loop = _CLOSED_LOOP
            echo(
                f"kvview: {title} has no timestamps: played closed-loop, {closed_loop} requests "
                "at once",
                err=True,
            )
    groups, time_model = _time_model(times, model_file, groups, block_size)
    config = ReplayConfig(
        gpu_blocks,
        block_bytes,
        closed_loop,
        groups,
        connector_options,
        time_model,
    )
    with _progress() as bar:
        task = bar.add_task(title, total=None if source else total)

        def on_progress(num_requests: int) -> None:
            if source is None:
                bar.update(task, completed=num_requests)
            else:
                bar.update(task, completed=source.bytes_read, total=source.total_bytes)

        geometry = make_geometry(groups, block_size)
        with (
            _published(publish, publish_replay, publish_wait, geometry) as on_step,
            naming(connector),
        ):
            rows = _take(rows, requests)
            if source is not None and source.schema == "cc-traces":
                rows = by_arrival(rows)
            result = run(
                rows,
                block_size,
                connector_class,
                config,
                on_progress,
                on_step if hits is None else hits.seen_before(on_step),
                takes_events=on_step is not None,
            )
    figures = _figures(result, lost.num_rows)
    _show(figures, title, explain(result))
    if html_file and hits:
        write_replay_page(html_file, title, connector_class, figures, result, hits, lost)
    told = ReplayFile(**vars(result), malformed_rows=lost.num_rows, lost=lost.rows, cut=lost.cut)
    write_json(json_file, asdict(told))
    if lost.rows:
        echo(f"kvview: {lost.summary(title)}", err=True)
    sys.exit(ExitCode.CLEAN if result.is_clean else ExitCode.WRONG)


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


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _time_model(
    times: Mapping[str, float | None], model_file: str | None, groups: str | None, block_size: int
) -> tuple[str, TimeModel]:
    """The KV-cache groups, and what takes how long."""
    from kvview_reference.replay.model_groups import block_bytes_of, groups_of
    from kvview_reference.replay.run import make_geometry
    from kvview_reference.sizing.model_file import read_model

    for name, value in times.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{_option(name)} must be above 0, got {value:g}")
    fields: dict[str, Any] = {_FIELDS.get(name, name): value for name, value in times.items()}
    if (model := read_model(model_file, {})) is not None:
        if "token_bytes" in fields:
            raise ConfigError("--token-bytes and --model cannot both be given")
        # Every connector stores each block of each group.
        fields["token_bytes"] = model.read_token_bytes
        if model.is_hybrid:
            groups = groups_of(model) if groups is None else groups
            geometry = make_geometry(groups, block_size)
            fields["group_bytes"] = block_bytes_of(model, geometry)
    return "full" if groups is None else groups, TimeModel(**fields)


def _take(rows: Iterable[TraceRequest], limit: int | None) -> Iterator[TraceRequest]:
    for number, row in enumerate(rows, 1):
        yield row
        if number == limit:
            return


def _parse_options(options: Iterable[str], **named: object) -> dict[str, Any]:
    from kvview.options import read_options

    return {key: value for key, value in named.items() if value is not None} | read_options(options)


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # it would write empty lines
    )


def _figures(report: ReplayReport, num_malformed: int) -> list[tuple[str, str]]:
    hits = report.gpu_hit_blocks + report.cpu_hit_blocks
    return [
        ("requests", f"{report.requests:,}"),
        ("requests too large", f"{report.requests_too_large:,}"),
        ("blocks", f"{report.blocks:,}"),
        ("hit on the GPU", f"{report.gpu_hit_blocks:,}  ({report.gpu_hit_rate:.1%})"),
        (
            f"hit on the {report.tier} tier",
            f"{report.cpu_hit_blocks:,}  ({report.cpu_hit_rate:.1%})",
        ),
        ("computed", f"{report.blocks - hits:,}  ({report.computed_rate:.1%})"),
        ("blocks offloaded", f"{report.offloaded_blocks:,}"),
        ("blocks loaded", f"{report.loaded_blocks:,}"),
        ("bytes verified", f"{report.bytes_verified:,}"),
        ("mismatches", f"{report.mismatches:,}"),
        ("holds left at the end", f"{report.holds_at_end:,}"),
        ("preemptions", f"{report.preemptions:,}"),
        ("failed transfers", f"{report.failed_transfers:,}"),
        ("malformed rows", f"{num_malformed:,}"),
        ("seconds", f"{report.seconds:.1f}"),
        ("blocks per second", f"{report.blocks_per_s:,.0f}"),
    ]


_BAD = ("mismatches", "holds left at the end", "failed transfers", "malformed rows")


def _show(figures: list[tuple[str, str]], title: str, assumed: list[str]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in figures:
        bad = name in _BAD and value != "0"
        table.add_row(name, value, style="red" if bad else None)
    console = Console()
    console.print(table)
    for line in assumed:
        console.print(line, highlight=False, soft_wrap=True)


def explain(report: ReplayReport) -> list[str]:
    """When the requests came and what that rests on; why nothing was hit; what failed."""
    lines = _timing(report)
    if report.offloaded_blocks and not report.cpu_hit_blocks and not report.failed_transfers:
        lines.append(
            f"Nothing was hit on the {report.tier} tier, though {report.offloaded_blocks:,} "
            "blocks were offloaded. It may be too small to keep a block until it comes again: give "
            "it more ('kvview size' says how much is worth it). Else the GPU hits all, nothing "
            "comes again, or the connector does not find what it stored ('kvview check')."
        )
    if report.failed_transfers:
        lines.append(
            f"{report.failed_transfers:,} transfers failed. A replay makes none fail: they are the "
            f"connector's own, first {line_of(report.first_failure)}. What failed to load "
            "was computed, so no answer is wrong; is it meant to fail?"
        )
    return lines


def _timing(report: ReplayReport) -> list[str]:
    if report.time is None:
        return [
            f"Closed loop: {report.closed_loop} requests at once, in order, whenever they came; "
            "nothing is said about time."
        ]
    model, seconds = report.time, report.simulated_seconds or 0.0
    speed = "" if model.speed == 1 else f" at {model.speed:g} times its speed"
    kv_bytes = f"{model.token_bytes:,} KV bytes a token"
    if model.group_bytes:
        kv_bytes = f"KV blocks of {' and '.join(f'{size:,}' for size in model.group_bytes)} bytes"
    lines = [
        f"Time as it was{speed}: {model.prefill_tokens_per_s:,.0f} prompt tokens/s, "
        f"{model.decode_step_s:g} s a generated token, {model.load_gb_per_s:g} GB/s from the host "
        f"and {model.store_gb_per_s:g} GB/s to it, {kv_bytes}, "
        f"{model.step_tokens:,} prompt tokens a step, up to {model.max_running} requests at once.",
        f"Requests came for {report.trace_seconds:,.0f} s and were done after {seconds:,.0f} s. "
        f"They waited {report.mean_wait_s:,.1f} s (at most {report.max_wait_s:,.1f} s). The link "
        f"was busy {report.load_link_busy:.1%} of the time with loads, "
        f"{report.store_link_busy:.1%} with stores.",
    ]
    if seconds > _BEHIND * max(report.trace_seconds or 0.0, _SHORTEST_S):
        lines.append(
            "One such engine is too slow for this trace, so order matters more than time: "
            "--prefill-rate and --speed change that."
        )
    return lines
