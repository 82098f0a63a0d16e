"""What a connector costs a step of vLLM's real scheduler: all hooks, 256 running requests.

    python benchmarks/step_cost.py [--runs 5] [--steps 300]   (with a vLLM importable)

The scheduler is vLLM's, the model is not there: a step is ``schedule``, the calls of both
halves, and ``update_from_output``. New requests of some hundred tokens keep coming in, so that
prefills and decodes are mixed: about 750 tokens, two and a half requests that begin and as many
that end. Printed are medians of interleaved runs, in microseconds: the step of the
scheduler (to compare with that without a connector), what of it is spent in the calls of the
connector, all hooks together, and what of that is the adapter's, which is all but the code of the
connector itself (its hooks, and what these call). Beside both stands their share of the scheduler's
step without a connector, on which the noise of a machine falls as well. The worker's calls, all of
them too, are spent in another process; what they copy is next to nothing here.

Calls are timed by the wall's clock, which no system call reads: that of a thread's CPU time costs a
call 5 us in a sandbox, mostly by what it throws out of the caches. Where another process came
between, a call takes several times its median; it counts as the median then (``INTERRUPTED``). The
scheduler's step, two looks at a clock, is CPU time.

The shares are of an engine's step of 25 ms: for 750 tokens a model of 8 billion parameters needs
12 TFLOP, 25 ms at half of what one H100 has in bf16; one of 3 billion needs 10 ms. The peer, in
the same run, is vLLM's own OffloadingConnector. OffloadConnector looks in each step at the
requests that fill a block; LazyOffloadConnector does the same here, as its tier is smaller than
the pool.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

clock = time.perf_counter
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "vllm"), str(ROOT)]

import engine as lane  # type: ignore[import-not-found]  # noqa: E402
from kvview_vllm.simulation import scheduler as cpu_scheduler  # noqa: E402

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
RUNNING = 256
NUM_BLOCKS = 16_384
TOKENS_PER_STEP = 2048
PAGE = 64  # bytes of a layer: moving them is not what is timed
INTERRUPTED = 4  # times the median of such calls


def configurations() -> dict[str, dict[str, Any] | None]:
    """What is compared, by name."""
    here = f"{__file__}:"
    spec = {"spec_name": "KVViewOffloadingSpec", "spec_module_path": "kvview_vllm.offloading_spec"}
    return {
        "no connector": None,
        "does nothing": lane.connector_config(here + "IdleConnector"),
        "HostCacheConnector": lane.connector_config(here + "HostCacheConnector", cpu_blocks=4096),
        "StoreConnector": lane.connector_config(here + "StoreConnector", cpu_blocks=4096),
        "StoreConnector, finish": lane.connector_config(
            here + "StoreConnector", cpu_blocks=4096, mode="finish"
        ),
        "OffloadConnector": lane.connector_config(here + "OffloadConnector", cpu_blocks=4096),
        "LazyOffloadConnector": lane.connector_config(
            here + "LazyOffloadConnector", cpu_blocks=4096
        ),
        "vLLM's OffloadingConnector": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": spec | {"kvview": {"num_blocks": 4096}},
        },
    }


TARGETS = {
    "IdleConnector": None,
    "HostCacheConnector": lane.EXAMPLE_CONNECTOR,
    "StoreConnector": "kvview:StoreConnector",
    "OffloadConnector": "kvview_reference.connector:OffloadConnector",
    "LazyOffloadConnector": "kvview_reference.connector:LazyOffloadConnector",
}
# Seconds of the hooks that are the connector's own; a target's module is this file again.
own: defaultdict[str, list[float]] = vars(sys.modules["__main__"]).get("own", defaultdict(list))


def __getattr__(name: str) -> Any:
    """The connectors by target, their scheduler's hooks timed."""
    if name not in TARGETS:
        raise AttributeError(name)
    from kvview import Connector, SchedulerConnector
    from kvview.connector.hooks import hooks_of
    from kvview.targets import load_connector

    target = TARGETS[name]
    kind: Any = load_connector(target) if target else Connector

    class TimedConnector(kind):  # type: ignore[misc]
        contract_version = "1.0"

        def make_scheduler(self) -> SchedulerConnector:
            half: SchedulerConnector = super().make_scheduler() if target else SchedulerConnector()
            for hook in hooks_of(type(half)):
                if getattr(type(half), hook) is not getattr(SchedulerConnector, hook):
                    object.__setattr__(half, hook, _timed(getattr(half, hook), own[hook]))
            return half

    return TimedConnector


def _timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        began = clock()
        try:
            return method(*args)
        finally:
            seconds.append(clock() - began)

    return timed


