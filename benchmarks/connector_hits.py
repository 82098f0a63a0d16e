"""What a connector does to the hits: none beside it, at every size of the host tier.

    python benchmarks/connector_hits.py [TRACE ...] [--requests N] [--json FILE]

Replays each trace (the generated workload without one) without a connector and with one
at each host size, and says two things of each run: by how many points of the prompt blocks
GPU and CPU hits together differ from those without, and how often a computed block was
offloaded. A connector must never make serving worse: the exit code is 1 when the first is
below -0.2 or the second above 1. Requests that do not fit in the pool are left out.

`--requests 2000` is the fast mode; all of a trace takes minutes a size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvview import Connector, StepInfo, StepPlan
from kvview.targets import load_connector
from kvview_reference.replay.run import ReplayConfig, ReplayReport, replay
from kvview_reference.replay.traces import TraceRequest, open_trace
from kvview_reference.replay.workload import generate_trace

DEFAULT = "kvview_reference.connector:OffloadConnector"
GENERATED_BLOCK_SIZE = 512  # tokens
MOST_LOST = 0.2  # points
MOST_VISITS = 1.5  # entries of the free queue for each block stored


class Counting:
    """Counts the full blocks that the engine computes, and keeps the scheduler half."""

    def __init__(self) -> None:
        self.num_computed = 0
        self.scheduler: Any = None

    def around(self, connector: type[Connector]) -> type[Connector]:
        """The connector, watched."""
        watch = self

        class Watched(connector):  # type: ignore[misc,valid-type]
            def make_scheduler(self) -> Any:
                half = super().make_scheduler()
                watch.scheduler, plan_step = half, half.plan_step
                groups = self.config.geometry.groups

                def counted(step: StepInfo) -> StepPlan:
                    for running in step.scheduled:
                        first = running.num_computed_tokens
                        last = first + running.num_scheduled_tokens
                        for group in groups:
                            full = last // group.block_size - first // group.block_size
                            watch.num_computed += full
                    plan: StepPlan = plan_step(step)
                    return plan

                half.plan_step = counted
                return half

        return Watched


def rows_of(trace: Path | None, requests: int | None) -> tuple[list[TraceRequest], int]:
    """The requests of a trace, or of the generated workload, and their block size."""
    rows: Iterator[TraceRequest]
    if trace is None:
        block_size = GENERATED_BLOCK_SIZE
        rows = generate_trace(num_requests=requests or 2000, seed=0, block_size=block_size)
    else:
        source = open_trace(str(trace), on_error=lambda error: None)
        rows, block_size = iter(source), source.block_size
    return list(islice(rows, requests)), block_size


def run(
    rows: list[TraceRequest], block_size: int, target: type[Connector], config: ReplayConfig
) -> tuple[ReplayReport, Counting]:
    """One replay, and what was counted in it."""
    watch = Counting()
    return replay(rows, block_size, watch.around(target), config), watch


@click.command()
@click.argument("traces", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--connector", "targets", multiple=True, default=(DEFAULT,), show_default=True, help="Each one."
)
@click.option("--gpu-blocks", default="2000,default", show_default=True, help="Sizes.")
@click.option("--cpu-blocks", default="0,100,500,2000,10000,50000", show_default=True)
@click.option("--requests", type=int, help="Of each trace, the first ones.")
@click.option("--groups", default="full", show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="All runs.")
def main(
    traces: tuple[Path, ...],
    targets: tuple[str, ...],
    json_file: Path | None,
    **sizes: Any,
) -> None:
    """Sweep the host size, with and without a connector."""
    runs = [run for target in targets for run in _sweep(target, traces, **sizes)]
    if json_file:
        json_file.write_text(json.dumps(runs, indent=2) + "\n")
    worse = [
        row
        for row in runs
        if row["points_gained"] < -MOST_LOST or row["offloaded_blocks"] > row["computed_blocks"]
    ]
    print(f"{len(runs)} runs, {len(worse)} make serving worse")
    sys.exit(1 if worse else 0)


def _sweep(
    target: str,
    traces: tuple[Path, ...],
    gpu_blocks: str,
    cpu_blocks: str,
    requests: int | None,
    groups: str,
) -> list[dict[str, Any]]:
    """The runs of one connector, printed."""
    connector = load_connector(target)
    console = Console(width=120)
    table = Table(
        *("trace", "GPU", "host", "GPU hits", "CPU hits", "with - without", "computed"),
        *("offloaded", "skipped", "visits/store"),
        title=target,
    )
    runs: list[dict[str, Any]] = []
    for trace in traces or (None,):
        rows, block_size = rows_of(trace, requests)
        name = trace.name[:24] if trace else "generated"
        for size in gpu_blocks.split(","):
            num_gpu = 2**20 // block_size if size == "default" else int(size)
            fit = [row for row in rows if _num_blocks(row, block_size) < num_gpu - 1]
            plain = ReplayConfig(num_gpu, 8, groups=groups)
            alone, _ = run(fit, block_size, Connector, plain)
            for host in map(int, cpu_blocks.split(",")):
                config = ReplayConfig(num_gpu, 8, groups=groups, options={"cpu_blocks": host})
                report, watch = run(fit, block_size, connector, config)
                hits = report.gpu_hit_rate + report.cpu_hit_rate
                stored = report.offloaded_blocks
                row = {
                    "connector": target,
                    "trace": name,
                    "requests": report.requests,
                    "left_out": len(rows) - len(fit),
                    "gpu_blocks": num_gpu,
                    "cpu_blocks": host,
                    "gpu_hit_rate": report.gpu_hit_rate,
                    "cpu_hit_rate": report.cpu_hit_rate,
                    "points_gained": 100 * (hits - alone.gpu_hit_rate),
                    "computed_blocks": watch.num_computed,
                    "offloaded_blocks": stored,
                    "skipped_blocks": getattr(watch.scheduler, "num_skipped_blocks", 0),
                    "visits_per_store": getattr(watch.scheduler, "num_visited_blocks", 0)
                    / max(1, stored),
                }
                runs.append(row)
                table.add_row(
                    *(name, f"{num_gpu:,}", f"{host:,}"),
                    *(f"{report.gpu_hit_rate:.2%}", f"{report.cpu_hit_rate:.2%}"),
                    *(f"{row['points_gained']:+.2f}", f"{watch.num_computed:,}", f"{stored:,}"),
                    *(f"{row['skipped_blocks']:,}", f"{row['visits_per_store']:.2f}"),
                )
    console.print(table)
    most = max((row["visits_per_store"] for row in runs), default=0.0)
    met = "met" if most <= MOST_VISITS else "missed"
    name = target.rpartition(":")[2]
    print(f"{name}: visits for each block stored: at most {most:.2f}, <= {MOST_VISITS} {met}\n")
    return runs


def _num_blocks(row: TraceRequest, block_size: int) -> int:
    return -(-(row.num_prompt_tokens + row.num_output_tokens) // block_size) + 1


if __name__ == "__main__":
    main()
