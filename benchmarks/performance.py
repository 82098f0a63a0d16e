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

Of a pool of 10,000 blocks, touches and frees by blocks a call, as a run of ids or scattered; two
runs, so that the first row comes twice; the last column is the steady state at 100,000 blocks:

| the free queue | 4 | 64 | 1,000 | 1,000 scattered | hashed 1,000 | hashed, scattered | steady |
|---|---|---|---|---|---|---|---|
| two arrays | 1.35x | 1.59x | 1.72x | 1.51x | 1.83x | 1.90x | 1.86x |
| two lists | 1.55x | 2.07x | 2.16x | 1.74x | 2.36x | 2.11x | 1.47x |
| two arrays, in another run | 1.29x | 1.52x | 1.61x | 1.55x | 1.68x | 1.94x | |
| the same, what is a run is cleared at once | 1.16x | 1.56x | 1.67x | 1.37x | 1.94x | 1.80x | |

The arrays stay: a list is written 30 ns sooner, and each write of it lets an int go that lies
anywhere. A list for the unhashed blocks alone costs no such miss where all are hashed, but in a
fresh pool of 1,000,000 blocks single touches and frees then took 11 and 15 ms, not 2 and 0.3.

Of the loop in which a view checks, counts and looks up blocks, nanoseconds a block of a touch and
a free together, without the engine's part:

| blocks a call | 4 | 64 | 1,000 |
|---|---|---|---|
| the lookups alone, as the direct call makes them | 152 | 59 | 56 |
| one loop (there) | 243 | 205 | 225 |
| a comprehension that checks and looks up, a loop that counts | 314 | 179 | 194 |
| sets of what is held, all passes in C | 609 | 199 | 199 |
| one loop that needs no comparison with 0 | 233 | 195 | 227 |

So the view's 1.25 is met at 4 at best, and what a budget adds (80 ns a block) is no pass in C
either: whether a block is pinned depends on who else holds it.

Of a connector's step, in microseconds, on a machine twice as slow as that of the table above (the
scheduler alone took 7,000 to 7,800), both versions in turns or side by side on one core; medians
of seven or eight runs, and the least of them in brackets:

| design | before | with it |
|---|---|---|
| all that was kept, LazyOffloadConnector | 1,264 (1,068) | 1,199 (1,029) |
| the same, HostCacheConnector | 797 (658) | 748 (657) |
| HostCacheConnector: keys in flight in a set, sizes without a Counter | 752 (592) | 756 (567) |
| HostCacheConnector: one store for all requests that end in a step | 752 (592) | 710 (614) |
| block tables joined every 16 steps: a connector that does nothing | 206 (187) | 192 (180) |
| the same, HostCacheConnector | 647 (600) | 633 (596) |

Kept are: only the requests that fill a block are gone through where they are looked at, no abstract
class is asked around a hook, and a store of one group is not sorted by group (11 us to 1 for 25
blocks). Tables extended where they are, and blocks made by `map`, changed less than the noise.
Called again and again, the adapter needs 8 us for the life of a request and 10 us for a plan, 30 us
a step, where the table has 126: the rest is most likely misses, as each call comes after
milliseconds of the scheduler's own work. What is left to a connector that stores is some fifty
blocks a step, named, looked up, held and given back one by one.

Of the manager, on the conversation trace, beside the ordered dicts that are there (time of those
over time of the design, in lockstep on a busy machine, the last row as the sum of the least of
five runs of each call; victims and hits the same):

| order of a policy | LRU 10,000 | ARC 10,000 | ARC 50,000 |
|---|---|---|---|
| a stamp for each key in a dict, a log of batches with stale entries | 0.70x | 0.65x | 0.63x |
| a set of keys, a list as queue, stale entries counted | 0.84x | 0.87x | 0.84x |
| ordered dicts, what just entered is not moved when touched (there) | 1.0x | 1.0x | 1.1x |

Each probe of a dict by a key of 36 bytes takes 35 to 50 ns there, whatever asks, and ARC needs
about twelve for a block that comes and one that goes: held, two ghost lists, entered, out, a
ghost, forgotten, its page. `isdisjoint` takes 35 ns, `in` in a loop 43, `map` 48, `dict.fromkeys`
58, `move_to_end` 75, so loops that were moved into C cost as much as they saved. Sets
were worse than dicts, whose oldest entries lie side by side. Lists of ints as links need the probe
that finds the int first, and were not built.

Of transfers, shares of one `copy_`: the table stands in
[`host_copy.py`](../reference/kvview_reference/transfer/host_copy.py). A page of 64 KiB in a call of
its own reaches 0.83 to 0.85, one of 1 MiB 0.97, on one thread that nobody disturbs. On the
machine of the table above it is 0.79 and 0.88 to 0.93; a look at the clock after 64 pages and not
16 won 0.02 at most, one clock and not two nothing. Two threads take a quarter less time there, and
a third more CPU time. Where something else wants the core or the interpreter lock, the kernel
copies, with 0.68 and 0.76. Pages of 1 KiB through buffers of 32 to 512 KiB differ by less than the
noise; a fourth of their time is the list of ids.

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
