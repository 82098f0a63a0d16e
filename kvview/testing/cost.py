"""The cost of a call without a clock: the number of Python lines run and of bytes allocated."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

_FEW_LINES = 100
_FEW_BYTES = 8192


@dataclass(frozen=True)
class Cost:
    """Lines run and bytes allocated at most."""

    lines: int
    num_bytes: int

    def times(self, factor: int) -> Cost:
        """So many times this, and a little."""
        return Cost(self.lines * factor + _FEW_LINES, self.num_bytes * factor + _FEW_BYTES)

    def __str__(self) -> str:
        return f"{self.lines} lines, {self.num_bytes} bytes"

    __repr__ = __str__


def cost_of_first(start: Callable[[], Iterator[Any]], num_items: int) -> Cost:
    """Measure the cost of the first items of an iterator, including its start."""
    return cost_of(lambda: list(islice(start(), num_items)))


def cost_of(call: Callable[[], object]) -> Cost:
    """Measure the cost of a call: a loop shows in the lines, a copy by C code in the bytes."""
    lines = 0

    def count_lines(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count_lines

    traced, was_tracing = sys.gettrace(), tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    sys.settrace(count_lines)
    try:
        result = call()
    finally:
        sys.settrace(traced)
        peak = tracemalloc.get_traced_memory()[1]
        if not was_tracing:
            tracemalloc.stop()
    del result
    return Cost(lines, peak - before)
