"""The fold of events, and the join of block sizes from GPU events."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvview import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockSizeIndex,
    BlockStored,
    EventOrderError,
    OffloadingEvent,
    OffloadKey,
    fold_events,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from kvview.events import FoldedEvents

A, B, C = (make_offload_key(name, 0) for name in (b"a", b"b", b"c"))


def stored(*keys: OffloadKey, medium: str = MEDIUM_CPU) -> OffloadingEvent:
    return OffloadingEvent(keys, medium, removed=False)


def removed(*keys: OffloadKey, medium: str = MEDIUM_CPU) -> OffloadingEvent:
    return OffloadingEvent(keys, medium, removed=True)


# --- fold_events ---


def test_event_1_a_removal_needs_a_store_before_it() -> None:
    with pytest.raises(EventOrderError, match=f"EVENT-1: event 1 removes key {B.hex()} .*'CPU'"):
        fold_events([stored(A), removed(B)])
    with pytest.raises(ValueError, match="EVENT-1"):
        fold_events([stored(A), removed(A, A)])


def test_event_2_the_fold_is_the_set_of_loadable_keys() -> None:
    events = [stored(A, B), stored(A, medium="DISK"), removed(A), stored(A), removed(B, A)]
    assert fold_events(iter(events)) == {MEDIUM_CPU: set(), "DISK": {A}}
    fold: FoldedEvents[OffloadKey] = FoldedEvents()
    changes = [
        fold.change(MEDIUM_CPU, A, removed=is_removal) for is_removal in (False, False, True, True)
    ]
    assert changes == [True, False, True, False]
    for is_removal in (False, False, True):  # two blocks of the GPU have one key
        assert fold.change(MEDIUM_GPU, A, removed=is_removal)
    assert fold.advertised() == {A}
    assert fold.clear_gpu() == {A: 1}
    assert not fold.is_held(A)


# --- BlockSizeIndex ---


def index_of(*events: BlockStored | BlockRemoved | AllBlocksCleared | OffloadingEvent,
             index: BlockSizeIndex | None = None) -> BlockSizeIndex:  # fmt: skip
    index = index or BlockSizeIndex()
    for event in events:
        if isinstance(event, OffloadingEvent):
            index.apply_batch([event])
        else:
            index.apply_batch([event])
    return index


def gpu_stored(*names: bytes, size: int = 16, group: int = 0) -> BlockStored:
    return BlockStored(names, None, size, group)


def gpu_removed(*names: bytes, group: int = 0) -> BlockRemoved:
    return BlockRemoved(names, group)


def test_a_size_of_a_store_that_ends_after_a_reset_of_the_gpu() -> None:
    names = [number.to_bytes(8, "big") for number in range(5000)]
    index = index_of(gpu_stored(*names), AllBlocksCleared())
    oldest = make_offload_key(names[0], 0)
    assert index_of(stored(oldest), index=index).block_size(oldest) == 16


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_batch_may_be_in_any_order(data: st.DataObject) -> None:
    names = [number.to_bytes(8, "big") for number in range(data.draw(st.sampled_from([3, 2000])))]
    keys = [make_offload_key(name, 0) for name in names]
    gpu = [event for name in names for event in (gpu_stored(name), gpu_removed(name))]
    tier = [stored(*keys), removed(*keys[1:]), stored(keys[-1])]
    batch: list[BlockStored | BlockRemoved | OffloadingEvent] = list(gpu)
    places = data.draw(st.lists(st.integers(0, len(gpu)), min_size=3, max_size=3))
    for place, offloaded in zip(sorted(places, reverse=True), reversed(tier), strict=True):
        batch.insert(place, offloaded)
    index = BlockSizeIndex()
    index.apply_batch(batch)
    held = {keys[0], keys[-1]}
    assert [index.block_size(key) for key in keys] == [16 if k in held else None for k in keys]


def churn(index: BlockSizeIndex, numbers: Iterable[int]) -> None:
    for number in numbers:
        name = number.to_bytes(8, "big")
        key = make_offload_key(name, 0)
        index_of(gpu_stored(name), stored(key), gpu_removed(name), removed(key), index=index)


def test_memory_is_in_proportion_to_the_cached_keys() -> None:
    index = index_of(gpu_stored(b"a"), stored(A))
    churn(index, range(2000))
    size = len(pickle.dumps(index))
    churn(index, range(2000, 6000))
    assert len(pickle.dumps(index)) == size
    assert index.block_size(A) == 16


MOVES = st.tuples(st.sampled_from([A, B]), st.integers(0, 1), st.sampled_from("gGoOdDx"))


@given(st.lists(MOVES, max_size=40))
def test_a_size_is_known_while_its_key_is_held(
    moves: list[tuple[OffloadKey, int, str]],
) -> None:
    """g/G: the GPU stores and removes; o/O, d/D: CPU and disk; x: the GPU is cleared."""
    index = BlockSizeIndex()
    fold: FoldedEvents[OffloadKey] = FoldedEvents()
    seen: set[OffloadKey] = set()
    for named, group, move in moves:
        name = get_offload_block_hash(named)
        key = make_offload_key(name, group)
        is_removal = move.isupper()
        if move == "x":
            index.apply_batch([AllBlocksCleared()])
            fold.clear_gpu()
        elif move in "gG":
            if fold.change(MEDIUM_GPU, key, removed=is_removal):
                event = (
                    BlockRemoved([name], group)
                    if is_removal
                    else gpu_stored(name, size=10 + group, group=group)
                )
                index.apply_batch([event])
                seen.add(key)
        else:
            medium = {"o": MEDIUM_CPU, "d": "DISK"}[move.lower()]
            fold.change(medium, key, removed=is_removal)  # a second store changes nothing
            index.apply_batch([OffloadingEvent([key], medium, is_removal)])
        for one in (make_offload_key(n, g) for n in (b"a", b"b") for g in (0, 1)):
            is_known = one in seen and one in fold.advertised()
            expected = 10 + get_offload_group_idx(one) if is_known else None
            assert index.block_size(one) == expected
