"""What benchmarks beside vLLM share: finding it, and taking turns with it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

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
