"""What the adapter adds to a step of vLLM's scheduler with 256 running requests.

    python benchmarks/connector.py [--json FILE] [--vllm-sources DIR]

Four real schedulers decode the same requests, 16 steps each in turn: without a
connector, with a vLLM connector that does nothing, and with ``KVViewConnector``
running one that does nothing and ``examples/host_cache.py``. A step is
``schedule()``; the model's answer is made up. Requests begin a new block every 16
steps, so the best time of each of 16 phases counts. "In the connector" is the
time between the scheduler's call of the connector and its return, and the share
is that over the step without a connector; the target is 1 % at most.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from peer import (  # type: ignore[import-not-found]
    HOW_TO_GET_IT,
    RELEASE,
    add_vllm_to_path,
)
from rich.console import Console
from rich.table import Table

from kvview import Connector, SchedulerConnector, StepInfo, StepPlan, WorkerConnector

NUM_REQUESTS = 256
NUM_BLOCKS = 16384
NUM_PHASES = 16  # the block size
PROMPT_TOKENS = 32
MAX_TOKENS = 440
TARGET = 0.01


class IdleConnector(Connector):
    """Does nothing, through the contract."""

    def make_scheduler(self) -> SchedulerConnector:
        return IdleScheduler()

    def make_worker(self) -> WorkerConnector:
        raise NotImplementedError


class IdleScheduler(SchedulerConnector):
    """Promises and plans nothing."""

    def plan_step(self, step: StepInfo) -> StepPlan:
        return StepPlan()


def make_bare_connector() -> type[Any]:
    """A connector of vLLM's own interface that does nothing."""
    base = import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    metadata = base.KVConnectorMetadata()

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None: ...

    methods: dict[str, Any] = dict.fromkeys(base.KVConnectorBase_V1.__abstractmethods__, nothing)
    methods["get_num_new_matched_tokens"] = lambda self, request, computed: (0, False)
    methods["build_connector_meta"] = lambda self, output: metadata
    methods["request_finished_all_groups"] = lambda self, request, block_ids: (False, None)
    return type("BareConnector", (base.KVConnectorBase_V1, base.SupportsHMA), methods)


class Side:
    """One scheduler with its requests running.

    Args:
        name: For the table.
        lane: ``tests/vllm/engine.py``.
        folder: Where the model's configuration is written.
        transfer_config: Of the connector; None for none.
    """

    def __init__(
        self, name: str, lane: Any, folder: Path, transfer_config: dict[str, Any] | None
    ) -> None:
        self.name = name
        self.lane = lane
        self.scheduler = lane.make_scheduler(
            folder, transfer_config, num_blocks=NUM_BLOCKS, max_num_seqs=NUM_REQUESTS
        )
        self.in_connector_s = 0.0
        if self.scheduler.connector is not None:
            connector = self.scheduler.connector
            connector.build_connector_meta = self._timed(connector.build_connector_meta)
        for number in range(NUM_REQUESTS):
            # Lengths differ: in every step as many requests begin a block.
            tokens = [number + 2, *range(2, PROMPT_TOKENS + 1 + number % NUM_PHASES)]
            self.scheduler.add_request(lane.make_request(str(number), tokens, MAX_TOKENS))
        while self._num_decoding() < NUM_REQUESTS:
            self.step()
        self.steps_s = [float("inf")] * NUM_PHASES
        self.connector_s = [float("inf")] * NUM_PHASES

    def _num_decoding(self) -> int:
        return sum(bool(request.num_output_tokens) for request in self.scheduler.running)

    def _timed(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(output: Any) -> Any:
            start = time.perf_counter()
            answer = call(output)
            self.in_connector_s = time.perf_counter() - start
            return answer

        return timed

    def step(self) -> float:
        """Schedule, and make up the answer; the seconds of the former."""
        start = time.perf_counter()
        output = self.scheduler.schedule()
        seconds = time.perf_counter() - start
        answer = self.lane.make_model_output(self.scheduler, output)
        self.scheduler.update_from_output(output, answer)
        return seconds

    def measure(self, phase: int) -> None:
        """One step, kept if it is the phase's best."""
        seconds = self.step()
        assert len(self.scheduler.running) == NUM_REQUESTS
        self.steps_s[phase] = min(self.steps_s[phase], seconds)
        self.connector_s[phase] = min(self.connector_s[phase], self.in_connector_s)


def measure(lane: Any, periods: int) -> list[Side]:
    """Let the sides decode in turn."""
    bare = {
        "kv_connector": "BareConnector",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
    }
    configs: dict[str, dict[str, Any] | None] = {
        "no connector": None,
        "vLLM connector, idle": bare,
        "KVViewConnector, idle": lane.connector_config(f"{__file__}:IdleConnector"),
        "KVViewConnector, host_cache.py": lane.connector_config(cpu_blocks=1000),
    }
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(name, lane, Path(folder), config) for name, config in configs.items()]
    gc.collect()
    gc.disable()
    for _ in range(periods):
        for side in sides:
            for phase in range(NUM_PHASES):
                side.measure(phase)
    gc.enable()
    return sides


def main() -> int:
    parser = argparse.ArgumentParser(description="The adapter's share of a scheduler step.")
    parser.add_argument("--json", type=Path, help="write the shares to this file")
    parser.add_argument("--periods", type=int, default=24, help=f"{NUM_PHASES} steps each")
    parser.add_argument("--vllm-sources", type=Path, help="folder that holds the vllm package")
    arguments = parser.parse_args()
    if NUM_PHASES * arguments.periods >= MAX_TOKENS - 40:
        parser.error(f"a request ends after {MAX_TOKENS} tokens: fewer --periods")
    if not add_vllm_to_path(arguments.vllm_sources):
        print(HOW_TO_GET_IT, file=sys.stderr)
        return 1
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "vllm"))
    lane: Any = import_module("engine")
    globals()["BareConnector"] = make_bare_connector()

    sides = measure(lane, arguments.periods)
    table = Table(title=f"schedule(), {NUM_REQUESTS} running, vLLM {RELEASE}")
    for column in ("", "step, us", "in the connector, us", "share", "target"):
        table.add_column(column, justify="right" if column else "left")
    without_s = sum(sides[0].steps_s) / NUM_PHASES
    figures = {}
    for side in sides:
        step_s = sum(side.steps_s) / NUM_PHASES
        row = [side.name, f"{step_s * 1e6:.1f}"]
        if side is not sides[0]:
            connector_s = sum(side.connector_s) / NUM_PHASES
            share = connector_s / without_s
            row += [f"{connector_s * 1e6:.2f}", f"{share:.2%}", f"{TARGET:.0%}"]
            key = side.name.replace(",", "").replace(".py", "").replace(" ", "_").lower()
            figures[f"step_share_{key}"] = round(share, 5)
        table.add_row(*row)
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
