"""What benchmarks beside vLLM share: finding it, and taking turns with it."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

RELEASE = "0.33.0"
HOW_TO_GET_IT = (
    f"no vLLM {RELEASE}: ours alone. Its dependencies are in tests/vllm/requirements.txt, "
    f"and `python tests/vllm/sources.py {RELEASE}` prints a folder for --vllm-sources"
)


def add_vllm_to_path(sources: Path | None) -> bool:
    """Make ``import vllm`` work: installed, else from ``sources``, else as fetched before.

    Args:
        sources: A folder that holds the ``vllm`` package, or None.

    Returns:
        Whether there is one. It may still lack what it imports.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    cache = Path(os.environ.get("KVVIEW_CACHE") or Path.home() / ".cache" / "kvview")
    for folder in (None, sources, cache / "vllm-sources" / RELEASE):
        if folder:
            sys.path.insert(0, str(folder))
        if find_spec("vllm") and find_spec("vllm.v1"):
            return True
        if folder:
            sys.path.remove(str(folder))
    return False


def best_times(
    sides: Sequence[Callable[[], object]], *, repeats: int = 1, rounds: int = 9
) -> list[float]:
    """Time the sides in turn.

    CPU time, and the best round of each, so that a busy machine tells little.

    Args:
        sides: What to run.
        repeats: Calls in one round.
        rounds: Turns that each side gets.

    Returns:
        Seconds of one call, a side each.
    """
    best = [float("inf")] * len(sides)
    for _ in range(rounds):
        for number, call in enumerate(sides):
            start = time.process_time()
            for _ in range(repeats):
                call()
            best[number] = min(best[number], time.process_time() - start)
    return [seconds / repeats for seconds in best]


def take_turns(
    sides: Sequence[Callable[[], object]], *, repeats: int = 1, rounds: int = 9
) -> list[list[float]]:
    """CPU seconds of one call, a side each, a round each; one round before does not count."""
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds + 1):
        for side, call in enumerate(sides):
            start = time.process_time()
            for _ in range(repeats):
                call()
            if turn:
                times[side].append((time.process_time() - start) / repeats)
    return times


class Figures:
    """The table of one benchmark: ratios of vLLM's time to ours, with their spread.

    Args:
        title: Above the table.
        unit: Of the times shown.
        per_second: How many of them make a second.
    """

    def __init__(self, title: str, unit: str, per_second: float) -> None:
        self._per_second = per_second
        self._table = Table(title=f"{title}, {unit}; medians of rounds taken in turns")
        for column in ("", "kvview", f"vLLM {RELEASE}", "speedup", "low-high", "target", "", ""):
            self._table.add_column(column, justify="right" if column else "left", no_wrap=True)
        self._values: dict[str, float] = {}

    def ratio(self, name: str, times: list[list[float]], target: float, note: str = "") -> None:
        """One line: ours, then vLLM's, a round each."""
        ours, theirs = (statistics.median(side) for side in times)
        single = [peer / our for our, peer in zip(*times, strict=True)]
        speedup = statistics.median(single)
        self._values[f"{name}_speedup"] = round(speedup, 3)
        self._table.add_row(
            name.replace("_", " "),
            f"{ours * self._per_second:,.3f}",
            f"{theirs * self._per_second:,.3f}",
            f"{speedup:.2f}x",
            f"{min(single):.2f}-{max(single):.2f}",
            f">= {target:g}",
            "met" if speedup >= target else "missed",
            note,
        )

    def limit(self, name: str, value: float, at_most: float) -> None:
        """One line: a figure of ours that has an upper limit."""
        self._values[name] = round(value, 3)
        met = "met" if value <= at_most else "missed"
        self._table.add_row(
            name.replace("_", " "), f"{value:,.2f}", "", "", "", f"<= {at_most:g}", met, ""
        )

    def show(self, json_file: Path | None) -> None:
        """Print the table, and write the figures by name."""
        Console(width=120).print(self._table)
        if json_file:
            json_file.write_text(json.dumps(self._values, indent=2) + "\n")


def vllm_benchmark(
    measure: Callable[[Sequence[int], int, Figures], None],
    figures: Figures,
    sizes: Sequence[int],
    does: str,
) -> click.Command:
    """A command that measures beside vLLM.

    Args:
        measure: Called with the sizes, the number of rounds and the figures to fill.
        figures: Shown afterwards.
        sizes: In blocks, if none are given.
        does: The line of its help.
    """

    @click.command(help=does)
    @click.option("--json", "json_file", type=click.Path(path_type=Path), help="Flat figures.")
    @click.option("--vllm-sources", type=click.Path(path_type=Path), help="Holds vLLM's package.")
    @click.option("--rounds", default=7, show_default=True, help="Turns; the median counts.")
    @click.option("--size", "wanted", type=int, multiple=True, default=sizes, help="Blocks.")
    def main(
        json_file: Path | None, vllm_sources: Path | None, rounds: int, wanted: tuple[int, ...]
    ) -> None:
        if not add_vllm_to_path(vllm_sources):
            print(HOW_TO_GET_IT, file=sys.stderr)
            sys.exit(1)
        measure(wanted, rounds, figures)
        figures.show(json_file)

    return main
