"""What the view and the guard cost beside the direct call on vLLM's own block pool.

    python benchmarks/guard.py [--json FILE] [--vllm-sources DIR]

One round touches a batch of blocks and frees it again. The direct call looks the
blocks up itself: ``touch([pool.blocks[i] for i in ids])`` and ``free_blocks`` of
the same. Both take turns on one pool; a ratio is the median of those of the rounds,
beside its spread, so that what else the machine does weighs on none. "Busy guard"
has a pin budget and holds one lease with a deadline. The targets: the view takes at
most 1.25 of the direct call's time, either guard over it at most 1.5. The same for the
reference pool, where a guard takes at most 1.5 of the plain view's time.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from peer import (  # type: ignore[import-not-found]
    HOW_TO_GET_IT,
    add_vllm_to_path,
    take_turns,
)
from rich.console import Console
from rich.table import Table

from kvview import GPUBlockPoolView, GuardedView
from kvview_reference.pool import BlockPool
from kvview_vllm import view
from kvview_vllm.releases import engine_version

BATCHES = (4, 64, 1000)
VIEW_TARGET, GUARD_TARGET = 1.25, 1.5
NUM_BLOCKS = 8192
BLOCKS_PER_TURN = 8000

Turn = Callable[[Sequence[int], int], None]
"""Touches and frees the blocks named, so many times."""


def make_pool() -> Any:
    pool_class = import_module("vllm.v1.core.block_pool").BlockPool
    arguments = {}
    if "hash_block_size" in inspect.signature(pool_class).parameters:
        arguments["hash_block_size"] = 16
    return pool_class(NUM_BLOCKS, True, **arguments)


def direct_turn(pool: Any, nested: bool) -> Turn:
    """The direct call; ``touch`` takes a tuple of lists in releases up to 0.13."""

    def flat(block_ids: Sequence[int], repeats: int) -> None:
        for _ in range(repeats):
            pool.touch([pool.blocks[i] for i in block_ids])
            pool.free_blocks([pool.blocks[i] for i in block_ids])

    def in_a_tuple(block_ids: Sequence[int], repeats: int) -> None:
        for _ in range(repeats):
            pool.touch(([pool.blocks[i] for i in block_ids],))
            pool.free_blocks([pool.blocks[i] for i in block_ids])

    return in_a_tuple if nested else flat


def view_turn(pool_view: GPUBlockPoolView) -> Turn:
    """The same through a view."""

    def turn(block_ids: Sequence[int], repeats: int) -> None:
        for _ in range(repeats):
            pool_view.touch_blocks(block_ids)
            pool_view.free_blocks(block_ids)

    return turn


def busy_guard(pool_view: GPUBlockPoolView) -> GuardedView:
    """A guard that has all that costs something: a budget, and a lease that may expire."""
    guard = GuardedView(pool_view, pin_budget=0.5)
    guard.lease([NUM_BLOCKS - 1], ttl=3600.0)
    return guard


def measure(
    table: Table, name: str, rounds: int, turns: Mapping[str, Turn], targets: Mapping[str, float]
) -> dict[str, float]:
    """Time the sides in turn, for every batch; the first is what the others are divided by."""
    ratios = {}
    base, *others = turns
    for batch in BATCHES:
        block_ids = random.Random(batch).sample(range(1, NUM_BLOCKS), batch)
        repeats = max(1, BLOCKS_PER_TURN // batch)
        calls = [partial(turn, block_ids, repeats) for turn in turns.values()]
        times = dict(zip(turns, take_turns(calls, rounds=rounds), strict=True))
        micros = {
            turn: f"{statistics.median(seconds) / repeats * 1e6:.2f}"
            for turn, seconds in times.items()
        }
        table.add_row(name, str(batch), base, micros[base])
        for other in others:
            single = [a / b for a, b in zip(times[other], times[base], strict=True)]
            ratio = statistics.median(single)
            ratios[f"{name}_{other}_over_{base}_{batch}".replace(" ", "_")] = round(ratio, 3)
            table.add_row(
                *("", "", other, micros[other], f"{ratio:.2f}"),
                *(f"{min(single):.2f}-{max(single):.2f}", f"<= {targets[other]}"),
                "met" if ratio <= targets[other] else "missed",
            )
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description="The view and the guard beside the direct call.")
    parser.add_argument("--json", type=Path, help="write the ratios to this file")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--vllm-sources", type=Path, help="folder that holds the vllm package")
    arguments = parser.parse_args()

    table = Table(title=f"touch + free, medians of {arguments.rounds} rounds")
    for column in ("pool", "batch", "side", "us", "ratio", "low-high", "target", ""):
        table.add_column(column, justify="left" if column in ("pool", "side") else "right")
    reference = BlockPool(NUM_BLOCKS)
    guards = {"guard": GUARD_TARGET, "busy guard": GUARD_TARGET}
    turns: dict[str, Turn] = {
        "view": view_turn(reference.view()),
        "guard": view_turn(GuardedView(reference.view())),
        "busy guard": view_turn(busy_guard(BlockPool(NUM_BLOCKS).view())),
    }
    ratios = measure(table, "reference", arguments.rounds, turns, guards)
    has_vllm = add_vllm_to_path(arguments.vllm_sources)
    if has_vllm:
        pool = make_pool()
        pool_view = view(pool)
        turns = {
            "direct": direct_turn(pool, pool_view.release.touch_nested),
            "view": view_turn(pool_view),
            "guard": view_turn(GuardedView(view(pool))),
            "busy guard": view_turn(busy_guard(view(make_pool()))),  # a budget is the pool's
        }
        targets = {"view": VIEW_TARGET} | guards
        ratios |= measure(table, f"vLLM {engine_version()}", arguments.rounds, turns, targets)
    Console().print(table)
    if not has_vllm:
        print(HOW_TO_GET_IT, file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(ratios, indent=2) + "\n")
    return 0 if has_vllm else 1


if __name__ == "__main__":
    sys.exit(main())
