"""How often the simulation blames a connector that is right: a row each, and 0 is expected.

    python benchmarks/false_alarms.py --seeds 2000 --first-seed 100000 --engine vllm --log FILE

Connectors take turns, a few seeds each. With a log, a line of JSON a turn is added to it, and
a later call with the same engine goes on where it ends, so the rows are those of all calls.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.host_cache import HostCacheConnector
from kvview import Connector
from kvview.testing.connector import check_connector, load_engines
from kvview.testing.connector.coverage import not_exercised
from kvview.testing.connector.harness import EngineFactory
from kvview_reference.connector import LazyOffloadConnector, OffloadConnector
from tests.connector.unusual import UNUSUAL

CONNECTORS = [*UNUSUAL, HostCacheConnector, OffloadConnector, LazyOffloadConnector]
SEEDS_PER_TURN = 25


def play(
    connector: type[Connector], engines: EngineFactory, first_seed: int, seeds: int
) -> dict[str, Any]:
    """One turn: a line of the log."""
    start = time.process_time()
    report = check_connector(
        connector,
        seeds=seeds,
        first_seed=first_seed,
        engines=engines,
        keep_going=True,
        max_shrink_runs=0,
        processes=0,  # its turns are in processes, and its clock is that of this one
    )
    return {
        "connector": connector.__name__,
        "engine": engines.name,
        "first_seed": first_seed,
        "next_seed": first_seed + seeds,
        "seeds": report.num_seeds,
        "is_interrupted": report.is_interrupted,
        "red": [[failure.seed, failure.law, failure.message] for failure in report.failures],
        "coverage": dict(report.coverage),
        "seconds": time.process_time() - start,
    }


def print_rows(turns: list[dict[str, Any]]) -> None:
    """A row for each connector: seeds, alarms, CPU seconds, laws and seeds, gaps."""
    print(f"{'connector':<22}{'seeds':>7}{'red':>5}{'loads':>8}{'gaps':>6}  seconds  laws, gaps")
    for name in dict.fromkeys(turn["connector"] for turn in turns):
        own = [turn for turn in turns if turn["connector"] == name]
        red = [alarm for turn in own for alarm in turn["red"]]
        coverage: Counter[str] = Counter()
        for turn in own:
            coverage.update(turn["coverage"])
        gaps = not_exercised(coverage)
        laws = dict(Counter(law for _, law, _ in red))
        first = f" seeds {[seed for seed, _, _ in red][:5]}" if red else ""
        print(
            f"{name:<22}{sum(turn['seeds'] for turn in own):>7}{len(red):>5}"
            f"{coverage['loads']:>8}{len(gaps):>6}{sum(turn['seconds'] for turn in own):>9.1f}  "
            f"{laws or ''}{first} {', '.join(gap.name for gap in gaps[:3])}"
        )


def main() -> int:
    """Run them all; returns 1 when a seed was blamed."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first-seed", type=int, default=100_000)
    parser.add_argument("--engine", default="reference")
    parser.add_argument("--connector", action="append", help="only this class; repeatable")
    parser.add_argument("--log", type=Path, help="goes on with it, if it is there")
    given = parser.parse_args()
    engines = load_engines(given.engine)
    turns: list[dict[str, Any]] = []
    if given.log and given.log.exists():
        logged = [json.loads(line) for line in given.log.read_text().splitlines()]
        turns = [turn for turn in logged if turn["engine"] == engines.name]
    connectors = [c for c in CONNECTORS if c.__name__ in (given.connector or [c.__name__])]
    end = given.first_seed + given.seeds
    following = dict.fromkeys(connectors, given.first_seed)
    for turn in turns:
        for connector in connectors:
            if turn["connector"] == connector.__name__:
                following[connector] = turn["next_seed"]
    try:
        while left := [connector for connector in connectors if following[connector] < end]:
            for connector in left:
                first = following[connector]
                turn = play(connector, engines, first, min(SEEDS_PER_TURN, end - first))
                if turn.pop("is_interrupted"):
                    raise KeyboardInterrupt
                following[connector] = turn["next_seed"]
                turns.append(turn)
                for alarm in turn["red"]:
                    print("FALSE ALARM", turn["connector"], *alarm, flush=True)
                if given.log:
                    with given.log.open("a") as log:
                        log.write(json.dumps(turn) + "\n")
    except KeyboardInterrupt:
        pass
    print_rows(turns)
    return int(any(turn["red"] for turn in turns))


if __name__ == "__main__":
    sys.exit(main())
