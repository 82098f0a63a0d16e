"""Random draws from a seed, which are the same in every version of Python."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

_T = TypeVar("_T")


class Draw:
    """A stream of draws for one purpose, independent of the draws for other purposes.

    Args:
        seed: Any whole number.
        purpose: Name of the stream.
    """

    def __init__(self, seed: int, purpose: str = "") -> None:
        # Only random() gives the same numbers in every version of Python.
        self._random = Random(f"{purpose} {seed}").random

    def number(self, low: int, high: int) -> int:
        """Draw a whole number from ``low`` to ``high``, both included."""
        return low + int(self._random() * (high - low + 1))

    def one_of(self, items: Sequence[_T]) -> _T:
        """Draw one of the items."""
        return items[self.number(0, len(items) - 1)]

    def chance(self, share: float) -> bool:
        """Draw True with this probability."""
        return self._random() < share

    def shuffled(self, items: Sequence[_T]) -> list[_T]:
        """Return the items in a random order."""
        left = list(items)
        return [left.pop(self.number(0, len(left) - 1)) for _ in items]


def in_turn(items: Sequence[_T], seed: int) -> _T:
    """Return the item for a seed, so that consecutive seeds have all items equally often."""
    return items[seed % len(items)]
