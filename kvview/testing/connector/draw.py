"""Draws from a seed; the same in every version of Python."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

_T = TypeVar("_T")


class Draw:
    """A stream of draws for one purpose, which does not depend on the draws for others.

    Args:
        seed: Any.
        purpose: Name of the stream.
    """

    def __init__(self, seed: int, purpose: str = "") -> None:
        # Only random() is promised to give the same numbers in every Python.
        self._random = Random(f"{purpose} {seed}").random

    def number(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return low + int(self._random() * (high - low + 1))

    def one_of(self, items: Sequence[_T]) -> _T:
        """One of some items."""
        return items[self.number(0, len(items) - 1)]

    def chance(self, share: float) -> bool:
        """True in a share of the draws."""
        return self._random() < share

    def shuffled(self, items: Sequence[_T]) -> list[_T]:
        """The items in a drawn order."""
        left = list(items)
        return [left.pop(self.number(0, len(left) - 1)) for _ in items]


def dealt(items: Sequence[_T], seed: int) -> _T:
    """The item that is a seed's in turn: consecutive seeds get all of them equally often."""
    return items[seed % len(items)]
