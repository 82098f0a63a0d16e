"""``kvview size``."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import JSONOption, require_writable, write_json, write_text
from kvview.errors import ConfigError, KVViewError

if TYPE_CHECKING:
    from kvview_reference.sizing.sweep import SizeReport

_GENERATED_BLOCK_SIZE = 512
_SHOWN = 20  # of what was lost; the JSON has all


def _model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--tp", type=int, help="Ranks of tensor parallelism.  [default: 1]"),
        click.option("--dtype", help="Of the KV cache: bfloat16, fp8, ...  [default: the model's]"),
        click.option("--head-size", type=int, help="Elements of a head."),
        click.option("--kv-heads", type=int, help="Key-value heads of a layer."),
        click.option("--layers", type=int, help="Layers of the model."),
        click.option(
            "--model",
            "model_file",
            metavar="FILE",
            help="config.json of Hugging Face, or {layers, kv_heads, head_size}: for sizes in GiB.",
        ),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("trace", required=False)
@click.option(
    "--sizes",
    metavar="SIZE,...",
    help="Of the host: 5000 (blocks), 64GiB, 50% (of the different blocks).  [default: eight]",
)
@click.option(
    "--gpu-blocks",
    metavar="SIZE",
    help="Of the GPU's prefix cache, 0 for none.  [default: about a million tokens]",
)
@click.option(
    "--policies",
    default="lru,arc",
    show_default=True,
    metavar="NAME,...",
    help="Of the host; names, and file.py:Class.",
)
@_model_options
@click.option(
    "--prefill-rate",
    type=float,
    default=10_000.0,
    show_default=True,
    help="Prompt tokens a second that the engine computes.",
)
@click.option(
    "--load-bandwidth",
    type=float,
    default=20.0,
    show_default=True,
    help="From the host to the GPUs, GB/s (10**9 bytes).",
)
@click.option(
    "--partial-blocks",
    is_flag=True,
    help="Let a cache hold the partial last block of a prompt too; engines do not.",
)
@click.option("--requests", type=int, help="Stop after so many requests.  [default: all]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the generated workload.")
@click.option(
    "--max-references",
    type=click.IntRange(1),
    help="Sample by block what has more uses of blocks.  [default: 67 million]",
)
@click.option("--strict", is_flag=True, help="Damaged input ends the run, with exit code 2.")
@click.option(
    "--json",
    "json_file",
    cls=JSONOption,
    schemas={"size": "kvview_reference.sizing.sweep:SizeReport"},
)
@click.option("--csv", "csv_file", metavar="FILE", help="Write the points ('-' for stdout).")
@click.option("--html", "html_file", metavar="FILE", help="Write a page with the curves.")
def size(
    trace: str | None,
    sizes: str | None,
    gpu_blocks: str | None,
    policies: str,
    model_file: str | None,
    prefill_rate: float,
    load_bandwidth: float,
    partial_blocks: bool,
    requests: int | None,
    seed: int,
    max_references: int | None,
    strict: bool,
    json_file: str | None,
    csv_file: str | None,
    html_file: str | None,
    **model_fields: Any,
) -> None:
    """Say what a host tier of every size would be worth for a trace.

    TRACE is JSONL or JSONL.gz in the Mooncake, Bailian or cc-traces schema, a
    folder of such files, or a recording of KV events (kvview events record).
    Without one, a seeded workload is generated.
    """
    from kvview_reference.offloading.policies import policy_factory
    from kvview_reference.replay.traces import Lost
    from kvview_reference.sizing.model import parse_size, read_model
    from kvview_reference.sizing.references import MAX_REFERENCES, read_references
    from kvview_reference.sizing.sweep import size as run

    if requests is not None and requests < 1:
        raise ConfigError(f"--requests must be at least 1, got {requests}")
    files = {"--json": json_file, "--csv": csv_file, "--html": html_file}
    for option, path in files.items():
        require_writable(option, path)
    if [json_file, csv_file].count("-") > 1:
        raise ConfigError("--json and --csv cannot both go to stdout")
    if html_file == "-":
        raise ConfigError("--html needs a file")
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--policies {policies!r}: name one at least, lru for example")
    for name in names:
        policy_factory(name)(1)  # raises what is wrong with it now
    model = read_model(model_file, model_fields)

    lost = Lost()

    def lose(error: KVViewError) -> None:
        if lost.add(error) and len(lost.rows) <= _SHOWN:
            click.echo(f"kvview: skipped: {error}", err=True)

    rows, block_size, title = _open(trace, None if strict else lose, requests, seed)
    block_bytes = None if model is None else block_size * model.token_bytes
    gpu = 2**20 // block_size
    if gpu_blocks is not None:
        gpu = parse_size(gpu_blocks, "--gpu-blocks", block_bytes, 0)
    status = Console(stderr=True).status(f"reading {title}")
    with status:
        references = read_references(
            rows,
            block_size,
            max_request_blocks=gpu or None,
            has_partial_blocks=partial_blocks,
            max_references=max_references or MAX_REFERENCES,
        )
        num_blocks = round(references.num_blocks / references.rate)
        host_sizes = None
        if sizes is not None:
            parts = sizes.split(",")
            host_sizes = [parse_size(part, "--sizes", block_bytes, num_blocks) for part in parts]
        report = run(
            references,
            trace=title,
            block_size=block_size,
            gpu_blocks=gpu,
            policies=names,
            host_sizes=host_sizes,
            model=model,
            prefill_tokens_per_s=prefill_rate,
            load_bandwidth_gb_per_s=load_bandwidth,
            lost=lost.rows,
            cut=lost.cut,
            on_progress=lambda what: status.update(f"{title}: {what}"),
        )
    if "-" not in (json_file, csv_file):
        _show(report)
    write_json(json_file, report.model_dump(mode="json"))
    write_text("--csv", csv_file, _csv(report))
    if html_file is not None:
        from kvview_reference.sizing.size_page import write_size_page

        write_size_page(html_file, report)
    if lost.rows:
        click.echo(f"kvview: {lost.summary(title)}", err=True)
    sys.exit(ExitCode.CLEAN)


def _open(
    trace: str | None,
    on_error: Callable[[KVViewError], object] | None,
    requests: int | None,
    seed: int,
) -> tuple[Iterable[Any], int, str]:
    """Requests, their block size, and the name of the trace."""
    from itertools import islice

    from kvview_reference.replay.traces import open_trace
    from kvview_reference.replay.workload import generate_trace

    if trace is None:
        size, number = _GENERATED_BLOCK_SIZE, requests or 12_000
        rows = generate_trace(num_requests=number, seed=seed, block_size=size)
        return rows, size, f"generated workload (seed {seed})"
    if _is_recording(trace):
        from kvview_reference.sizing.recordings import RecordedTrace

        recorded = RecordedTrace(trace, on_error)
        return islice(recorded, requests), recorded.block_size, Path(trace).name
    source = open_trace(trace, on_error=on_error)
    return islice(source, requests), source.block_size, Path(trace).resolve().name


def _is_recording(path: str) -> bool:
    import gzip
    import zlib

    try:
        if not Path(path).is_file():
            return False
        with open(path, "rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if is_packed else open(path, "rb") as rows:
            first = json.loads(rows.readline(2**20))
    except (OSError, EOFError, zlib.error, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and {"sequence", "payload"} <= first.keys()


def _csv(report: SizeReport) -> str:
    text = io.StringIO()
    rows = [
        {"policy": curve.policy, **point.model_dump()}
        for curve in report.curves
        for point in curve.points
    ]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _show(report: SizeReport) -> None:
    from kvview_reference.sizing.explain import explain

    console = Console()
    has_bytes = report.model is not None
    optimum = dict(report.optimum)
    title = f"{report.trace}: {report.requests:,} requests, {report.blocks:,} blocks"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("blocks", justify="right")
    if has_bytes:
        table.add_column("GiB", justify="right")
    for curve in report.curves:
        table.add_column(curve.policy, justify="right")
    for name in ("at most", "out/in", "saved s"):
        table.add_column(name, justify="right")
    if has_bytes:
        table.add_column("GB/s in", justify="right")
        table.add_column("GB/s out", justify="right")
    alone = f"{report.no_connector_hit_rate:.1%}"
    others = [""] * (3 + 2 * has_bytes)
    table.add_row("none", *[""] * has_bytes, *[alone] * len(report.curves), *others)
    for points in zip(*(curve.points for curve in report.curves), strict=True):
        lru = points[0]
        cells = [f"{lru.host_blocks:,}"]
        if lru.host_gib is not None:
            cells.append(f"{lru.host_gib:,.{0 if lru.host_gib >= 100 else 1}f}")
        cells += [f"{1 - point.computed_rate:.1%}" for point in points]
        cells.append(f"{optimum[lru.host_blocks]:.1%}")
        ratio = lru.offloaded_per_loaded
        cells += ["-" if ratio is None else f"{ratio:.1f}", f"{lru.prefill_seconds_saved:,.0f}"]
        if has_bytes:
            peaks = (lru.peak_load_gb_per_s, lru.peak_offload_gb_per_s)
            cells += ["-" if peak is None else f"{peak:.2f}" for peak in peaks]
        table.add_row(*cells)
    console.print(table)
    for line in explain(report):
        console.print(line, highlight=False, soft_wrap=True)
