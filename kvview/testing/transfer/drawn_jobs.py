"""Strategies of jobs: the blocks and pages of a store or a load, and the rows of kernels.

A strategy must not depend on the threads of the worker, because Hypothesis repeats its draws. So it
depends on the jobs that were submitted, and not on the jobs that are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from random import Random
from typing import Any, TypeVar

from hypothesis import strategies as st

from kvview.testing.transfer.model import Row, TransferModel

_MOST = (1, 3, 6, 40)  # maximum number of blocks of each group in one job
_LARGE = 1 << 40  # an id that does not fit into 32 bits
_OLD_IDS = (*range(-3, 4), _LARGE, -_LARGE)

_SEEDS = st.integers(0, 999)

ItemT = TypeVar("ItemT")
Draw = Callable[[st.SearchStrategy[Any]], Any]
Jobs = Mapping[int, tuple[Sequence[int], Sequence[int], int]]
"""For each group: the GPU blocks, the pages, and the number of the first block in its request."""


def _order(draw: Draw, items: Sequence[ItemT]) -> list[ItemT]:
    """Draw an order of all items with one draw, because a permutation takes many."""
    return Random(draw(_SEEDS)).sample(items, len(items))


def _groups(draw: Draw, model: TransferModel) -> list[int]:
    groups = st.sampled_from(range(len(model.groups)))
    found: list[int] = draw(st.lists(groups, min_size=1, unique=True))
    return sorted(found)


def _number(draw: Draw, *limits: int) -> int:
    most = min(draw(st.sampled_from(_MOST)), *limits)
    return int(draw(st.integers(1, most) | st.just(most)))


@st.composite
def stores(draw: Draw, model: TransferModel) -> Jobs:
    """Draw blocks and pages for some groups; a GPU block may occur twice."""
    free = _order(draw, range(model.num_chunks))
    parts = {}
    for group in _groups(draw, model):
        index = draw(st.integers(0, 3 * model.k - 1))
        room = len(free) * model.k - index % model.k
        if room <= 0:
            break
        number = _number(draw, model.num_blocks(group), room)
        blocks = _order(draw, range(model.num_blocks(group)))[:number]
        if number > 1 and draw(st.sampled_from((False, False, False, True))):
            blocks = blocks[: number // 2] * 2
        num_chunks = -(-(index % model.k + len(blocks)) // model.k)
        parts[group] = blocks, free[:num_chunks], index
        free = free[num_chunks:]
    return parts


@st.composite
def loads(draw: Draw, model: TransferModel) -> Jobs:
    """Draw stored slots to load into any blocks; a page of the tier may occur twice."""
    parts: dict[int, tuple[Sequence[int], Sequence[int], int]] = {}
    taken: set[Row] = set()
    for group in _groups(draw, model):
        tensors = model.groups[group]
        blocks = range(model.num_blocks(group))
        free = [b for b in blocks if taken.isdisjoint((number, b) for number in tensors)]
        held = sorted(model.loadable(group))
        if not (held and free):
            continue
        chunk, sub = draw(st.sampled_from(held))
        begins = [one for one, at in held if at == 0] or [chunk]
        number = _number(draw, len(free))
        chunks = [chunk, *_order(draw, begins) * number]
        slots = [(one, at) for one in chunks for at in range(model.k)][sub : sub + number]
        number = len([*takewhile(set(held).__contains__, slots)])
        into = _order(draw, free)[:number]
        index = sub + model.k * draw(st.integers(0, 2))
        parts[group] = into, chunks[: -(-(sub + number) // model.k)], index
        taken.update((one, block) for one in tensors for block in into)
    return parts


@st.composite
def jobs(draw: Draw, model: TransferModel) -> tuple[bool, Jobs]:
    """Draw a store, or a load of at least one block; returns whether it is a store."""
    is_load = draw(st.booleans()) and (parts := draw(loads(model)))
    return (False, parts) if is_load else (True, draw(stores(model)))


@st.composite
def jobs_that_name_twice(draw: Draw, model: TransferModel) -> tuple[bool, Jobs]:
    """Draw a job that names a destination of one of its groups twice, perhaps in another group."""
    is_store, parts = draw(jobs(model))
    group, other = draw(st.sampled_from(list(parts))), draw(st.sampled_from(list(parts)))
    blocks, chunks, index = parts[group]
    into = 1 if is_store else 0
    named = list(parts[group][into])
    named[draw(st.integers(0, len(named) - 1))] = draw(st.sampled_from(parts[other][into]))
    return is_store, {
        **parts,
        group: (blocks, named, index) if is_store else (named, chunks, index),
    }


@st.composite
def bursts(draw: Draw, model: TransferModel) -> list[tuple[bool, int, int, int]]:
    """Draw many jobs of one block over a few pages: whether to store, group, block and page."""
    group = draw(st.integers(0, len(model.groups) - 1))
    blocks = _order(draw, range(model.num_blocks(group)))[:2]
    chunks = _order(draw, range(model.num_chunks))[:2]
    one = st.tuples(st.booleans(), st.just(group), st.sampled_from(blocks), st.sampled_from(chunks))
    return list(draw(st.lists(one, min_size=draw(st.sampled_from((2, 8, 30))), max_size=30)))


@st.composite
def kernels(draw: Draw, model: TransferModel) -> dict[int, list[int]]:
    """Draw blocks of some groups, which kernels write."""
    blocks = {}
    for group in _groups(draw, model):
        number = _number(draw, model.num_blocks(group))
        blocks[group] = _order(draw, range(model.num_blocks(group)))[:number]
    return blocks


def new_ids(submitted: Sequence[int]) -> st.SearchStrategy[int | None]:
    """Draw an id that no job in flight has, or None for a new one; ids may be used again."""
    return st.sampled_from([None, *(one for one in _OLD_IDS if one not in submitted)])
