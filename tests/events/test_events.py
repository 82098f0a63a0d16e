"""The event laws, the join with GPU events, and the packing of an offload key."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

import pytest
from hypothesis import given
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
    ReqContext,
    fold_events,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from kvview_reference.offloading import CPUOffloadingManager

A, B, C = (make_offload_key(name, 0) for name in (b"a", b"b", b"c"))
CTX = ReqContext()


def stored(*keys: OffloadKey, medium: str = MEDIUM_CPU) -> OffloadingEvent:
    return OffloadingEvent(keys, medium, removed=False)


def removed(*keys: OffloadKey, medium: str = MEDIUM_CPU) -> OffloadingEvent:
    return OffloadingEvent(keys, medium, removed=True)


# --- offload keys ---


@given(st.binary(min_size=1, max_size=40), st.integers(0, 2**16 - 1))
def test_key_roundtrip(block_hash: bytes, group_idx: int) -> None:
    key = make_offload_key(block_hash, group_idx)
    assert get_offload_block_hash(key) == block_hash
    assert get_offload_group_idx(key) == group_idx


def test_pool8_key_is_the_hash_and_four_big_endian_bytes() -> None:
    assert make_offload_key(b"hash", 258) == b"hash\x00\x00\x01\x02"


@given(*[st.tuples(st.binary(min_size=1, max_size=6), st.integers(0, 2**16 - 1))] * 2)
def test_keys_are_equal_only_for_equal_parts(
    one: tuple[bytes, int], other: tuple[bytes, int]
) -> None:
    assert (make_offload_key(*one) == make_offload_key(*other)) == (one == other)


@pytest.mark.parametrize("group_idx", [-1, 2**16])
def test_key_refuses_a_group_that_does_not_fit(group_idx: int) -> None:
    with pytest.raises(ValueError, match=f"KEY-3: .* got {group_idx} and"):
        make_offload_key(b"hash", group_idx)


# --- fold_events ---


def test_event1_a_removal_needs_a_store_before_it() -> None:
    with pytest.raises(EventOrderError, match=f"EVENT-1: event 1 removes key {B.hex()} .*'CPU'"):
        fold_events([stored(A), removed(B)])
    with pytest.raises(EventOrderError, match="event 2"):
        fold_events([stored(A), removed(A), removed(A)])
    with pytest.raises(EventOrderError, match="'DISK'"):
        fold_events([stored(A), removed(A, medium="DISK")])
    with pytest.raises(ValueError, match="EVENT-1"):
        fold_events([stored(A), removed(A, A)])


def test_event3_media_are_folded_apart_and_stay_once_seen() -> None:
    events = [stored(A, B), stored(A, medium="DISK"), removed(A), removed(B)]
    assert fold_events(events) == {MEDIUM_CPU: set(), "DISK": {A}}
    assert fold_events([]) == {}


def test_a_key_may_come_back_and_a_second_store_changes_nothing() -> None:
    assert fold_events([stored(A), removed(A), stored(A), stored(A)]) == {MEDIUM_CPU: {A}}


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.sampled_from("XY"), st.booleans())))
def test_event2_fold_is_a_replay_of_sets(moves: list[tuple[OffloadKey, str, bool]]) -> None:
    model: set[tuple[str, OffloadKey]] = set()
    events: list[OffloadingEvent] = []
    for key, medium, is_removal in moves:
        if is_removal and (medium, key) not in model:
            with pytest.raises(EventOrderError):
                fold_events([*events, removed(key, medium=medium)])
            continue
        events.append(OffloadingEvent([key], medium, is_removal))
        (model.remove if is_removal else model.add)((medium, key))
    folded = fold_events(iter(events))
    assert {(medium, key) for medium, keys in folded.items() for key in keys} == model


# --- the same laws, kept by the reference's tier ---


def keys(*names: str) -> list[OffloadKey]:
    return [make_offload_key(name.encode(), 0) for name in names]


def store(manager: CPUOffloadingManager, *names: str, success: bool = True) -> None:
    output = manager.prepare_store(keys(*names), CTX)
    assert output is not None
    manager.complete_store(output.keys_to_store, CTX, success=success)


def test_event2_event4_event5_of_the_cpu_tier() -> None:
    manager = CPUOffloadingManager(2, enable_events=True)
    store(manager, "a", "b")
    store(manager, "c")  # evicts
    store(manager, "d", success=False)  # evicts too, and leaves nothing
    events = list(manager.take_events())
    assert fold_events(events) == {MEDIUM_CPU: set(keys("c"))}
    assert not any(keys("d")[0] in event.keys for event in events)
    manager.reset()
    events += manager.take_events()
    assert fold_events(events) == {MEDIUM_CPU: set()}
    assert list(manager.take_events()) == []


# --- BlockSizeIndex ---


def index_of(*events: BlockStored | BlockRemoved | AllBlocksCleared | OffloadingEvent,
             index: BlockSizeIndex | None = None) -> BlockSizeIndex:  # fmt: skip
    index = index or BlockSizeIndex()
    for event in events:
        if isinstance(event, OffloadingEvent):
            index.apply_offloading_event(event)
        else:
            index.apply_gpu_event(event)
    return index


def gpu_stored(*names: bytes, size: int = 16, group: int = 0) -> BlockStored:
    return BlockStored(names, None, size, group)


def gpu_removed(*names: bytes, group: int = 0) -> BlockRemoved:
    return BlockRemoved(names, group)


def test_index_joins_the_size_from_gpu_events() -> None:
    index = index_of(gpu_stored(b"a"), gpu_stored(b"a", b"b", size=64, group=3))
    assert index.block_size(A) == 16
    assert index.block_size(make_offload_key(b"a", 3)) == 64
    assert index.block_size(make_offload_key(b"b", 3)) == 64
    assert index.block_size(B) is None


def test_one_offloading_event_may_name_blocks_of_different_sizes() -> None:
    other = make_offload_key(b"a", 1)
    index = index_of(gpu_stored(b"a"), gpu_stored(b"a", size=32, group=1), stored(A, other))
    index_of(gpu_removed(b"a"), gpu_removed(b"a", group=1), index=index)
    assert [index.block_size(key) for key in (A, other)] == [16, 32]


def test_index1_the_size_outlives_the_gpu_block() -> None:
    index = index_of(gpu_stored(b"a"), stored(A), gpu_removed(b"a"))
    assert index.block_size(A) == 16
    assert index_of(removed(A), index=index).block_size(A) is None


def test_index1_the_size_outlives_the_offloaded_block() -> None:
    index = index_of(gpu_stored(b"a"), stored(A), removed(A))
    assert index.block_size(A) == 16
    assert index_of(gpu_removed(b"a"), index=index).block_size(A) is None


def test_index1_in_the_order_in_which_vllm_publishes() -> None:
    """Offloaded and evicted from the GPU between two polls: GPU events first (vLLM #57159)."""
    batch = gpu_stored(b"a"), gpu_removed(b"a")
    index = index_of(*batch)
    assert index.block_size(A) is None
    assert index_of(stored(A), index=index).block_size(A) == 16
    assert index_of(stored(A), *batch).block_size(A) == 16


def test_index1_a_store_that_ends_after_the_gpu_was_reset() -> None:
    names = [number.to_bytes(8, "big") for number in range(5000)]
    index = index_of(gpu_stored(*names), AllBlocksCleared())
    oldest = make_offload_key(names[0], 0)
    assert index_of(stored(oldest), index=index).block_size(oldest) == 16


@given(st.data())
def test_index1_a_batch_in_any_order(data: st.DataObject) -> None:
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


def test_index1_two_gpu_blocks_of_one_hash_count_twice() -> None:
    index = index_of(gpu_stored(b"a"), gpu_stored(b"a"), gpu_removed(b"a"))
    assert index.block_size(A) == 16
    assert index_of(gpu_removed(b"a"), index=index).block_size(A) is None


def test_index1_two_media_count_twice() -> None:
    index = index_of(gpu_stored(b"a"), stored(A), stored(A, medium="DISK"), gpu_removed(b"a"))
    assert index_of(removed(A), index=index).block_size(A) == 16
    assert index_of(removed(A, medium="DISK"), index=index).block_size(A) is None


def test_index2_a_second_store_in_one_medium_is_no_second_holder() -> None:
    index = index_of(gpu_stored(b"a"), stored(A), stored(A), removed(A), gpu_removed(b"a"))
    assert index.block_size(A) is None


def test_index1_a_reset_of_the_gpu_keeps_what_is_offloaded() -> None:
    index = index_of(gpu_stored(b"a", b"b"), stored(A), AllBlocksCleared())
    assert (index.block_size(A), index.block_size(B)) == (16, None)


def test_index_takes_events_of_keys_that_it_never_saw() -> None:
    index = index_of(removed(A), gpu_removed(b"b"), stored(C), AllBlocksCleared())
    assert [index.block_size(key) for key in (A, B, C)] == [None] * 3
    assert index_of(gpu_stored(b"c"), gpu_removed(b"c"), index=index).block_size(C) == 16


def churn(index: BlockSizeIndex, numbers: Iterable[int]) -> None:
    for number in numbers:
        name = number.to_bytes(8, "big")
        key = make_offload_key(name, 0)
        index_of(gpu_stored(name), stored(key), gpu_removed(name), removed(key), index=index)


def test_index2_memory_follows_what_is_cached() -> None:
    index = index_of(gpu_stored(b"a"), stored(A))
    churn(index, range(2000))
    size = len(pickle.dumps(index))
    churn(index, range(2000, 6000))
    assert len(pickle.dumps(index)) == size
    assert index.block_size(A) == 16


@given(
    st.lists(
        st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 1), st.sampled_from("gGoOx")),
        max_size=40,
    )
)
def test_index_against_plain_counts(moves: list[tuple[bytes, int, str]]) -> None:
    """g/G: the GPU stores and removes; o/O: the tier; x: the GPU is reset."""
    index = BlockSizeIndex()
    gpu: list[OffloadKey] = []
    tier: list[OffloadKey] = []
    seen: set[OffloadKey] = set()
    for name, group, move in moves:
        key = make_offload_key(name, group)
        if move == "g":
            index.apply_gpu_event(gpu_stored(name, size=10 + group, group=group))
            gpu.append(key)
            seen.add(key)
        elif move == "G" and key in gpu:
            index.apply_gpu_event(gpu_removed(name, group=group))
            gpu.remove(key)
        elif move == "o" and key not in tier:
            index.apply_offloading_event(stored(key))
            tier.append(key)
        elif move == "O" and key in tier:
            index.apply_offloading_event(removed(key))
            tier.remove(key)
        elif move == "x":
            index.apply_gpu_event(AllBlocksCleared())
            gpu.clear()
        known = seen & {*gpu, *tier}
        for one in (make_offload_key(n, g) for n in (b"a", b"b") for g in (0, 1)):
            expected = 10 + get_offload_group_idx(one) if one in known else None
            assert index.block_size(one) == expected


def test_gpu_events_lie_on_the_gpu() -> None:
    events = gpu_stored(b"a"), gpu_removed(b"a"), AllBlocksCleared()
    assert {event.medium for event in events} == {MEDIUM_GPU}
