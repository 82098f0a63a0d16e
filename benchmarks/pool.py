"""The block pool beside vLLM's: time per block of its hot calls, and its size.

    python benchmarks/pool.py [--json FILE] [--vllm-sources DIR] [--rounds N]

Both pools hold 10,000 blocks and get the same calls, in turns, in one process. A
connector names blocks by id, so vLLM's calls include looking them up in
``pool.blocks``. ``view`` rows go through a view and its ledger, which vLLM does
not have. ``*_speedup`` is vLLM's time over ours.
"""

from __future__ import annotations

import gc
import json
import statistics
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import click
from peer import (  # type: ignore[import-not-found, unused-ignore]
    HOW_TO_GET_IT,
    RELEASE,
    add_vllm_to_path,
    best_times,
    take_turns,
)
from rich.console import Console
from rich.table import Table

from kvview_reference.pool import BlockPool

NUM_BLOCKS = 10_001
BLOCKS_PER_ROUND = 100_000  # enough for the reference to drop stale entries in each
BATCHES = (4, 64, 1000)
HASHES = [number.to_bytes(32, "big") for number in range(NUM_BLOCKS)]
TARGETS = {
    "alloc_free_4_speedup": 1.0,
    "alloc_free_1000_speedup": 3.0,
    "touch_free_4_speedup": 1.0,
    "touch_free_1000_speedup": 2.0,
    "touch_free_hashed_1000_speedup": 2.0,
    "walk_speedup": 1.0,
    "free_order_speedup": 1.0,
    "build_speedup": 5.0,
    "bytes_per_block": 100.0,
    "gc_objects_1m": 100.0,
}


class Side(Protocol):
    """One of the two pools, as a benchmark drives it."""

    def __init__(self, num_blocks: int) -> None: ...
    def allocate_and_free(self, num_blocks: int) -> None: ...
    def allocate_hash_and_free(self, num_blocks: int) -> None: ...
    def touch_and_free(self, block_ids: list[int]) -> None: ...
    def walk(self) -> Iterator[tuple[int, bytes]]: ...
    def free_order(self) -> list[int]: ...


class OurSide:
    """The reference pool."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.view = self.pool.view()

    def allocate_and_free(self, num_blocks: int) -> None:
        self.pool.free_blocks(self.pool.allocate_blocks(num_blocks))

    def allocate_hash_and_free(self, num_blocks: int) -> None:
        block_ids = self.pool.allocate_blocks(num_blocks)
        self.pool.cache_blocks(block_ids, [HASHES[b] for b in block_ids], block_size=16)
        self.pool.free_blocks(block_ids)

    def touch_and_free(self, block_ids: list[int]) -> None:
        self.pool.touch_blocks(block_ids)
        self.pool.free_blocks(block_ids)

    def view_touch_and_free(self, block_ids: list[int]) -> None:
        self.view.touch_blocks(block_ids)
        self.view.free_blocks(block_ids)

    def walk(self) -> Iterator[tuple[int, bytes]]:
        return self.view.iter_free_block_ids_with_hash()

    def free_order(self) -> list[int]:
        return self.pool.free_block_ids()


class VLLMSide:
    """vLLM's pool, with what a connector writes by hand on top of it."""

    def __init__(self, num_blocks: int) -> None:
        utils: Any = import_module("vllm.v1.core.kv_cache_utils")
        self.make_key = utils.make_block_hash_with_group_id
        self.pool = vllm_pool_class()(num_blocks, True, 16)

    def allocate_and_free(self, num_blocks: int) -> None:
        self.pool.free_blocks(self.pool.get_new_blocks(num_blocks))

    def allocate_hash_and_free(self, num_blocks: int) -> None:
        blocks = self.pool.get_new_blocks(num_blocks)
        for block in blocks:  # the loop of cache_full_blocks
            self.pool._insert_block_hash(self.make_key(HASHES[block.block_id], 0), block, 16)
        self.pool.free_blocks(blocks)

    def touch_and_free(self, block_ids: list[int]) -> None:
        pool = self.pool
        pool.touch([pool.blocks[i] for i in block_ids])
        pool.free_blocks([pool.blocks[i] for i in block_ids])

    def walk(self) -> Iterator[tuple[int, bytes]]:
        queue = self.pool.free_block_queue
        tail = queue.fake_free_list_tail
        block = queue.fake_free_list_head.next_free_block
        while block is not tail:
            if (block_hash := block.block_hash) is not None:
                yield block.block_id, block_hash
            block = block.next_free_block

    def free_order(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]


def vllm_pool_class() -> Any:
    return import_module("vllm.v1.core.block_pool").BlockPool


