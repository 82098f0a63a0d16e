"""Counts the wrong connectors of a novice that the kit kills.

    python benchmarks/novices.py [--select TEXT] [--seeds 200] [--json FILE] [--processes 2]

The connectors are those of ``tests/mutants/connector``: each is a small right connector with one
mistake, in a file of its own, which is checked like a user's file in a process of its own. A
connector is killed if it breaks a law, raises, ends the process or is refused; it is "not
exercised", and counts as killed, if a required event never happens (exit code 4). The script prints
the share, the survivors by family, and the time of a check. The target is 95 % of at least 100
connectors in 200 seeds, with no check over 120 s. The right connectors must be clean.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.95

sys.path.insert(0, str(ROOT))
from tests.mutants.connector import BASES, load_wrong  # noqa: E402
from tests.mutants.edits import Variant  # noqa: E402

# Seed by seed, up to the first finding.
_CHECK = """
import sys
from kvview.targets import load_connector
from kvview.testing.connector import check_connector
from kvview.testing.connector.coverage import not_exercised
from collections import Counter
connector, coverage = load_connector(sys.argv[1]), Counter()
for seed in range(int(sys.argv[2])):
    report = check_connector(connector, seeds=1, first_seed=seed, max_shrink_runs=0)
    coverage.update(report.coverage)
    if report.failures:
        print(f"@{report.failures[0].law}@{seed}@{report.failures[0].message}")
        break
else:
    missing = not_exercised(coverage)
    print(f"@not exercised@@{missing[0]}" if missing else "@@@")
"""


@dataclass
class Outcome:
    """The finding of the kit for one connector; ``verdict`` is empty when it is green."""

    base: str
    family: str
    what: str
    verdict: str
    seed: str
    message: str
    seconds: float


def check(mistake: Variant, seeds: int, limit: float) -> Outcome:
    """Check one connector in a process of its own."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHECK, mistake.write(), str(seeds)],
            capture_output=True,
            text=True,
            timeout=limit,
            cwd=ROOT,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("@")]
        last = done.stderr.strip().splitlines()[-1:] or [""]
        _, verdict, seed, message = lines[-1].split("@", 3) if lines else ("", "refused", "", *last)
    except subprocess.TimeoutExpired:
        verdict, seed, message = "", "", f"no verdict after {limit:.0f} s"
    seconds = time.perf_counter() - start
    outcome = Outcome(
        mistake.base.name, mistake.family, mistake.what, verdict, seed, message[:160], seconds
    )
    print(f"{verdict or 'ALIVE':<14}{seconds:6.1f} s  {outcome.base}: {mistake.what}", flush=True)
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--select", default="", metavar="TEXT", help="part of base, family or what")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="of one check")
    given = parser.parse_args(argv)
    right = [Variant(base, "right", "", f"{name}, unmodified") for name, base in BASES.items()]
    wanted = [
        mistake
        for mistake in (*right, *load_wrong())
        if given.select in f"{mistake.base.name} {mistake.family} {mistake.what}"
    ]
    with ThreadPoolExecutor(given.processes) as executor:
        outcomes = list(
            executor.map(lambda mistake: check(mistake, given.seeds, given.limit), wanted)
        )
    wrong = [outcome for outcome in outcomes if outcome.family != "right"]
    killed = [outcome for outcome in wrong if outcome.verdict]
    bad = [outcome for outcome in outcomes if outcome.family == "right" and outcome.verdict]
    for outcome in bad:
        print(f"FALSE ALARM {outcome.what}: {outcome.verdict} {outcome.message}")
    for outcome in wrong:
        if not outcome.verdict:
            print(f"alive: {outcome.base}, {outcome.family}: {outcome.what} {outcome.message}")
    print("by:", ", ".join(f"{law} {n}" for law, n in Counter(o.verdict for o in killed).items()))
    full = [outcome.seconds for outcome in outcomes if not outcome.verdict] or [0.0]
    share = len(killed) / max(1, len(wrong))
    print(
        f"{len(killed)} of {len(wrong)} killed in {given.seeds} seeds ({share:.1%}); "
        f"a full check took {median(full):.0f} s, at most {max(full):.0f} s"
    )
    if given.json:
        given.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    return 0 if share >= TARGET and not bad else 1


if __name__ == "__main__":
    sys.exit(main())
