"""``kvview replay`` on a real trace: time, and whether memory grows with the trace.

    python benchmarks/replay.py [--trace FILE]

Runs the command in separate processes: on a quarter of the trace three times, for the spread, on
all of it, and on all of it with the example connector.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from harness import DATA, ROOT, Table, verdict  # type: ignore[import-not-found, unused-ignore]

TRACE = DATA / "mooncake_conversation_trace.jsonl"
EXAMPLE = f"{ROOT / 'examples' / 'host_cache.py'}:HostCacheConnector"
TARGET = 60_000  # blocks per second
REQUESTS = 12_031


def replay(*args: str) -> tuple[dict[str, float], float]:
    """Run a replay; returns its report, and the peak of its resident memory in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "kvview", "replay", *args, "--quiet", f"--json={report}"]
        process = subprocess.Popen(command)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"kvview replay {' '.join(args)}: exit code {process.returncode}")
        return json.loads(report.read_text()), usage.ru_maxrss / 1024


@click.command(help=__doc__)
@click.option("--trace", type=click.Path(exists=True, path_type=Path))
def main(trace: Path | None) -> None:
    if trace is None and TRACE.exists():
        trace = TRACE
    source = [] if trace is None else [str(trace)]
    quarter, whole = f"--requests={REQUESTS // 4}", f"--requests={REQUESTS}"
    runs = {f"quarter, run {number}": [quarter] for number in (1, 2, 3)}
    runs["whole"] = [whole]
    runs["whole, with examples/host_cache.py"] = [
        whole,
        "--connector",
        EXAMPLE,
        "--cpu-blocks=10000",
    ]
    name = trace.name if trace else "generated workload"
    table = Table(
        name, *("requests", "blocks", "seconds", "blocks/s", "GPU hits", "CPU hits", "MiB")
    )
    for run, options in runs.items():
        report, mib = replay(*source, *options)
        table.add(
            *(run, f"{report['requests']:,}", f"{report['blocks']:,}", f"{report['seconds']:.1f}"),
            *(f"{report['blocks_per_s']:,.0f}", f"{report['gpu_hit_rate']:.1%}"),
            *(f"{report['cpu_hit_rate']:.1%}", f"{mib:.0f}"),
        )
    table.show()
    print(f"blocks/s of the last run: {verdict(report['blocks_per_s'], at_least=TARGET)}")


if __name__ == "__main__":
    main()
