"""The harness of the benchmarks: vLLM, timing in turns, and tables in Markdown."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
"""The folder of the traces of real traffic, if they are available."""

RELEASE = "0.33.0"
PEER = f"vLLM {RELEASE}"
_MISSING = (
    f"{PEER} is missing: its dependencies are in tests/vllm/requirements.txt, and "
    f"`python tests/vllm/sources.py {RELEASE}` prints a folder for --vllm-sources"
)


def add_vllm_to_path(sources: Path | None) -> None:
    """Make ``import vllm`` work: installed, or from ``sources``, or from the cache.

    Raises:
        SystemExit: There is no vLLM.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    cache = Path(os.environ.get("KVVIEW_CACHE") or Path.home() / ".cache" / "kvview")
    for folder in (None, sources, cache / "vllm-sources" / RELEASE):
        if folder:
            sys.path.insert(0, str(folder))
        if find_spec("vllm") and find_spec("vllm.v1"):
            return
        if folder:
            sys.path.remove(str(folder))
    sys.exit(_MISSING)


def take_turns(
    sides: Sequence[Callable[[], object]],
    *,
    repeats: int = 1,
    rounds: int = 9,
    clock: Callable[[], float] = time.process_time,
) -> list[list[float]]:
    """Time the sides in turn.

    Args:
        sides: The calls to compare.
        repeats: Calls in one round.
        rounds: Turns of each side, after one turn that does not count.
        clock: CPU time by default, so that a busy machine has little effect.

    Returns:
        Seconds of one call, for each side and round.
    """
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds + 1):
        for side, call in enumerate(sides):
            start = clock()
            for _ in range(repeats):
                call()
            if turn:
                times[side].append((clock() - start) / repeats)
    return times


class Table:
    """A table in Markdown.

    Args:
        columns: Their headings; all but the first are aligned to the right.
    """

    def __init__(self, *columns: str) -> None:
        self._rows = [list(columns), ["---", *["--:"] * (len(columns) - 1)]]

    def add(self, *cells: object) -> None:
        """Add a row; missing cells are empty."""
        texts = [str(cell).replace("|", "\\|") for cell in cells]
        self._rows.append(texts + [""] * (len(self._rows[0]) - len(texts)))

    def show(self) -> None:
        """Print the table."""
        for row in self._rows:
            print(f"| {' | '.join(row)} |")
        print(flush=True)


class Figures(Table):
    """A table of times next to those of a peer, with their ratios and targets.

    Args:
        unit: Unit of the times.
        per_second: Units in a second.
        peer: Name of the peer.
        columns: Further columns.
    """

    def __init__(self, unit: str, per_second: float, peer: str = PEER, *columns: str) -> None:
        super().__init__(unit, "kvview", peer, "speedup", "low-high", "target", *columns)
        self._per_second = per_second

    def ratio(
        self, name: str, times: Sequence[Sequence[float]], target: float | None, *more: object
    ) -> None:
        """Add kvview's and the peer's times: medians, and the ratios of the rounds."""
        ours, theirs = (statistics.median(side) * self._per_second for side in times)
        ratios = [peer / our for our, peer in zip(*times, strict=True)]
        speedup = statistics.median(ratios)
        self.add(
            name,
            f"{ours:,.3f}",
            f"{theirs:,.3f}",
            f"{speedup:.2f}x",
            f"{min(ratios):.2f}-{max(ratios):.2f}",
            "" if target is None else verdict(speedup, at_least=target),
            *more,
        )

    def limit(self, name: str, value: float, at_most: float, peer: object = "") -> None:
        """Add a figure that has an upper limit."""
        self.add(name, f"{value:,.2f}", peer, "", "", verdict(value, at_most=at_most))


def verdict(value: float, *, at_least: float | None = None, at_most: float | None = None) -> str:
    """Write a target, and whether a value meets it."""
    if at_most is not None:
        return f"<= {at_most:g} {'met' if value <= at_most else 'missed'}"
    assert at_least is not None
    return f">= {at_least:g} {'met' if value >= at_least else 'missed'}"


def beside_vllm(measure: Callable[[int], None], rounds: int) -> click.Command:
    """Make the command of a benchmark that compares kvview with vLLM.

    Args:
        measure: Called with the number of rounds; prints its tables.
        rounds: The default number.
    """

    @click.command(help=sys.modules[measure.__module__].__doc__)
    @click.option("--vllm-sources", type=click.Path(path_type=Path), help="Holds vLLM's package.")
    @click.option("--rounds", default=rounds, show_default=True, help="Turns of each side.")
    def main(vllm_sources: Path | None, rounds: int) -> None:
        add_vllm_to_path(vllm_sources)
        measure(rounds)

    return main
