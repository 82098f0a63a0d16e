"""The cost of a connector in a step of vLLM's real scheduler: all hooks, 256 running requests.

    python benchmarks/step_cost.py [--runs 3] [--steps 100]   (with vLLM installed)

The scheduler is vLLM's, without a model: a step is ``schedule``, the calls of both halves, and
``update_from_output``. New requests of some hundred tokens keep arriving, so that prefills and
decodes are mixed: about 750 tokens a step, two and a half requests that start and as many that
end. The table has medians of interleaved runs, in microseconds: the scheduler's step, the part of
it in the calls of the connector, and its share of the scheduler's step without a connector. The
connector that does nothing shows the cost of the adapter. In a server, the calls of the worker run
in another process.

Calls are timed by the wall clock, because reading the CPU time of a thread costs 5 us per call in a
sandbox. A call that another process interrupted takes several times its median, and counts as the
median (``INTERRUPTED``). The scheduler's step is CPU time.

The shares are of engine steps of 10 and 25 ms: for 750 tokens a model of 8 billion parameters needs
12 TFLOP, 25 ms at half of one H100's bf16 speed; one of 3 billion needs 10 ms. vLLM's own
OffloadingConnector is measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

clock = time.perf_counter
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness import Table  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from typing_extensions import override  # noqa: E402

from kvview import Connector, FullAttention, SchedulerConnector  # noqa: E402
from kvview_vllm.geometry import read_geometry  # noqa: E402
from kvview_vllm.releases.build import samples  # noqa: E402
from kvview_vllm.releases.compat.versions import vllm  # noqa: E402
from kvview_vllm.simulation.raw.stand_ins import StandIns  # noqa: E402
from kvview_vllm.simulation.scheduler import cpu_scheduler, model_runner  # noqa: E402
from kvview_vllm.simulation.scheduler.cpu_scheduler import connector_config  # noqa: E402

CALLS = (  # of vLLM's scheduler
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "get_kv_connector_stats",
    "take_events",
    "has_pending_push_work",
)
WORKER_CALLS = (  # of vLLM's model runner
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
BLOCK_SIZE = 16
RUNNING = 256
NUM_BLOCKS = 16_384
TOKENS_PER_STEP = 2048
PAGE = 64  # bytes of a layer: moving them is not what is timed
INTERRUPTED = 4  # times the median of such calls
SHARES = {"10 ms": 10_000, "25 ms": 25_000}  # steps of an engine, in microseconds


TARGETS = {
    "HostCacheConnector": f"{ROOT / 'examples' / 'host_cache.py'}:HostCacheConnector",
    "StoreConnector": "kvview_reference.store_connector:StoreConnector",
}


class IdleConnector(Connector):
    """A connector that overrides no hook, so that only the adapter takes time."""

    contract_version = "1.0"

    @override
    def make_scheduler(self) -> SchedulerConnector:
        return SchedulerConnector()


def configurations() -> dict[str, dict[str, Any] | None]:
    """Name the connectors to compare."""
    targets = TARGETS.items()
    return {
        "no connector": None,
        "does nothing": connector_config(f"{__file__}:IdleConnector"),
        **{name: connector_config(target, cpu_blocks=4096) for name, target in targets},
        "vLLM's OffloadingConnector": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 4096 * 2 * BLOCK_SIZE * PAGE * 4},
        },
    }


class Load:
    """One scheduler under a load without end.

    Args:
        config: ``kv_transfer_config``; None without a connector.
        folder: Folder of the model's configuration.
        stand_ins: The copies of vLLM's connector, which run between steps.
    """

    def __init__(self, config: dict[str, Any] | None, folder: Path, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        import torch

        vllm_config = cpu_scheduler.make_vllm_config(
            folder,
            config,
            block_size=BLOCK_SIZE,
            num_groups=1,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=RUNNING,
            max_num_batched_tokens=TOKENS_PER_STEP,
        )
        kv_cache = cpu_scheduler.make_kv_cache_config([FullAttention(BLOCK_SIZE)], NUM_BLOCKS)
        geometry = read_geometry(vllm_config, kv_cache)
        self.scheduler = cpu_scheduler.make_scheduler(vllm_config, kv_cache, geometry)
        self.spent: dict[str, list[float]] = {}
        self.worker: Any = None
        if config is not None:
            self.worker = cpu_scheduler.make_worker_connector(vllm_config, kv_cache)
            layers = [name for group in kv_cache.kv_cache_groups for name in group.layer_names]
            tensor = torch.zeros((NUM_BLOCKS, 2, BLOCK_SIZE, PAGE))
            self.worker.register_kv_caches(dict.fromkeys(layers, tensor))
            for name in CALLS:
                self._time(self.scheduler.connector, name, name)
            for name in WORKER_CALLS:
                self._time(self.worker, name, f"worker {name}")
            self._runner = model_runner.RunnerV1(vllm_config, self.worker)
        utils = vllm("v1.core.kv_cache_utils")
        utils.init_none_hash(samples.hash_function())
        self._hasher = utils.get_request_block_hasher(BLOCK_SIZE, samples.hash_function())
        self._depth = 0
        self._random = random.Random(0)
        self._num_requests = 0
        while self._num_requests < RUNNING:
            self._add()

    def _time(self, connector: Any, name: str, key: str) -> None:
        method = getattr(connector, name, None)
        if method is None:
            return
        seconds = self.spent[key] = []

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            self._depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    seconds.append(clock() - began)

        setattr(connector, name, timed)

    def _add(self) -> None:
        draw = self._random
        # A third shares a prefix with others; ends are spread over the steps.
        first = draw.randrange(3, 40) * 10 if draw.random() < 0.3 else draw.randrange(500)
        length = draw.randrange(64, 320)
        tokens = [(first + 7 * i + (first % 11) * (i // 16)) % 500 + 3 for i in range(length)]
        request = samples.make_request(
            f"r{self._num_requests}",
            tokens,
            draw.randrange(20, 180),
            block_hasher=self._hasher,
        )
        self._num_requests += 1
        self.scheduler.add_request(request)

    def step(self) -> float:
        """Run one step; returns the seconds of the scheduler."""
        while len(self.scheduler.running) + len(self.scheduler.waiting) < RUNNING:
            self._add()
        self._stand_ins.tick()
        began = time.thread_time()
        output = self.scheduler.schedule()
        scheduled = time.thread_time() - began
        transfers = None
        if self.worker is not None:
            with self._runner.forward(output):
                pass
            transfers = self._runner.end_step(output)
        sampled = {
            name: [7] if request.num_computed_tokens >= request.num_tokens else []
            for name in output.num_scheduled_tokens
            if (request := self.scheduler.requests[name])
        }
        answer = samples.make_model_output(output, sampled, transfers)
        began = time.thread_time()
        self.scheduler.update_from_output(output, answer)
        return scheduled + time.thread_time() - began


def total(seconds: list[float]) -> float:
    """Their sum; what was interrupted counts as the median."""
    usual = statistics.median(seconds or [0.0])
    return sum(each if each < INTERRUPTED * usual else usual for each in seconds)


def measure(load: Load, steps: int) -> dict[str, float]:
    """Mean microseconds of a step: of the scheduler, of the worker, and in each call."""
    for seconds in load.spent.values():
        seconds.clear()
    gc.collect()
    gc.disable()
    step = [load.step() for _ in range(steps)]
    gc.enable()
    spent = {name: total(seconds) for name, seconds in load.spent.items()}
    spent["connector"] = sum(spent.get(name, 0.0) for name in CALLS)
    spent["worker"] = sum(spent.get(f"worker {name}", 0.0) for name in WORKER_CALLS)
    spent["step"] = sum(step)
    return {name: value / steps * 1e6 for name, value in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    seen: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    offloading = vllm("distributed.kv_transfer.kv_connector.v1.offloading_connector")
    stand_ins = StandIns(())
    installed = stand_ins.installed([offloading.OffloadingConnector])
    with tempfile.TemporaryDirectory() as folder, installed:
        loads = {
            name: Load(config, Path(folder), stand_ins) for name, config in configurations().items()
        }
        for load in loads.values():
            measure(load, 200)  # until requests start and end in every step
        for _ in range(arguments.runs):
            for name, load in loads.items():
                seen[name].append(measure(load, arguments.steps))
    table = Table("microseconds a step", "scheduler", "connector", "of it", *SHARES, "worker")
    alone = 0.0
    for name, runs in seen.items():
        row = {key: statistics.median(run.get(key, 0.0) for run in runs) for key in runs[0]}
        alone = alone or row["step"]
        us = row["connector"]
        shares = [f"{us / step:.2%}" for step in SHARES.values()]
        cells = f"{row['step']:.0f}", f"{us:.1f}", f"{us / alone:.1%}", *shares
        table.add(name, *cells, f"{row['worker']:.1f}")
    table.show()


if __name__ == "__main__":
    main()
