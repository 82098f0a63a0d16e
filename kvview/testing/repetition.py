"""The shortening of printed calls, in which repeated groups of calls are omitted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_LONGEST_GROUP = 8
_FEWEST_ROUNDS = 4  # fewer rounds are printed in full
_VALUE = re.compile(r"""b'(?:[^'\\]|\\.)*'|b"(?:[^"\\]|\\.)*"|-?\d+""")
_SEVERAL = re.compile(r"\b(\w+)(, (?:\1\b|and _ more))+")


def cut_repetitions(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines; of a repeated group, only the first and the last round.

    Lines that differ only in their numbers and keys count as equal.

    Args:
        lines: Calls in order.
    """
    shapes = [_SEVERAL.sub(r"\1", _VALUE.sub("_", line)) for line in lines]
    at = 0
    while at < len(lines):
        size, rounds = max(
            ((size, _num_rounds(shapes, at, size)) for size in range(1, _LONGEST_GROUP + 1)),
            key=lambda group: group[0] * group[1] if group[1] >= _FEWEST_ROUNDS else 0,
        )
        if rounds < _FEWEST_ROUNDS:
            yield lines[at]
            at += 1
            continue
        yield from lines[at : at + size]
        subject = "this call" if size == 1 else f"these {size} calls"
        yield f"# ... and {subject} {rounds - 2} more times, with other arguments ..."
        at += rounds * size
        yield from lines[at - size : at]


def _num_rounds(shapes: Sequence[str], at: int, size: int) -> int:
    """Return how many times in a row a group of ``size`` lines occurs, starting at a place."""
    group, number = shapes[at : at + size], 1
    while shapes[at + number * size : at + (number + 1) * size] == group:
        number += 1
    return number
