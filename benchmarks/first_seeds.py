"""Counts the wrong connectors that are red, and finds the seeds to play first.

    python benchmarks/first_seeds.py [--seeds 40] [--write]

Plays the wrong connectors of ``tests/mutants/connector`` in the first seeds, and a connector that
none of them finds in the following seeds, up to 200. The seed that finds the most connectors not
found yet for its CPU time comes first, and so on, until all are found. ``--write`` puts the seeds
into ``kvview/testing/connector/scenario/seed_order.py``. Takes about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import torch

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "kvview" / "testing" / "connector" / "scenario" / "seed_order.py"
MOST = 200

sys.path.insert(0, str(ROOT))
from kvview import Connector  # noqa: E402
from kvview.testing.connector import generate_scenario, load_engines, simulate  # noqa: E402
from kvview.testing.connector.processes import Died, Processes, Task, default_processes  # noqa: E402
from kvview.testing.supervision import watchdog  # noqa: E402
from tests.mutants.connector import load_wrong  # noqa: E402


@dataclass
class Found:
    """What the seeds did to one connector: which of them failed, and their CPU seconds."""

    name: str
    failed: dict[int, bool] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def add(self, seed: int, result: tuple[bool, float] | Died) -> None:
        failed, seconds = (True, 0.0) if isinstance(result, Died) else result
        self.failed[seed] = failed
        if not failed:  # a run that fails ends early
            self.seconds[seed] = seconds


class Play:
    """Plays one of the connectors in a seed; whether it failed, and CPU seconds."""

    def __init__(self, connectors: Sequence[type[Connector]]) -> None:
        self.connectors = connectors
        self.engines = load_engines()

    def run(self, number: int, seed: int) -> tuple[bool, float]:
        start = time.process_time()
        try:
            result = simulate(
                self.connectors[number], generate_scenario(seed), engines=self.engines
            )
            failed = result.failure is not None
        except Exception:  # its constructor
            failed = True
        return failed, time.process_time() - start


def measure(seeds: int) -> list[Found]:
    """Play them all."""
    with watchdog.limit(2.0):
        connectors = [variant.load() for variant in load_wrong()]
        found = [Found(f"{c.__module__}.{c.__name__}") for c in connectors]
        torch.set_num_threads(1)
        with Processes(Play(connectors), default_processes()) as processes:
            runs = [(number, seed) for number in range(len(found)) for seed in range(seeds)]
            results = processes.map(Task(Play.run, one) for one in runs)
            for (number, seed), (_, result) in zip(runs, results, strict=True):
                found[number].add(seed, result)
                if seed == seeds - 1:
                    print(f"{number + 1} of {len(found)}: {found[number].name}", flush=True)
            for number, one in enumerate(found):
                if any(one.failed.values()):
                    continue
                more = [(number, seed) for seed in range(seeds, MOST)]
                results = processes.map(Task(Play.run, run) for run in more)
                for (_, seed), (_, result) in zip(more, results, strict=False):
                    one.add(seed, result)
                    if one.failed[seed]:
                        break
    return found


def first_seeds(found: Sequence[Found]) -> list[int]:
    """The greedy cover: the most connectors that are not found yet, for the time it takes."""
    seeds = {seed for one in found for seed in one.failed}
    seconds: Mapping[int, float] = {
        seed: mean([one.seconds[seed] for one in found if seed in one.seconds] or [0.1])
        for seed in seeds
    }
    left = [one for one in found if any(one.failed.values())]
    order: list[int] = []
    while left:

        def worth(seed: int, left: Sequence[Found] = left) -> tuple[float, int]:
            return sum(one.failed.get(seed, False) for one in left) / seconds[seed], -seed

        best = max(seeds, key=worth)
        rest = [one for one in left if not one.failed.get(best)]
        order.append(best)
        print(f"seed {best}: {len(left) - len(rest)} more are red, {seconds[best]:.2f} s")
        left = rest
    return order


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(argv)
    found = measure(given.seeds)
    order = first_seeds(found)
    green = [one.name for one in found if not any(one.failed.values())]
    print(f"{len(found) - len(green)} of {len(found)} wrong connectors are red; green: {green}")
    print(f"{len(order)} seeds: {order}")
    if given.write:
        line = f"FIRST_SEEDS: tuple[int, ...] = {tuple(order)}"
        text = re.sub(r"^FIRST_SEEDS.*?(?=\n\n)", line, FILE.read_text(), flags=re.M | re.S)
        FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
