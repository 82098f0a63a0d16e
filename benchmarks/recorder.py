"""The cost of the recorder in a step of vLLM's real scheduler, compared with the connector alone.

    python benchmarks/recorder.py [--steps 300] [--limit-mb 8]   (with vLLM installed)

The load is that of ``step_cost.py``: 256 running requests, and some that start and end in every
step. In one run, the calls of the connector and the calls of the recorder after them are timed
separately, in the processes of the scheduler and of a worker.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from harness import Table  # type: ignore[import-not-found, unused-ignore]
from step_cost import (  # type: ignore[import-not-found, unused-ignore]
    CALLS,
    WORKER_CALLS,
    Load,
    configurations,
    total,
)

from kvview_vllm.recorder import Recorder
from kvview_vllm.releases.compat.versions import vllm
from kvview_vllm.simulation.raw.stand_ins import StandIns

clock = time.perf_counter


def watch(connector: Any, names: tuple[str, ...], recorder: Recorder) -> dict[str, list[float]]:
    """Call a recorder after each hook; returns the seconds of the recorder by hook."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def watched(name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            began = clock()
            recorder.note(name, args, kwargs, result)
            seconds[name].append(clock() - began)
            return result

        return call

    for name in names:
        if (method := getattr(connector, name, None)) is not None:
            setattr(connector, name, watched(name, method))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--limit-mb", type=int, default=8)
    arguments = parser.parse_args()
    offloading = vllm("distributed.kv_transfer.kv_connector.v1.offloading_connector")
    stand_ins = StandIns(())
    table = Table(
        "connector, microseconds a step",
        *("scheduler side alone", "recorder", "of 25 ms", "most expensive hook"),
        *("worker side alone", "recorder", "steps per MiB"),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        stand_ins.installed([offloading.OffloadingConnector]),
    ):
        for name, config in configurations().items():
            if config is None:
                continue
            load = Load(config, Path(folder), stand_ins)
            sides = [Recorder(arguments.limit_mb << 20, folder) for _ in range(2)]
            scheduler = watch(load.scheduler.connector, CALLS, sides[0])
            worker = watch(load.worker, WORKER_CALLS, sides[1])
            for _ in range(200):
                load.step()
            for seconds in (*load.spent.values(), *scheduler.values(), *worker.values()):
                seconds.clear()
            before = sides[0].num_bytes
            gc.collect()
            gc.disable()
            for _ in range(arguments.steps):
                load.step()
            gc.enable()
            assert not any(side.num_errors for side in sides), "the recorder failed"
            us = {
                key: sum(total(one) for one in seconds) / arguments.steps * 1e6
                for key, seconds in {
                    "scheduler": [load.spent[one] for one in CALLS if one in load.spent],
                    "recorder": list(scheduler.values()),
                    "worker": [s for one, s in load.spent.items() if one.startswith("worker ")],
                    "recorder of worker": list(worker.values()),
                }.items()
            }
            slowest = max(scheduler, key=lambda one: total(scheduler[one]))
            per_step = (sides[0].num_bytes - before) / arguments.steps
            table.add(
                name,
                f"{us['scheduler']:.1f}",
                f"{us['recorder']:.1f}",
                f"{us['recorder'] / 25_000:.2%}",
                f"{slowest} {total(scheduler[slowest]) / arguments.steps * 1e6:.1f}",
                f"{us['worker']:.1f}",
                f"{us['recorder of worker']:.1f}",
                f"{(1 << 20) / per_step:.0f}",
            )
    table.show()


if __name__ == "__main__":
    main()
