"""The cost of the canary and its recorder in a step of vLLM's real scheduler.

    python benchmarks/canary.py [--runs 9] [--steps 100]   (with vLLM installed)

The load and the steps are those of ``benchmarks/step_cost.py``, with 256 running requests. A
connector runs alone, in the canary at a sampling of 1 in 64 and of all blocks, and in the canary
with its recorder. The figures are CPU time of the thread in the calls of both halves, in
microseconds a step. The worker's half digests on the CPU here, and on the device of the KV cache in
a server. The runs are interleaved, and the difference to the connector alone is the median of the
differences of the rounds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import step_cost  # type: ignore[import-not-found, unused-ignore]
from harness import Table  # type: ignore[import-not-found, unused-ignore]

from kvview_vllm.simulation.raw.stand_ins import StandIns

ENGINE_STEP = 25_000  # microseconds


def configurations(alone: dict[str, Any], folder: str) -> dict[str, dict[str, Any]]:
    """Name the arrangements to compare."""

    def around(**options: Any) -> dict[str, Any]:
        entry = {
            "connector": alone["kv_connector"],
            "module_path": alone.get("kv_connector_module_path"),
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
        "canary, 1 in 64, recorder": around(incidents=folder),
        "canary, all blocks": around(sample=1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--connector", default="does nothing")
    arguments = parser.parse_args()
    step_cost.clock = time.thread_time
    alone = step_cost.configurations()[arguments.connector]
    seen: defaultdict[str, list[float]] = defaultdict(list)
    workers: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        loads = {
            name: step_cost.Load(config, Path(folder), StandIns(()))
            for name, config in configurations(alone, folder).items()
        }
        for load in loads.values():
            step_cost.measure(load, 200)  # until requests start and end in every step
        for _ in range(arguments.runs):
            for name, load in loads.items():
                gc.collect()
                figures = step_cost.measure(load, arguments.steps)
                seen[name].append(figures["connector"])
                workers[name].append(figures["worker"])
    columns = "scheduler half", "more than alone", "25 ms", "worker half"
    table = Table("microseconds a step", *columns)
    for name, steps in seen.items():
        more = statistics.median(a - b for a, b in zip(steps, seen["alone"], strict=True))
        us, worker = statistics.median(steps), statistics.median(workers[name])
        table.add(name, f"{us:.0f}", f"{more:.1f}", f"{more / ENGINE_STEP:.2%}", f"{worker:.1f}")
    table.show()


if __name__ == "__main__":
    main()
