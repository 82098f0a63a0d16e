"""The cost of a call, measured in Python lines that run and in bytes, without a clock."""

from __future__ import annotations

import gc
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
    """The number of lines that a call runs, and the number of bytes that it allocates."""

    lines: int
    num_bytes: int

    def times(self, factor: int) -> Cost:
        """Return this cost multiplied by a factor, plus a small constant as tolerance."""
        return Cost(self.lines * factor + _FEW_LINES, self.num_bytes * factor + _FEW_BYTES)

    def __str__(self) -> str:
        return f"{self.lines} lines, {self.num_bytes} bytes"

    __repr__ = __str__


def cost_of_first(start: Callable[[], Iterator[Any]], num_items: int) -> Cost:
    """Measure the cost of the call that makes an iterator, and of its first items."""
    return cost_of(lambda: list(islice(start(), num_items)))


def cost_of(call: Callable[[], object]) -> Cost:
    """Measure a call, because its lines show a loop, and its bytes show a copy by C code."""
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


def growth_of(work: Callable[[], object], warm_up: Callable[[], object]) -> int:
    """Measure the bytes that some work leaves allocated, after a warm-up."""
    tracemalloc.start()
    try:
        warm_up()
        gc.collect()
        start = tracemalloc.get_traced_memory()[0]
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
