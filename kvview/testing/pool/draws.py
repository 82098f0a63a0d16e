"""Strategies of the blocks, views and wrong ids of a machine.

A strategy is made once, and its values choose among the blocks of the machine's present state,
because a new strategy for each state would cost more than the calls of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from hypothesis import strategies as st

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_PLACE = st.integers(0, 999)
_PLACES = st.lists(_PLACE, min_size=1, max_size=40)
_SEQUENCES = _PLACES | _PLACES.map(tuple)
NUMBER = st.integers(1, 3) | st.integers(1, 24) | st.just(1000)
"""A number of blocks; a machine has fewer than 1000."""


def from_state(
    strategy: st.SearchStrategy[ItemT], choose: Callable[[Any, ItemT], ResultT]
) -> st.SearchStrategy[ResultT]:
    """Draw a value, and choose a value of the machine's state by it."""
    return st.tuples(st.runner(), strategy).map(lambda drawn: choose(*drawn))


def any_one(items: Callable[[Any], Sequence[ItemT]]) -> st.SearchStrategy[ItemT]:
    """Draw an item of the machine."""
    return from_state(_PLACE, lambda machine, place: _at(items(machine), place))


def some(
    items: Callable[[Any], Iterable[ItemT]], *, repeat: bool = False
) -> st.SearchStrategy[Sequence[ItemT]]:
    """Draw items of the machine in a list or tuple; an empty one if the machine has none.

    Args:
        items: The items, which may repeat.
        repeat: Whether an item may be drawn more often than it is among the items.
    """
    return from_state(_SEQUENCES, lambda machine, drawn: choose(items(machine), drawn, repeat))


def some_of_one(
    ats: Callable[[Any], Sequence[int]], items: Callable[[Any, int], Iterable[ItemT]]
) -> st.SearchStrategy[tuple[int, Sequence[ItemT]]]:
    """Draw a number, and some of its items."""

    def choose_both(machine: Any, drawn: tuple[int, Sequence[int]]) -> tuple[int, Sequence[ItemT]]:
        at = _at(ats(machine), drawn[0])
        return at, choose(items(machine, at), drawn[1])

    return from_state(st.tuples(_PLACE, _SEQUENCES), choose_both)


def choose(items: Iterable[ItemT], places: Sequence[int], repeat: bool = False) -> Sequence[ItemT]:
    """Return the items at places, which are counted modulo the number of items."""
    known = list(items)
    if not known:
        return []
    drawn: Iterable[int] = [place % len(known) for place in places]
    chosen = [known[place] for place in (drawn if repeat else dict.fromkeys(drawn))]
    return tuple(chosen) if isinstance(places, tuple) else chosen


def _at(items: Sequence[ItemT], place: int) -> ItemT:
    return items[place % len(items)]


class _Index:
    def __index__(self) -> int:
        return 1


@cache
def wrong_ids() -> Mapping[str, Any]:
    """Return values that do not name a block, by the names that scripts of failures contain."""
    literals = (-1, -2, 10**12, True, 1.0, "1", None, b"1")
    wrong = {repr(literal): literal for literal in literals} | {"an __index__": _Index()}
    try:
        import numpy as np
    except ModuleNotFoundError:  # without numpy, no caller can pass its scalars
        return wrong
    return wrong | {f"np.{kind.__name__}": kind(1) for kind in (np.int64, np.int32, np.uint8)}
