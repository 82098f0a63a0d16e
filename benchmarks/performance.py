"""Runs the benchmarks that have figures, and writes what they print into docs/performance.md.

    python benchmarks/performance.py [--vllm-sources DIR] [NAME ...]

The page says on what machine, how busy it was, and with which versions; what misses its
target stands there too. With names, only these are run, and the others' tables are kept:
so each may have a quiet moment of its own. What fails is named, and keeps its old table.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
from peer import RELEASE  # type: ignore[import-not-found, unused-ignore]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
BENCHMARKS = {
    "prefix": ("Prefix search", ["--rounds", "5"]),
    "pool_steady": ("The block pool in steady state", ["--rounds", "5"]),
    "pool": ("The block pool, fresh, call by call", ["--rounds", "5"]),
    "guard": ("View and guard beside the direct call", ["--rounds", "40"]),
    "offloading": ("The manager of the CPU tier", []),
    "transfer": ("Transfers beside one plain copy", ["--mib", "64"]),
    "connector_hits": (
        "The planner: entries of the queue that are visited for each block stored",
        [
            *("--connector", "kvview_reference.connector:OffloadConnector"),
            *("--connector", "kvview_reference.connector:LazyOffloadConnector"),
            *("--requests", "2000", "--cpu-blocks", "10000"),
        ],
    ),
    "replay": ("Replay", []),
    "step_cost": ("What a connector costs a step", ["--runs", "3", "--steps", "100"]),
}
WITHOUT_VLLM = ("transfer", "connector_hits", "replay", "step_cost")
INTRODUCTION = f"""\
# Performance

<!-- Written by benchmarks/performance.py. -->

Figures beside vLLM {RELEASE}'s own classes, taken in turns in one process; "speedup" is vLLM's
time over ours. Ratios say more than times: a busy machine makes both sides slow. Each heading
names the script that measured, when, and where. `python benchmarks/performance.py` writes this
page again.
"""
TRIED = """\
## What was tried where a target is missed

Of the pool in steady state, beside vLLM's in one run, 100,000 and 1,000,000 blocks, on a busy
machine and with a timer around each call, which makes touches look dearer than above; the last
column is a pool of 10,000 fresh blocks and calls of 1,000 contiguous ones:

| state of a block | alloc, hash, free | touch, free | touch, free, fresh |
|---|---|---|---|
| one list: position, or references and a hash bit | 2.1x, 1.7x | 1.7x, 1.4x | 1.3x to 1.6x |
| the same in an array of ints | 1.9x, 1.6x | 2.1x, 2.0x | 0.9x to 1.2x |
| references in a list, positions in an array (prototype) | 2.0x, 1.8x | 1.8x, 1.65x | |
| references in a list, positions and hashes apart (until now) | 1.3x, 1.2x | 1.1x, 1.0x | 1.5x |

The first is what is there: a list is read 20 ns sooner than an array, and costs an int object a
block, whose miss a touch of scattered ids pays. The array meets the target of that one line and
makes fresh pools and small calls slower than vLLM's. Keys
gathered by `itemgetter`, deleted by `map` or looked up in advance change 3 % at most: at a million
blocks the rest is misses in the dict of keys, which both sides have.

Of the replay of the conversation trace. Its time is not in steps in which nothing happens: of the
first 3,000 requests' 3,926 steps 3,890 compute prompts, 20 blocks a step, beside 8 requests that
decode. What was measured of its CPU time, or of the blocks a CPU second:

