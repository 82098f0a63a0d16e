"""The cost of the canary in a step of vLLM's real scheduler, with 256 running requests.

    python benchmarks/canary.py [--runs 5] [--steps 100]   (with vLLM installed)

The load, the steps and the clock are those of ``benchmarks/step_cost.py``. A connector of kvview
that does nothing runs alone, in the canary at a sampling of 1 in 64 and of all blocks, and in the
canary with its recorder. The runs are interleaved. The table has medians of the calls of both
halves, in microseconds a step, and the canary's share of an engine step of 25 ms. The worker's half
digests on the CPU here, and on the device of the KV cache in a server.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import step_cost  # type: ignore[import-not-found, unused-ignore]
from harness import Table  # type: ignore[import-not-found, unused-ignore]

from kvview_vllm.simulation.raw.stand_ins import StandIns


def configurations(folder: str) -> dict[str, dict[str, Any]]:
    """Name the connectors to compare."""
    alone = step_cost.configurations()["does nothing"]

    def around(**options: Any) -> dict[str, Any]:
        entry = {
            "connector": alone["kv_connector"],
            "module_path": alone["kv_connector_module_path"],
            **options,
        }
        return {
            **alone,
            "kv_connector": "CanaryConnector",
            "kv_connector_module_path": "kvview_vllm.canary",
            "kv_connector_extra_config": {**alone["kv_connector_extra_config"], "canary": entry},
        }

    return {
        "alone": alone,
        "canary, 1 in 64": around(),
        "canary, all blocks": around(sample=1),
        "canary, 1 in 64, recorder": around(incidents=folder, recorder_bytes=8 << 20),
    }


def spent(load: Any, calls: Sequence[str], steps: int) -> float:
    """Microseconds of a step in these calls, each of which counts as the median of its kind."""
    seconds = [load.spent.get(name, []) for name in calls]
    total = sum(len(each) * statistics.median(each) for each in seconds if each)
    return float(total / steps * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    seen: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    worker_calls = [f"worker {name}" for name in step_cost.WORKER_CALLS]
    with tempfile.TemporaryDirectory() as folder:
        loads = {
            name: step_cost.Load(config, Path(folder), StandIns(()))
            for name, config in configurations(folder).items()
        }
        for load in loads.values():
            step_cost.measure(load, 200)  # until requests start and end in every step
        for _ in range(arguments.runs):
            for name, load in loads.items():
                step_cost.measure(load, arguments.steps)
                scheduler = spent(load, step_cost.CALLS, arguments.steps)
                seen[name].append((scheduler, spent(load, worker_calls, arguments.steps)))
    table = Table(
        "microseconds a step", "scheduler half", "more than alone", "25 ms", "worker half"
    )
    alone = 0.0
    for name, runs in seen.items():
        us, worker = (statistics.median(column) for column in zip(*runs, strict=True))
        alone = alone or us
        more = us - alone
        table.add(name, f"{us:.1f}", f"{more:.1f}", f"{more / 2.5e4:.2%}", f"{worker:.1f}")
    table.show()


if __name__ == "__main__":
    main()
