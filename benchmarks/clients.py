"""What real clients of the block pool pay for the view: their time over that on the raw pool.

    python benchmarks/clients.py [--json FILE] [--vllm-sources DIR] [--rounds N]

The clients are those of tests/clients: a host cache like vLLM's SimpleCPUOffload, eager
and lazy, and LMCache's lazy-offload manager (where it is installed). Each runs under
the same random engine over raw pool, view, guard and reference, in turns, on a pool
that has been used until its ids are scattered; only the client's CPU time counts, and
all must decide alike. ``*_ratio`` is the median over the rounds of the client's time
over that on the raw pool of vLLM; at most 1.3 is wanted.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from peer import (  # type: ignore[import-not-found, unused-ignore]
    HOW_TO_GET_IT,
    add_vllm_to_path,
)
from rich.console import Console
from rich.table import Table

NUM_BLOCKS = 12_001
NUM_HOST_BLOCKS = 60_001
WARM_UP_STEPS = 120
STEPS_PER_ROUND = 10
TARGET = 1.3
KINDS = ("raw", "view", "guard", "reference")


def make_pool(kind: str) -> tuple[Any, Any]:
    """An engine's pool, and what the client gets of it."""
    serving, runs = import_module("clients.serving"), import_module("clients.runs")
    if kind == "reference":
        pool = serving.ReferenceEnginePool(NUM_BLOCKS)
        return pool, pool.pool.view("client")
    pool = serving.VLLMEnginePool(NUM_BLOCKS)
    if kind == "raw":
        return pool, pool.pool
    view = import_module("kvview_vllm").view(pool.pool, owner="client")
    return pool, runs.guarded(view) if kind == "guard" else view


def simple_offload(stores_per_step: int | None) -> Callable[[str], Any]:
    def make(kind: str) -> Any:
        runs, clients = import_module("clients.runs"), import_module("clients.simple_offload")
        pool, view = make_pool(kind)
        client = clients.RawSimpleOffload if kind == "raw" else clients.SimpleOffload
        options = {"stores_per_step": stores_per_step, "latency": 3}
        serving = runs.serving_over(pool, NUM_BLOCKS, 7, large=True)
        return runs.SimpleOffloadRun(serving, client(view, NUM_HOST_BLOCKS, **options))

    return make


def lmcache(*, in_batches: bool) -> Callable[[str], Any]:
    def make(kind: str) -> Any:
        runs, shim = import_module("clients.runs"), import_module("clients.lmcache_shim")
        pool, view = make_pool(kind)
        if kind != "raw":
            view = shim.ReadPool(view) if in_batches else shim.PoolShim(view)
        manager = shim.make_manager(view, max_drain_per_step=200)
        serving = runs.serving_over(pool, NUM_BLOCKS, 7, large=True)
        return runs.LMCacheRun(serving, manager, import_module("clients.test_lmcache").store)

    return make


CLIENTS: dict[str, Callable[[str], Any]] = {
    "simple_eager": simple_offload(None),
    "simple_lazy": simple_offload(256),
    "lmcache_shim": lmcache(in_batches=False),
    "lmcache_batches": lmcache(in_batches=True),
}


def measure(make: Callable[[str], Any], rounds: int) -> dict[str, tuple[float, float]]:
    """Microseconds of the client a step, and its ratio to the raw pool, by kind."""
    runs = {kind: make(kind) for kind in KINDS}
    for run in runs.values():
        run.steps(WARM_UP_STEPS)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for kind, run in runs.items():
            run.seconds = 0.0
            run.steps(STEPS_PER_ROUND)
            seconds[kind].append(run.seconds)
    gc.unfreeze()
    for kind, run in runs.items():
        if run.decisions != runs["raw"].decisions:
            raise SystemExit(f"the client over {kind} decided otherwise than over the raw pool")
    return {
        kind: (
            statistics.median(seconds[kind]) / STEPS_PER_ROUND * 1e6,
            statistics.median(map(float.__truediv__, seconds[kind], seconds["raw"])),
        )
        for kind in KINDS
    }


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Flat named figures.")
@click.option("--vllm-sources", type=click.Path(path_type=Path), help="Holds vLLM's package.")
@click.option("--rounds", default=25, show_default=True, help="Turns; the median counts.")
def main(json_file: Path | None, vllm_sources: Path | None, rounds: int) -> None:
    """Measure clients of the block pool over the raw pool and over the view."""
    if not add_vllm_to_path(vllm_sources):
        raise SystemExit(HOW_TO_GET_IT)
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    table = Table("client", *(f"{kind} us" for kind in KINDS), *KINDS[1:], "")
    table.columns[0].no_wrap = True
    table.title = f"a step of the client on {NUM_BLOCKS:,} blocks, and its ratio to the raw pool"
    figures: dict[str, float] = {}
    for name, make in CLIENTS.items():
        try:
            found = measure(make, rounds)
        except ImportError as error:
            print(f"{name}: {error}; see tests/vllm/requirements-clients.txt")
            continue
        ratios = [found[kind][1] for kind in KINDS[1:]]
        figures |= {f"{name}_{kind}_ratio": found[kind][1] for kind in KINDS[1:]}
        table.add_row(
            name.replace("_", " "),
            *(f"{found[kind][0]:,.0f}" for kind in KINDS),
            *(f"{ratio:.2f}x" for ratio in ratios),
            "met" if max(ratios) <= TARGET else "missed",
        )
    Console().print(table)
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
