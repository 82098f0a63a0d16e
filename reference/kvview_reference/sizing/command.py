"""``kvview size``."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE
from rich.table import Table

from kvview.cli.console import Console, progress
from kvview.cli.echo import echo
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import JSONOption, OutputFile, Whole, write_json, write_text
from kvview.errors import ConfigError, KVViewError

if TYPE_CHECKING:
    from kvview_reference.sizing.sweep import SizeReport


def _model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--tp", type=Whole(), help="Ranks of tensor parallelism.  [default: 1]"),
        click.option("--dtype", help="Of the KV cache: bfloat16, fp8, ...  [default: the model's]"),
        click.option("--head-size", type=Whole(), help="Elements of a head."),
        click.option("--kv-heads", type=Whole(), help="Key-value heads of a layer."),
        click.option("--layers", type=Whole(), help="Layers of the model."),
        click.option(
            "--model",
            "model_file",
            metavar="FILE",
            help="config.json of Hugging Face, or layers in JSON (docs/sizing.md): for GiB.",
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
@click.option("--requests", type=Whole(), help="Stop after so many requests.  [default: all]")
@click.option(
    "--seed", type=Whole(), default=0, show_default=True, help="Of the generated workload."
)
@click.option(
    "--max-references",
    type=Whole(1),
    help="Sample by block what has more uses of blocks.  [default: 67 million]",
)
@click.option("--strict", is_flag=True, help="Damaged input ends the run, with exit code 2.")
@click.option(
    "--json",
    "json_file",
    cls=JSONOption,
    schemas={"size": "kvview_reference.sizing.sweep:SizeReport"},
)
@click.option(
    "--csv",
    "csv_file",
    type=OutputFile(),
    metavar="FILE",
    help="Write the points ('-' for stdout).",
)
@click.option(
    "--html",
    "html_file",
    type=OutputFile(may_be_stdout=False),
    metavar="FILE",
    help="Write a page with the curves.",
)
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
    from kvview_reference.sizing.model import parse_size
    from kvview_reference.sizing.model_file import read_model
    from kvview_reference.sizing.references import MAX_REFERENCES, References, read_references
    from kvview_reference.sizing.stored import StoredBlocks
    from kvview_reference.sizing.sweep import size as run
    from kvview_reference.sizing.trace_input import open_source

    if requests is not None and requests < 1:
        raise ConfigError(f"--requests must be at least 1, got {requests}")
    if [json_file, csv_file].count("-") > 1:
        raise ConfigError("--json and --csv cannot both go to stdout")
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--policies {policies!r}: name one at least, lru for example")
    for name in names:
        policy_factory(name)(1)  # raises what is wrong with it now
    model = read_model(model_file, model_fields)

    lost = Lost()

    def lose(error: KVViewError) -> None:
        if lost.add(error):
            echo(f"kvview: skipped: {error}", err=True)

    rows, block_size, title = open_source(trace, None if strict else lose, requests, seed)
    blocks = None if model is None else StoredBlocks(model, block_size)

    def read(rows: Iterable[Any], max_request_blocks: int | None) -> References:
        return read_references(
            rows,
            block_size,
            max_request_blocks=max_request_blocks,
            has_partial_blocks=partial_blocks,
            max_references=max_references or MAX_REFERENCES,
            tails=blocks.tails if blocks else (),
        )

    def mean_bytes() -> int:
        """Bytes of a block; those of a hybrid model depend on the trace, which is read for it."""
        assert blocks is not None
        if not blocks.tails:
            return blocks.block_bytes(())
        again = open_source(trace, lambda error: None, requests, seed)[0]
        return blocks.block_bytes(read(again, None).tail_shares)

    gpu = 2**20 // block_size
    with progress(title) as on_progress:
        on_progress("reading")
        if gpu_blocks is not None:
            gpu = parse_size(gpu_blocks, "--gpu-blocks", mean_bytes if blocks else None, 0)
        references = read(rows, gpu or None)
        num_blocks = round(references.num_blocks / references.rate)
        host_sizes = None
        if sizes is not None:
            parts = sizes.split(",")
            known = (lambda: blocks.block_bytes(references.tail_shares)) if blocks else None
            host_sizes = [parse_size(part, "--sizes", known, num_blocks) for part in parts]
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
            malformed_rows=lost.num_rows,
            lost=lost.rows,
            cut=lost.cut,
            on_progress=on_progress,
        )
    if "-" not in (json_file, csv_file):
        _show(report)
    write_json(json_file, report.model_dump(mode="json"))
    write_text("--csv", csv_file, _csv(report))
    if html_file is not None:
        from kvview_reference.sizing.size_page import write_size_page

        write_size_page(html_file, report)
    if lost.rows:
        echo(f"kvview: {lost.summary(title)}", err=True)
    sys.exit(ExitCode.CLEAN)


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
        console.print(line, highlight=False, markup=False, soft_wrap=True)