def exhaust(walk: Callable[[], Iterator[object]]) -> None:
    deque(walk(), maxlen=0)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        name: As in the JSON file.
        values: Ours, then vLLM's if there is one.
        unit: What the values count; times give a ratio.
        spread: The lowest and the highest ratio of single rounds.
    """

    name: str
    values: list[float]
    unit: str = "ns/block"
    spread: str = ""


def measure_calls(sides: list[type[Side]], rounds: int) -> Iterator[Row]:
    def in_turns(name: str, calls: list[Callable[[], object]], num_blocks: int) -> Row:
        repeats = max(1, BLOCKS_PER_ROUND // num_blocks)
        times = take_turns(calls, repeats=repeats, rounds=rounds)
        values = [statistics.median(side) / num_blocks * 1e9 for side in times]
        single = [peer / our for our, *peers in zip(*times, strict=True) for peer in peers]
        return Row(name, values, spread=f"{min(single):.2f}-{max(single):.2f}" if single else "")

    for hashed in (False, True):
        suffix = "_hashed" if hashed else ""
        for batch in BATCHES:
            pools = [side(NUM_BLOCKS) for side in sides]
            if hashed:
                for pool in pools:
                    pool.allocate_hash_and_free(NUM_BLOCKS - 1)
            allocates = [
                partial(pool.allocate_hash_and_free if hashed else pool.allocate_and_free, batch)
                for pool in pools
            ]
            yield in_turns(f"alloc_free{suffix}_{batch}", list(allocates), batch)
            block_ids = list(range(5000, 5000 + batch))
            touches = [partial(pool.touch_and_free, block_ids) for pool in pools]
            yield in_turns(f"touch_free{suffix}_{batch}", list(touches), batch)
            assert isinstance(pools[0], OurSide)
            touches[0] = partial(pools[0].view_touch_and_free, block_ids)
            yield in_turns(f"view_touch_free{suffix}_{batch}", list(touches), batch)
    pools = [side(NUM_BLOCKS) for side in sides]
    for pool in pools:
        pool.allocate_hash_and_free(NUM_BLOCKS - 1)
    assert all(list(pool.walk()) == list(pools[0].walk()) for pool in pools)
    assert all(pool.free_order() == pools[0].free_order() for pool in pools)
    walks = [partial(exhaust, pool.walk) for pool in pools]
    yield in_turns("walk", list(walks), NUM_BLOCKS - 1)
    yield in_turns("free_order", [pool.free_order for pool in pools], NUM_BLOCKS - 1)


def measure_size(builders: list[Callable[[int], object]], rounds: int) -> Iterator[Row]:
    times = best_times([partial(build, 100_000) for build in builders], rounds=min(rounds, 5))
    yield Row("build", [seconds / 100_000 * 1e9 for seconds in times])
    sizes: list[float] = []
    tracked: list[float] = []
    for build in builders:
        gc.collect()
        tracemalloc.start()
        pool = build(100_000)
        sizes.append(tracemalloc.get_traced_memory()[0] / 100_000)
        tracemalloc.stop()
        del pool
        gc.collect()
        before = len(gc.get_objects())
        pool = build(1_000_000)
        tracked.append(float(len(gc.get_objects()) - before))
        del pool
    yield Row("bytes_per_block", sizes, "bytes")
    yield Row("gc_objects_1m", tracked, "objects")


def show(rows: list[Row]) -> dict[str, float]:
    """Print the table.

    Returns:
        Figures by name.
    """
    table = Table("blocks a call", "kvview", f"vLLM {RELEASE}", "speedup", "low-high", "target", "")
    table.title = "nanoseconds a block, where nothing else is said"
    table.columns[0].no_wrap = True
    figures: dict[str, float] = {}
    for row in rows:
        ours, *theirs = row.values
        is_time = row.unit == "ns/block"
        name = f"{row.name}_speedup" if is_time else row.name
        if not is_time:
            figures[name] = ours
        for peer in theirs:
            figures[name if is_time else f"{name}_vllm"] = peer / ours if is_time else peer
        target, figure = TARGETS.get(name), figures.get(name)
        met = ""
        if target is not None and figure is not None:
            met = "met" if (figure >= target) == is_time or figure == target else "missed"
        table.add_row(
            row.name.replace("_", " "),
            f"{ours:,.0f}",
            *([f"{peer:,.0f}" for peer in theirs] or [""]),
            f"{figure:.2f}x" if is_time and figure else "",
            row.spread,
            f"{'>=' if is_time else '<='} {target:g}" if target is not None else "",
            met,
        )
    Console().print(table)
    return figures


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Flat named figures.")
@click.option("--vllm-sources", type=click.Path(path_type=Path), help="Holds vLLM's package.")
@click.option("--rounds", default=9, show_default=True, help="Turns; the median counts.")
def main(json_file: Path | None, vllm_sources: Path | None, rounds: int) -> None:
    """Measure the block pool beside vLLM's."""
    sides: list[type[Side]] = [OurSide]
    builders: list[Callable[[int], object]] = [BlockPool]
    try:
        if not add_vllm_to_path(vllm_sources):
            raise ImportError("no package named vllm")
        pool_class = vllm_pool_class()
    except ImportError as error:
        print(f"{HOW_TO_GET_IT} ({error})")
    else:
        sides.append(VLLMSide)
        builders.append(lambda num_blocks: pool_class(num_blocks, True, 16))
    figures = show([*measure_calls(sides, rounds), *measure_size(builders, rounds)])
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
