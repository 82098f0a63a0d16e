"""Long runs of a connector: steps, broken laws, and whether the memory stays flat.

python benchmarks/soak.py --steps 1000000
python benchmarks/soak.py --steps 100000 --engine vllm

One seed after the other, each run as long as is asked for, so that what grows shows. The
memory is that of this process, from a tenth of a run to its end: before, caches fill.
Exit code 1: a law was broken, or the memory grew by more than --mib.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvview.targets import load_connector
from kvview.testing.connector import check_connector, load_engines

CONNECTORS = (
    "examples/host_cache.py:HostCacheConnector",
    "kvview_reference.connector:LazyOffloadConnector",
)
PAGE_BYTES = 4096


class Memory(threading.Thread):
    """Looks at the resident memory of this process four times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mib: list[float] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.25):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.mib.append(pages * PAGE_BYTES / 2**20)

    def growth(self) -> float:
        """From a tenth of the time on, in MiB."""
        self.is_over.set()
        self.join()
        late = self.mib[len(self.mib) // 10 :]
        return late[-1] - late[0] if late else 0.0


def main() -> int:
    """Run them all; returns whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--engine", default="reference")
    parser.add_argument("--seed", type=int, action="append", help="repeatable; default 0 and 9")
    parser.add_argument("--connector", action="append", help="a target; repeatable")
    parser.add_argument("--mib", type=float, default=50.0)
    given = parser.parse_args()
    seeds = given.seed or [0, 9]  # any, and one of a steady load (CONN-10)
    engines, is_wrong = load_engines(given.engine), False
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
                engines=engines,
                max_shrink_runs=0,
            )
            growth, steps = memory.growth(), report.coverage.get("steps", 0)
            is_wrong |= bool(report.failures) or growth > given.mib
            print(
                f"{connector.__name__:<24}{seed:>5}{steps:>10,}{len(report.failures):>5}"
                f"{growth:>10.1f}{steps / (time.perf_counter() - start):>9,.0f}",
                flush=True,
            )
            for failure in report.failures:
                print(f"  {failure.law}: {failure.message}")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
