"""The effect of a connector on the hits, compared with a replay without one, by host size.

    python benchmarks/connector_hits.py [TRACE ...] [--requests N] [--connector TARGET]

Replays each trace (the generated workload without one) without a connector and with one at each
host size. The table has the points of the prompt blocks by which the hits of GPU and CPU together
exceed those without, and the entries of the free queue that are visited for each block stored.
A connector must never make serving worse: the exit code is 1 if it loses more than 0.2 points or
offloads a computed block more than once. Requests that do not fit in the pool are skipped.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import click

from kvview import Connector, StepInfo, StepPlan
from kvview.targets import load_connector
from kvview_reference.replay.run import ReplayConfig, ReplayReport, replay
from kvview_reference.replay.traces import TraceRequest, open_trace
from kvview_reference.replay.workload import generate_trace

CONNECTORS = ("OffloadConnector", "LazyOffloadConnector")
MOST_LOST = 0.2  # points
MOST_VISITS = 1.5  # entries of the free queue for each block stored


class Counting:
    """Counts the full blocks that the engine computes, and keeps the scheduler half."""

    def __init__(self) -> None:
        self.num_computed = 0
        self.scheduler: Any = None

    def around(self, connector: type[Connector]) -> type[Connector]:
        """Make a counting subclass of a connector."""
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


def rows_of(trace: Path | None, requests: int) -> tuple[list[TraceRequest], int]:
    """Read the requests of a trace, or generate some; returns their block size too."""
    if trace is None:
        return list(generate_trace(num_requests=requests, seed=0, block_size=512)), 512
    source = open_trace(trace, on_error=lambda error: None)
    return list(islice(source, requests)), source.block_size


def run(
    rows: list[TraceRequest], block_size: int, target: type[Connector], config: ReplayConfig
) -> tuple[ReplayReport, Counting]:
    """Replay, and count."""
    watch = Counting()
    return replay(rows, block_size, watch.around(target), config), watch


@click.command(help=__doc__)
@click.argument("traces", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--connector",
    "targets",
    multiple=True,
    default=[f"kvview_reference.connector:{name}" for name in CONNECTORS],
)
@click.option("--gpu-blocks", type=int, multiple=True, default=(2000, 2048), show_default=True)
@click.option("--cpu-blocks", type=int, multiple=True, default=(10_000,), show_default=True)
@click.option("--requests", default=2000, show_default=True, help="First requests of each trace.")
@click.option("--groups", default="full", show_default=True)
def main(
    traces: tuple[Path, ...],
    targets: tuple[str, ...],
    gpu_blocks: tuple[int, ...],
    cpu_blocks: tuple[int, ...],
    requests: int,
    groups: str,
) -> None:
    # Tests import Counting, and have no path to the other benchmarks.
    from harness import Table, verdict  # type: ignore[import-not-found, unused-ignore]

    table = Table(
        *("connector", "trace", "GPU", "host", "GPU hits", "CPU hits", "points gained"),
        *("computed", "offloaded", "skipped", "visits per store", "target"),
    )
    num_worse = 0
    for trace in traces or (None,):
        rows, size = rows_of(trace, requests)
        for num_gpu in gpu_blocks:
            fit = [
                row
                for row in rows
                if (row.num_prompt_tokens + row.num_output_tokens) // size + 2 < num_gpu - 1
            ]
            alone, _ = run(fit, size, Connector, ReplayConfig(num_gpu, 8, groups=groups))
            for target in targets:
                for host in cpu_blocks:
                    config = ReplayConfig(num_gpu, 8, groups=groups, options={"cpu_blocks": host})
                    report, watch = run(fit, size, load_connector(target), config)
                    gained = report.gpu_hit_rate + report.cpu_hit_rate - alone.gpu_hit_rate
                    stored = report.offloaded_blocks
                    visits = getattr(watch.scheduler, "num_visited_blocks", 0) / max(1, stored)
                    num_worse += 100 * gained < -MOST_LOST or stored > watch.num_computed
                    table.add(
                        *(target.rpartition(":")[2], trace.name[:24] if trace else "generated"),
                        *(f"{num_gpu:,}", f"{host:,}", f"{report.gpu_hit_rate:.2%}"),
                        *(f"{report.cpu_hit_rate:.2%}", f"{100 * gained:+.2f}"),
                        *(f"{watch.num_computed:,}", f"{stored:,}"),
                        getattr(watch.scheduler, "num_skipped_blocks", 0),
                        f"{visits:.2f}",
                        verdict(visits, at_most=MOST_VISITS),
                    )
    table.show()
    print(f"{num_worse} runs make serving worse")
    sys.exit(1 if num_worse else 0)


if __name__ == "__main__":
    main()
