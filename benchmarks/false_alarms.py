"""How often the simulation blames a connector that is right: a row each, and 0 is expected.

python benchmarks/false_alarms.py --seeds 2000 --first-seed 100000 --engine vllm
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.host_cache import HostCacheConnector
from kvview.testing.connector import check_connector, load_engines
from kvview_reference.connector import LazyOffloadConnector, OffloadConnector
from tests.connector.unusual import UNUSUAL

CONNECTORS = [*UNUSUAL, HostCacheConnector, OffloadConnector, LazyOffloadConnector]


def main() -> int:
    """Run them all; returns how many seeds were blamed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first-seed", type=int, default=100_000)
    parser.add_argument("--engine", default="reference")
    parser.add_argument("--connector", action="append", help="only this class; repeatable")
    given = parser.parse_args()
    engines, total = load_engines(given.engine), 0
    print(f"{'connector':<22}{'seeds':>7}{'red':>5}{'loads':>8}{'gaps':>6}  seconds  laws, gaps")
    for connector in CONNECTORS:
        if given.connector and connector.__name__ not in given.connector:
            continue
        report = check_connector(
            connector,
            seeds=given.seeds,
            first_seed=given.first_seed,
            engines=engines,
            max_shrink_runs=0,
        )
        total += len(report.failures)
        laws = dict(Counter(failure.law for failure in report.failures))
        first = f" first in seed {report.failures[0].seed}" if report.failures else ""
        gaps = ", ".join(gap.name for gap in report.not_exercised[:3])
        print(
            f"{connector.__name__:<22}{report.num_seeds:>7}{len(report.failures):>5}"
            f"{report.coverage.get('loads', 0):>8}{len(report.not_exercised):>6}"
            f"{report.seconds:>9.1f}  {laws or ''}{first} {gaps}",
            flush=True,
        )
    return min(total, 1)


if __name__ == "__main__":
    sys.exit(main())
