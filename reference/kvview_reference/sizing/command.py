"""``kvview size``."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE
from rich.table import Table

from kvview.cli.console import Console, progress
from kvview.cli.echo import echo
from kvview.cli.exit_codes import ExitCode
from kvview.cli.interrupt import UntilInterrupted
from kvview.cli.output import Rate, Whole, json_option, write_json
from kvview.errors import ConfigError
from kvview_reference.replay.command import trace_options

if TYPE_CHECKING:
    from kvview_reference.sizing.sweep import SizeReport

_NUM_GENERATED = 12_000


@click.command()
@trace_options(_NUM_GENERATED)
@click.option(
    "--sizes",
    metavar="SIZE,...",
    help=(
        "Sizes of the host tier, comma-separated: 5000 (blocks), 64GiB, 50% (of the trace's "
        "distinct blocks). [default: eight sizes]"
    ),
)
@click.option(
    "--gpu-blocks",
    metavar="SIZE",
    help="Size of the GPU's prefix cache; 0 for no cache.  [default: about a million tokens]",
)
@click.option(
    "--policies",
    default="lru,arc",
    show_default=True,
    metavar="NAME,...",
    help="Eviction policies of the host, comma-separated: names or file.py:Class.",
)
@click.option(
    "--model",
    "model_file",
    metavar="FILE",
    help="config.json of the model, or a list of its layers (docs/sizing.md), for sizes in GiB.",
)
@click.option(
    "--dtype", help="Type of the KV cache, such as bfloat16 or fp8. [default: the type of --model]"
)
@click.option("--tp", type=Whole(1), help="Ranks of tensor parallelism.  [default: 1]")
@click.option(
    "--prefill-rate",
    type=Rate(),
    default=10_000.0,
    show_default=True,
    help="Prompt tokens that the engine computes per second.",
)
@click.option(
    "--load-bandwidth",
    type=Rate(),
    default=20.0,
    show_default=True,
    help="Bandwidth from the host to the GPUs, in 10**9 bytes/s.",
)
@click.option(
    "--partial-blocks",
    is_flag=True,
    help="Also cache the partial last block of a prompt, although engines do not cache it.",
)
@json_option({"size": "kvview_reference.sizing.sweep:SizeReport"})
def size(
    trace: str | None,
    requests: int | None,
    seed: int,
    strict: bool,
    sizes: str | None,
    gpu_blocks: str | None,
    policies: str,
    model_file: str | None,
    dtype: str | None,
    tp: int | None,
    prefill_rate: float,
    load_bandwidth: float,
    partial_blocks: bool,
    json_file: str | None,
) -> None:
    """Compute the hits and costs of a host tier at every size.

    TRACE is a trace in the Mooncake, Bailian or cc-traces schema (JSONL or
    JSONL.gz), a folder of such files, or a recording of KV events (kvview events
    record). Without TRACE, a seeded workload is generated.
    """
    from kvview_reference.offloading.policies import policy_factory
    from kvview_reference.replay.trace_input import Source, open_source
    from kvview_reference.sizing.model import parse_size
    from kvview_reference.sizing.model_file import read_model
    from kvview_reference.sizing.references import References, read_references
    from kvview_reference.sizing.stored import StoredBlocks
    from kvview_reference.sizing.sweep import size as run

    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--policies {policies!r}: expected at least one policy, such as lru")
    for name in names:
        policy_factory(name)(1)  # raises an error for a wrong policy before the trace is read
    if model_file is None and (dtype, tp) != (None, None):
        raise ConfigError("--dtype and --tp describe a model and need --model")
    model = None if model_file is None else read_model(model_file, dtype, tp)
    open_trace = partial(open_source, trace, requests, seed, _NUM_GENERATED)
    source = open_trace(strict=strict, report=partial(echo, err=True))
    blocks = None if model is None else StoredBlocks(model, source.block_size)

    is_interrupted = False

    def read(source: Source, max_request_blocks: int | None) -> References:
        nonlocal is_interrupted
        until = UntilInterrupted(source.requests)
        references = read_references(
            until,
            source.block_size,
            max_request_blocks=max_request_blocks,
            has_partial_blocks=partial_blocks,
            tails=blocks.tails if blocks else (),
        )
        is_interrupted = is_interrupted or until.is_interrupted
        return references

    def mean_bytes() -> int:
        """Compute the bytes of a block; a hybrid model needs a pass over the trace."""
        assert blocks is not None
        if not blocks.tails:
            return blocks.block_bytes(())
        again = open_trace(strict=False, report=lambda line: None)
        return blocks.block_bytes(read(again, None).tail_shares)

    gpu = 2**20 // source.block_size
    with progress(source.title) as on_progress:
        on_progress("reading")
        if gpu_blocks is not None:
            gpu = parse_size(gpu_blocks, "--gpu-blocks", mean_bytes if blocks else None, 0)
        references = read(source, gpu or None)
        host_sizes = None
        if sizes is not None:
            known = (lambda: blocks.block_bytes(references.tail_shares)) if blocks else None
            host_sizes = [
                parse_size(part, "--sizes", known, references.num_blocks)
                for part in sizes.split(",")
            ]
        report = run(
            references,
            trace=source.title,
            block_size=source.block_size,
            gpu_blocks=gpu,
            policies=names,
            host_sizes=host_sizes,
            blocks=blocks,
            prefill_tokens_per_s=prefill_rate,
            load_bandwidth_gb_per_s=load_bandwidth,
            lost=source.lost,
            on_progress=on_progress,
        )
    if json_file != "-":
        _show(report)
    write_json(json_file, report.model_dump(mode="json"))
    if source.lost.rows:
        echo(f"kvview: {source.lost.summary(source.title)}", err=True)
    sys.exit(ExitCode.INTERRUPTED if is_interrupted else ExitCode.CLEAN)


def _show(report: SizeReport) -> None:
    from kvview_reference.sizing.explain import explain

    optimum = dict(report.optimum)
    title = f"{report.trace}: {report.requests:,} requests, {report.blocks:,} blocks"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    policies = [curve.policy for curve in report.curves]
    of_bytes = [[], ["GiB"], ["GB/s in", "GB/s out"]] if report.model else [[], [], []]
    for name in ("blocks", *of_bytes[1], *policies, "at most", "out/in", "saved s", *of_bytes[2]):
        table.add_column(name, justify="right")
    gpu_gib = [""] if report.model else []
    table.add_row("none", *gpu_gib, *[f"{report.no_connector_hit_rate:.1%}"] * len(policies))
    for points in zip(*(curve.points for curve in report.curves), strict=True):
        lru = points[0]
        cells = [f"{lru.host_blocks:,}"]
        if lru.host_gib is not None:
            cells.append(f"{lru.host_gib:,.{0 if lru.host_gib >= 100 else 1}f}")
        cells += [f"{1 - point.computed_rate:.1%}" for point in points]
        cells.append(f"{optimum[lru.host_blocks]:.1%}")
        ratio = lru.offloaded_per_loaded
        cells += ["-" if ratio is None else f"{ratio:.1f}", f"{lru.prefill_seconds_saved:,.0f}"]
        if report.model:
            peaks = (lru.peak_load_gb_per_s, lru.peak_offload_gb_per_s)
            cells += ["-" if peak is None else f"{peak:.2f}" for peak in peaks]
        table.add_row(*cells)
    console = Console()
    console.print(table)
    for line in explain(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
