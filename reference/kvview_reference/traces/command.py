"""The argument TRACE of ``kvview replay`` and ``kvview size``, with its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvview.cli.console import progress
from kvview.cli.echo import echo
from kvview.cli.output import Whole
from kvview.errors import ConfigError

if TYPE_CHECKING:
    from kvview_reference.traces.sessions import Turns
    from kvview_reference.traces.trace import Trace

_GENERATED_BLOCK_SIZE = 512


def trace_options(num_generated: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add TRACE and its options, which are arguments of :func:`open_source`."""
    options = (
        click.argument("trace", required=False),
        click.option(
            "--requests",
            type=Whole(1),
            help=f"Stop after this many requests.  [default: all; {num_generated} generated]",
        ),
        click.option(
            "--seed",
            type=Whole(),
            default=0,
            show_default=True,
            help="Seed of the generated workload.",
        ),
        click.option(
            "--block-size",
            type=Whole(1),
            help="Tokens of a hash id of TRACE.  [default: found from the rows]",
        ),
        click.option(
            "--turns",
            type=click.Choice(["cumulative", "incremental"]),
            help="Whether a later turn of a session repeats the turns before it, or contains only "
            "new tokens.  [default: found from the rows]",
        ),
        click.option(
            "--skip-bad-rows",
            is_flag=True,
            help="Skip and count rows that cannot be read, instead of stopping with exit code 2.",
        ),
    )

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def open_source(
    num_generated: int,
    *,
    trace: str | None,
    requests: int | None,
    seed: int,
    block_size: int | None,
    turns: Turns | None,
    skip_bad_rows: bool,
) -> Trace:
    """Read the trace of a command, or generate a workload.

    Args:
        num_generated: Number of requests of a generated workload, unless ``requests`` states it.
        trace: The trace; None generates a workload.
        requests: Maximum number of requests; None for all.
        seed: Seed of the generated workload.
        block_size: Tokens of a hash id; None finds it.
        turns: Whether a later turn repeats the turns before it; None finds it.
        skip_bad_rows: Whether bad rows are skipped.

    Raises:
        ConfigError: An option does not fit, or the trace cannot be read.
        TraceError: A row does not fit.
    """
    from kvview_reference.replay.workload import generate_trace
    from kvview_reference.traces.reader import read_trace
    from kvview_reference.traces.trace import SkippedRows, Trace

    if trace is None:
        if block_size is not None or turns is not None or skip_bad_rows:
            raise ConfigError("--block-size, --turns and --skip-bad-rows describe a TRACE; add it")
        rows = generate_trace(
            num_requests=requests or num_generated, seed=seed, block_size=_GENERATED_BLOCK_SIZE
        )
        title = f"generated workload (seed {seed})"
        return Trace(title, list(rows), _GENERATED_BLOCK_SIZE, SkippedRows())
    skipped = SkippedRows(skip_bad_rows, lambda text: echo(f"kvview: skipped: {text}", err=True))
    with progress(trace) as show:
        return read_trace(
            trace,
            block_size=block_size,
            turns=turns,
            max_requests=requests,
            skipped=skipped,
            on_progress=show,
        )