| design | what it wins |
|---|---|
| a leap of the clock over steps that only decode | at most 0.2 % (36 steps) |
| records only of requests that fill a block | at most 5 %: what building all of them takes |
| cheaper hashes of blocks (Python's own) | nothing to be seen |
| no KV bytes written or compared | 1.2x |
| neither bytes nor transfers | 1.65x |
| none of bytes, transfers and real hashes | 1.7x |
| bytes in numpy, small transfers page by page, room asked for in one sum (done) | 1.1x to 1.4x |

A leap would also leave out hooks of each step, which a connector may count; at `--speed 0.1` it
could win a third. Without all that it proves about bytes the replay would still be under half of
the target on the busy machine of that day: the rest is the books of engine, pool and connector.

Of the visits of `LazyOffloadConnector`: hits (GPU and host together, in per cent) and visits for
each block stored; 1,200 requests of the conversation trace and of the generated workload, 8 at
once; GPU and host blocks in the heading:

| walk | 2,000, 2,000 | 1,000, 3,000 | generated 600, 1,500 | 500, 2,000 | visits |
|---|---|---|---|---|---|
| 4 steps ahead, again at half of that (as it is) | 7.49 | 7.66 | 14.64 | 4.40 | 1.73 to 1.85 |
| again at a third | 6.84 | 7.47 | 14.68 | 4.27 | 1.32 to 1.43 |
| again at a quarter | 7.45 | 7.75 | 14.38 | 4.24 | 1.35 to 1.43 |
| 6 steps ahead, again at 2 | 6.71 | 7.59 | 14.24 | 4.24 | 1.60 to 1.68 |
| 8 steps ahead, again at 2 | 6.82 | 6.90 | 13.91 | 4.09 | 1.39 to 1.49 |
| a walk that goes on, anew every 2 windows | 5.89 | 7.38 | 14.62 | 4.43 | 1.27 to 1.36 |
| the same, every 4 | 5.94 | 7.29 | 14.72 | 4.60 | 1.14 to 1.25 |
| the same, every 16 | 5.11 | 7.22 | 14.59 | 4.58 | 1.06 to 1.16 |

Each that visits less loses hits somewhere, so the walk stays as it is.
`OffloadConnector`, the default, stores what was computed and visits nothing.
"""


def machine() -> str:
    """When and on what a benchmark ran."""
    versions = [f"Python {platform.python_version()}", f"vLLM {RELEASE}"]
    for package in ("numpy", "torch"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    busy = f"load {os.getloadavg()[0]:.1f} before" if hasattr(os, "getloadavg") else ""
    parts = [
        f"{datetime.now(UTC):%Y-%m-%d}",
        f"{os.cpu_count()} cores ({platform.machine()})",
        busy,
        *versions,
    ]
    return ", ".join(part for part in parts if part)


def section(name: str, sources: Path | None) -> str | None:
    """Run one benchmark; None if it failed."""
    title, options = BENCHMARKS[name]
    if sources and name not in WITHOUT_VLLM:
        options = [*options, "--vllm-sources", str(sources)]
    path = [os.environ.get("PYTHONPATH", ""), *([str(sources)] if sources else [])]
    where = machine()
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "120", "PYTHONPATH": os.pathsep.join(path)},
        check=False,
    )
    if run.returncode:
        print(f"benchmarks/{name}.py: exit code {run.returncode}", file=sys.stderr)
        return None
    printed = [line.rstrip() for line in run.stdout.strip("\n").splitlines()]
    lines = "\n".join(line for line in printed if not line.startswith('{"'))  # JSON is no table
    return f"## {title}\n\n`benchmarks/{name}.py`; {where}.\n\n```text\n{lines}\n```\n"


def sections_of(page: str) -> dict[str, str]:
    """The sections of the page as it is, by benchmark."""
    found = {}
    for part in page.split("\n## ")[1:]:
        for name in BENCHMARKS:
            if f"`benchmarks/{name}.py`" in part:
                found[name] = f"## {part.rstrip()}\n"
    return found


@click.command()
@click.option("--vllm-sources", type=click.Path(path_type=Path), help="Holds vLLM's package.")
@click.argument("names", nargs=-1, type=click.Choice(list(BENCHMARKS)))
def main(vllm_sources: Path | None, names: tuple[str, ...]) -> None:
    """Write docs/performance.md."""
    sections = sections_of(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    failed = False
    for name in names or BENCHMARKS:
        written = section(name, vllm_sources)
        if written is None:
            failed = True
            continue
        sections[name] = written
        parts = [sections[known] for known in BENCHMARKS if known in sections]
        PAGE.write_text("\n".join([INTRODUCTION, *parts, TRIED]), encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