class Load:
    """One scheduler under a load that goes on for ever.

    Args:
        config: `kv_transfer_config`, None without a connector.
        folder: For the model's configuration.
    """

    def __init__(self, config: dict[str, Any] | None, folder: Path) -> None:
        import torch

        vllm_config = cpu_scheduler.make_vllm_config(
            folder,
            config,
            block_size=lane.BLOCK_SIZE,
            num_groups=1,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=RUNNING,
            max_num_batched_tokens=TOKENS_PER_STEP,
        )
        groups = lane._groups([None])
        kv_cache = cpu_scheduler.make_kv_cache_config(groups, NUM_BLOCKS)
        geometry = lane.read_geometry(vllm_config, kv_cache)
        self.scheduler = cpu_scheduler.make_scheduler(vllm_config, kv_cache, geometry)
        self.spent: dict[str, list[float]] = {}
        self.worker: Any = None
        if config is not None:
            self.worker = cpu_scheduler.make_worker_connector(vllm_config, kv_cache)
            layers = [name for group in kv_cache.kv_cache_groups for name in group.layer_names]
            if config["kv_connector"] == "OffloadingConnector":
                lane._register_layers(vllm_config, layers)
            tensor = torch.zeros((NUM_BLOCKS, 2, lane.BLOCK_SIZE, PAGE))
            self.worker.register_kv_caches(dict.fromkeys(layers, tensor))
            for name in CALLS:
                self._time(self.scheduler.connector, name, name)
            for name in WORKER_CALLS:
                self._time(self.worker, name, f"worker {name}")
        self._depth = 0
        self._random = random.Random(0)
        self._num_requests = 0
        while self._num_requests < RUNNING:
            self._add()

    def _time(self, connector: Any, name: str, told: str) -> None:
        method = getattr(connector, name, None)
        if method is None:
            return
        seconds = self.spent[told] = []

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
        request = lane.make_request(f"r{self._num_requests}", tokens, draw.randrange(20, 180))
        self._num_requests += 1
        self.scheduler.add_request(request)

    def step(self) -> float:
        """Seconds of one step on the scheduler's side."""
        while len(self.scheduler.running) + len(self.scheduler.waiting) < RUNNING:
            self._add()
        began = time.thread_time()
        output = self.scheduler.schedule()
        scheduled = time.thread_time() - began
        transfers = None
        if self.worker is not None:
            cpu_scheduler.bind_transfers(self.worker, output, output.kv_connector_metadata)
            cpu_scheduler.start_transfers(self.worker)
            transfers = cpu_scheduler.take_transfers(self.worker, output)
            cpu_scheduler.end_transfers(self.worker)
        answer = lane.make_model_output(self.scheduler, output, transfers)
        began = time.thread_time()
        self.scheduler.update_from_output(output, answer)
        return scheduled + time.thread_time() - began


def total(seconds: list[float]) -> float:
    """Their sum; what was interrupted counts as the median."""
    usual = statistics.median(seconds or [0.0])
    return sum(each if each < INTERRUPTED * usual else usual for each in seconds)


def measure(load: Load, steps: int) -> dict[str, float]:
    """Mean microseconds of a step: of the scheduler, of the worker, and in each call."""
    for seconds in (*load.spent.values(), *own.values()):
        seconds.clear()
    gc.collect()
    gc.disable()
    step = [load.step() for _ in range(steps)]
    gc.enable()
    spent = {name: total(seconds) for name, seconds in load.spent.items()}
    spent["connector"] = sum(spent.get(name, 0.0) for name in CALLS)
    spent["adapter"] = spent["connector"] - sum(map(total, own.values()))
    spent["worker"] = sum(spent.get(f"worker {name}", 0.0) for name in WORKER_CALLS)
    spent["step"] = sum(step)
    return {name: value / steps * 1e6 for name, value in spent.items()}


def profile(load: Load, steps: int) -> None:
    """Print where the time of a loaded scheduler goes."""
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.runcall(lambda: [load.step() for _ in range(steps)])
    pstats.Stats(profiler).sort_stats("cumulative").print_stats("kvview|host_cache", 40)


def main() -> None:
    """Measure, interleaved, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", help="of one configuration, by name")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make: Callable[[Any], Load] = lambda config: Load(config, Path(folder) / "model")  # noqa: E731
        if arguments.profile:
            profile(make(configurations()[arguments.profile]), arguments.steps)
            return
        loads = {name: make(config) for name, config in configurations().items()}
        for load in loads.values():
            measure(load, 200)  # until requests end and begin all the time
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in loads}
        for _ in range(arguments.runs):
            for name, load in loads.items():
                seen[name].append(measure(load, arguments.steps))
    table, alone = {}, 0.0
    print(
        f"{'microseconds a step':28} scheduler  connector   of it  10 ms  25 ms  adapter   of it"
        "  10 ms  25 ms  worker  dearest call"
    )
    for name, runs in seen.items():
        row = {key: statistics.median(run.get(key, 0.0) for run in runs) for key in runs[0]}
        calls = {key: value for key, value in row.items() if key in CALLS}
        if name.startswith("vLLM"):
            row["adapter"] = 0.0  # it has hooks of its own
        dearest = max(calls, key=lambda key: calls[key], default="")
        table[name] = row
        alone = alone or row["step"]
        shares = "".join(
            f"{row[key]:{width}.1f}{row[key] / alone:7.1%}"
            f"{row[key] / 100:6.2f}%{row[key] / 250:6.2f}%"
            for key, width in (("connector", 11), ("adapter", 8))
        )
        print(
            f"{name:28}{row['step']:10.0f}{shares}{row['worker']:8.1f}  "
            f"{dearest} {calls.get(dearest, 0):.1f}"
        )
    print(json.dumps({"step_cost": table, "runs": arguments.runs, "steps": arguments.steps}))


if __name__ == "__main__":
    main()
