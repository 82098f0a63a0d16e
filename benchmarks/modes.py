"""Hits of the modes of StoreConnector, in percent of all blocks, on three traces.

    python benchmarks/modes.py [--requests 3000]

Each cell is a run of ``kvview replay``, with a million tokens on the GPU. Host memory has once,
twice and eight times the blocks of the GPU. The exit code is 1 if the default mode hits less than
no host tier, or less than another mode by more than two points.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

from click.testing import CliRunner
from harness import DATA, Table  # type: ignore[import-not-found, unused-ignore]

from kvview_reference.replay.command import replay
from kvview_reference.store_connector import StoreOptions
from kvview_reference.traces.reader import read_trace

MODES = ("victim", "exclusive", "eager", "finish")
GPU_TOKENS = 1 << 20
TIMES_GPU = (1, 2, 8)


def percent_hit(
    trace: Path | None, num_requests: int, gpu_blocks: int, cpu_blocks: int, mode: str
) -> float:
    """Return the blocks that were hit on the GPU or loaded, in percent."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        arguments = ["--requests", num_requests, "--gpu-blocks", gpu_blocks, "--json", file]
        arguments += ["--connector", "kvview_reference.store_connector:StoreConnector"]
        arguments += ["--option", f"mode={mode}", "--option", f"cpu_blocks={cpu_blocks}"]
        arguments += [trace] if trace else []
        result = CliRunner().invoke(replay, list(map(str, arguments)))
        if result.exit_code:
            sys.exit(result.output)
        report = json.loads(file.read_text())
    return 100 * float(report["gpu_hit_rate"] + report["cpu_hit_rate"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000, help="requests of each trace")
    num_requests = parser.parse_args().requests
    default = StoreOptions().mode
    table = Table("trace", "host blocks", "none", *MODES)
    is_best = True
    for trace in (None, *sorted(DATA.glob("*.jsonl*"))):
        gpu_blocks = GPU_TOKENS // (read_trace(trace).block_size if trace else 512)
        hit = partial(percent_hit, trace, num_requests, gpu_blocks)
        none = hit(0, default)
        for times in TIMES_GPU:
            hits = {mode: hit(times * gpu_blocks, mode) for mode in MODES}
            is_best &= hits[default] >= max(none, *(each - 2 for each in hits.values()))
            name = trace.name if trace else "generated"
            cells = [f"{value:.1f}" for value in (none, *hits.values())]
            table.add(name, f"{times * gpu_blocks:,}", *cells)
    table.show()
    sys.exit(0 if is_best else 1)


if __name__ == "__main__":
    main()
