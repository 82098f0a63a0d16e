"""Long runs of a connector: steps, broken laws and growth of memory.

python benchmarks/soak.py --steps 1000000
python benchmarks/soak.py --steps 20000 --engine vllm --in-flight 3

The steps are divided among the seeds. The memory is that of this process, from a tenth of a run to
its end, because caches fill before. Exit code 1: a law was broken, the memory grew by more than
--mib, or the steps in flight never reached --in-flight.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvview import Connector
from kvview.targets import load_connector
from kvview.testing.connector import check_connector, load_engines
from kvview.testing.connector.harness import ConnectorHarness, EngineFactory
from kvview.testing.connector.scenario import Scenario
from kvview.testing.connector.stream import StepStream

CONNECTORS = (
    "examples/host_cache.py:HostCacheConnector",
    "kvview_reference.connector:LazyOffloadConnector",
)
PAGE_BYTES = 4096


class Overlapping:
    """Engines whose every scenario has a number of steps in flight."""

    def __init__(self, engines: EngineFactory, steps_in_flight: int) -> None:
        self.name = f"{engines.name}, {steps_in_flight} steps in flight"
        self._engines = engines
        self._steps_in_flight = steps_in_flight
        self._built: list[ConnectorHarness] = []

    def fit(self, scenario: Scenario) -> tuple[Scenario, Sequence[str]]:
        """Fit the scenario with overlapping steps."""
        return self._engines.fit(replace(scenario, steps_in_flight=self._steps_in_flight))

    def build(
        self,
        scenario: Scenario,
        connectors: Sequence[Connector],
        *,
        owner: str,
        clock: Callable[[], float],
        stream: StepStream | None = None,
    ) -> ConnectorHarness:
        """Build an engine and keep it, to count its steps in flight."""
        built = self._engines.build(scenario, connectors, owner=owner, clock=clock, stream=stream)
        self._built = [built]
        return built

    def most_in_flight(self) -> int:
        """Count the steps that were in flight together in the last engine."""
        return max((getattr(each.stats, "most_in_flight", 0) for each in self._built), default=0)


class Memory(threading.Thread):
    """Samples the resident memory of this process four times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mib: list[float] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.25):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.mib.append(pages * PAGE_BYTES / 2**20)

    def growth(self) -> float:
        """Compute the growth from a tenth of the time on, in MiB."""
        self.is_over.set()
        self.join()
        late = self.mib[len(self.mib) // 10 :]
        return late[-1] - late[0] if late else 0.0


def main() -> int:
    """Run all connectors; returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--engine", default="reference")
    parser.add_argument("--seed", type=int, action="append", help="repeatable; default 0 and 9")
    parser.add_argument("--connector", action="append", help="a target; repeatable")
    parser.add_argument("--mib", type=float, default=50.0)
    parser.add_argument("--in-flight", type=int, metavar="N", help="steps in flight, in every run")
    given = parser.parse_args()
    seeds = given.seed or [0, 9]  # an arbitrary seed, and one with a steady load (CONN-10)
    engines: EngineFactory = load_engines(given.engine)
    is_wrong = False
    overlapping = Overlapping(engines, given.in_flight) if given.in_flight else None
    print(f"{'connector':<24}{'seed':>5}{'steps':>10}{'red':>5}{'MiB more':>10}{'steps/s':>9}")
    for target in given.connector or CONNECTORS:
        connector = load_connector(target)
        for seed in seeds:
            memory, start = Memory(), time.perf_counter()
            memory.start()
            report = check_connector(
                connector,
                seeds=1,
                first_seed=seed,
                steps=given.steps // len(seeds),
                engines=overlapping or engines,
                max_shrink_runs=0,
            )
            growth, steps = memory.growth(), report.coverage.get("steps", 0)
            is_wrong |= bool(report.failures) or growth > given.mib
            print(
                f"{connector.__name__:<24}{seed:>5}{steps:>10,}{len(report.failures):>5}"
                f"{growth:>10.1f}{steps / (time.perf_counter() - start):>9,.0f}",
                flush=True,
            )
            if overlapping and (most := overlapping.most_in_flight()) != given.in_flight:
                is_wrong = True
                print(f"  {most} steps in flight at most, not {given.in_flight}")
            for failure in report.failures:
                print(f"  {failure.law}: {failure.message}")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
