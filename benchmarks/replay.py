"""The main job on a real trace: how long, and whether memory grows with the trace.

    python benchmarks/replay.py [--trace FILE] [--json FILE]

Runs ``kvview replay`` in processes of its own: on a quarter of the trace three times, which
is the spread, on all of it, and on all of it with the example connector.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
TRACE = ROOT.parent / "shared" / "data" / "mooncake_conversation_trace.jsonl"
EXAMPLE = f"{ROOT / 'examples' / 'host_cache.py'}:HostCacheConnector"
BUDGET_S = 60
WANTED_BLOCKS_PER_S = 60_000
GENERATED_REQUESTS = 12_000


def replay(*args: str) -> tuple[dict[str, float], float]:
    """Run one replay.

    Returns:
        Its report, and the peak of its resident memory in MiB.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = [*args, "--json", str(report)]
        code = f"from kvview_reference.replay.command import replay; replay({options!r})"
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"kvview replay {' '.join(args)}: exit code {process.returncode}")
        return json.loads(report.read_text()), usage.ru_maxrss / 1024


@click.command()
@click.option("--trace", type=click.Path(path_type=Path), default=TRACE, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Flat named ratios.")
def main(trace: Path, json_file: Path | None) -> None:
    """Measure the main job."""
    if trace.exists():
        source = [str(trace)]
        total = sum(1 for _ in trace.open("rb"))
    else:
        print(f"no {trace}: a generated workload of {GENERATED_REQUESTS} requests instead")
        source, total = [], GENERATED_REQUESTS
    quarters = [replay(*source, "--requests", str(total // 4)) for _ in range(3)]
    quarter, quarter_mib = quarters[0]
    speeds = sorted(report["blocks_per_s"] for report, _ in quarters)
    whole, whole_mib = replay(*source, "--requests", str(total))
    example, _ = replay(
        *source, "--requests", str(total), "--connector", EXAMPLE, "--cpu-blocks", "10000"
    )

    table = Table("run", "requests", "blocks", "seconds", "blocks/s", "GPU hits", "CPU hits", "MiB")
    rows = (("quarter", quarter, quarter_mib), ("whole", whole, whole_mib), ("example", example, 0))
    for name, run, mib in rows:
        table.add_row(
            name,
            f"{run['requests']:,}",
            f"{run['blocks']:,}",
            f"{run['seconds']:.1f}",
            f"{run['blocks_per_s']:,.0f}",
            f"{run['gpu_hit_rate']:.1%}",
            f"{run['cpu_hit_rate']:.1%}",
            f"{mib:.0f}" if mib else "",
        )
    Console().print(table)
    met = "met" if whole["blocks_per_s"] >= WANTED_BLOCKS_PER_S else "missed"
    print(f"blocks/s of the quarter: {speeds[0]:,.0f}-{speeds[-1]:,.0f} in {len(speeds)} runs")
    print(f"target of the whole: >= {WANTED_BLOCKS_PER_S:,} blocks/s {met}")
    ratios = {
        "replay_seconds_of_budget": whole["seconds"] / BUDGET_S,
        "replay_memory_whole_to_quarter": whole_mib / quarter_mib,
        "replay_seconds": whole["seconds"],
        "replay_blocks_per_s": whole["blocks_per_s"],
        "replay_hit_rate": whole["gpu_hit_rate"] + whole["cpu_hit_rate"],
        "replay_mismatches": whole["mismatches"],
        "replay_holds_at_end": whole["holds_at_end"],
    }
    if json_file:
        json_file.write_text(json.dumps(ratios, indent=2) + "\n")


if __name__ == "__main__":
    main()
