"""What the view costs beside the direct call on vLLM's own block pool.

    PYTHONPATH=$(python tests/vllm/sources.py 0.33.0) python benchmarks/view.py [--json FILE]

One round touches a batch of blocks and frees it again. The direct call looks the
blocks up itself: ``touch([pool.blocks[i] for i in ids])`` and ``free_blocks`` of
the same. Both take turns on one pool, and the best of the rounds counts, so that
what else the machine does weighs on neither. A ratio is the view's time over the
direct call's; the target is 1.3 at most.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvview_vllm import view
from kvview_vllm.capabilities import engine_version

BATCHES = (4, 64, 1000)
TARGET = 1.3
NUM_BLOCKS = 8192
BLOCKS_PER_TURN = 8000


def make_pool() -> Any:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    pool_class = import_module("vllm.v1.core.block_pool").BlockPool
    arguments = {}
    if "hash_block_size" in inspect.signature(pool_class).parameters:
        arguments["hash_block_size"] = 16
    return pool_class(NUM_BLOCKS, True, **arguments)


def direct_turn(pool: Any, block_ids: Sequence[int], repeats: int, nested: bool) -> None:
    if nested:
        for _ in range(repeats):
            pool.touch(([pool.blocks[i] for i in block_ids],))
            pool.free_blocks([pool.blocks[i] for i in block_ids])
    else:
        for _ in range(repeats):
            pool.touch([pool.blocks[i] for i in block_ids])
            pool.free_blocks([pool.blocks[i] for i in block_ids])


def view_turn(pool_view: Any, block_ids: Sequence[int], repeats: int) -> None:
    for _ in range(repeats):
        pool_view.touch_blocks(block_ids)
        pool_view.free_blocks(block_ids)


def best_of(rounds: int, *turns: Callable[[], None]) -> list[float]:
    """The shortest time of each, in seconds; they take turns."""
    best = [float("inf")] * len(turns)
    for _ in range(rounds):
        for position, turn in enumerate(turns):
            start = time.perf_counter()
            turn()
            best[position] = min(best[position], time.perf_counter() - start)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description="The view beside the direct call.")
    parser.add_argument("--json", type=Path, help="write the ratios to this file")
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()

    pool = make_pool()
    pool_view = view(pool)
    nested = "touch_nested" in pool_view.capabilities
    table = Table(title=f"touch + free, vLLM {engine_version()}, best of {arguments.rounds}")
    for column in ("batch", "direct, us", "view, us", "ratio", "target"):
        table.add_column(column, justify="right")
    ratios = {}
    for batch in BATCHES:
        block_ids = random.Random(batch).sample(range(1, NUM_BLOCKS), batch)
        repeats = max(1, BLOCKS_PER_TURN // batch)
        direct_s, view_s = best_of(
            arguments.rounds,
            lambda ids=block_ids, n=repeats: direct_turn(pool, ids, n, nested),  # type: ignore[misc]
            lambda ids=block_ids, n=repeats: view_turn(pool_view, ids, n),  # type: ignore[misc]
        )
        ratios[f"view_cost_{batch}"] = round(view_s / direct_s, 3)
        table.add_row(
            str(batch),
            f"{direct_s / repeats * 1e6:.2f}",
            f"{view_s / repeats * 1e6:.2f}",
            f"{view_s / direct_s:.2f}",
            f"{TARGET}",
        )
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(ratios, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
