"""The cost of the view and of the guard compared with direct calls on vLLM's block pool.

    python benchmarks/guard.py [--vllm-sources DIR] [--rounds N]

One round touches a batch of blocks and frees it again. The direct call looks the blocks up itself:
``touch([pool.blocks[i] for i in ids])`` and ``free_blocks`` of the same. All sides take turns on
one pool; a ratio is the median of the rounds' ratios. "Busy guard" has a pin budget.
Targets: the view takes at most 1.25 of the direct call's time, a guard over it at most 1.5.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from harness import (  # type: ignore[import-not-found, unused-ignore]
    PEER,
    Table,
    beside_vllm,
    take_turns,
    verdict,
)

from kvview import GPUBlockPoolView, GuardedView
from kvview_vllm import view

BATCHES = (4, 64, 1000)
NUM_BLOCKS = 8192
BLOCKS_PER_TURN = 8000
TARGETS = {"view": 1.25, "guard": 1.5, "busy guard": 1.5}

Turn = Callable[[Sequence[int]], None]
"""Touches the named blocks and frees them."""


def make_pool() -> Any:
    return import_module("vllm.v1.core.block_pool").BlockPool(NUM_BLOCKS, True, 16)


def direct_turn(pool: Any) -> Turn:
    def turn(block_ids: Sequence[int]) -> None:
        pool.touch([pool.blocks[i] for i in block_ids])
        pool.free_blocks([pool.blocks[i] for i in block_ids])

    return turn


def view_turn(pool_view: GPUBlockPoolView) -> Turn:
    def turn(block_ids: Sequence[int]) -> None:
        pool_view.touch_blocks(block_ids)
        pool_view.free_blocks(block_ids)

    return turn


def busy_guard(pool_view: GPUBlockPoolView) -> GuardedView:
    """A guard with a budget, because the budget costs time."""
    return GuardedView(pool_view, pin_budget=0.5)


def compare(table: Table, pool: str, rounds: int, turns: Mapping[str, Turn]) -> None:
    """Time the sides in turn, for every batch, and divide by the first side."""
    base, *others = turns
    for batch in BATCHES:
        block_ids = random.Random(batch).sample(range(1, NUM_BLOCKS), batch)
        calls = [partial(turn, block_ids) for turn in turns.values()]
        sides = take_turns(calls, repeats=BLOCKS_PER_TURN // batch, rounds=rounds)
        times = dict(zip(turns, sides, strict=True))
        table.add(f"{pool}, {batch}: {base}", f"{statistics.median(times[base]) * 1e6:.2f}")
        for side in others:
            ratios = [a / b for a, b in zip(times[side], times[base], strict=True)]
            ratio = statistics.median(ratios)
            table.add(
                f"{pool}, {batch}: {side}",
                f"{statistics.median(times[side]) * 1e6:.2f}",
                f"{ratio:.2f}",
                f"{min(ratios):.2f}-{max(ratios):.2f}",
                verdict(ratio, at_most=TARGETS[side]),
            )


def measure(rounds: int) -> None:
    table = Table("touch and free, blocks a call", "us", "ratio", "low-high", "target")
    pool = make_pool()
    turns = {
        "direct": direct_turn(pool),
        "view": view_turn(view(pool)),
        "guard": view_turn(GuardedView(view(pool))),
        "busy guard": view_turn(busy_guard(view(make_pool()))),  # a budget belongs to a pool
    }
    compare(table, PEER, rounds, turns)
    table.show()


main = beside_vllm(measure, 40)

if __name__ == "__main__":
    main()
