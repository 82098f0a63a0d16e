"""``full_blocks``: the blocks that may be stored, compared with a table of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvview import (
    BlockHash,
    CacheGeometry,
    FullAttention,
    Mamba,
    RequestInfo,
    SlidingWindow,
    full_blocks,
    make_offload_key,
)

NULL = 0
ONE = CacheGeometry.single(4)
MIXED = CacheGeometry(24, 2, (FullAttention(4), SlidingWindow(6, 9), Mamba(12)))


def request(num_computed: int, num_hashes: int, num_tokens: int = 40) -> RequestInfo:
    hashes = [BlockHash(b"hash %d" % number) for number in range(num_hashes)]
    return RequestInfo("r", num_tokens, hashes, num_computed)


def found(geometry: CacheGeometry, info: RequestInfo, *tables: list[int], **more: int) -> list[int]:
    return [block.block_id for block in full_blocks(geometry, info, tables, **more)]


def test_a_block_is_named_as_the_geometry_names_it() -> None:
    (first, *_, last) = full_blocks(MIXED, request(12, 20), ([1, 2, 3], [4, 5], [6]))
    assert first == (0, 0, 1, make_offload_key(b"hash 1", 0))
    assert last == (2, 0, 6, make_offload_key(b"hash 5", 2))
    assert (last.group_idx, last.number, last.block_id) == (2, 0, 6)


@pytest.mark.parametrize(
    ("num_computed", "expected"), [(0, []), (3, []), (4, [1]), (7, [1]), (8, [1, 2]), (11, [1, 2])]
)
def test_a_block_counts_when_its_last_token_is_computed(
    num_computed: int, expected: list[int]
) -> None:
    assert found(ONE, request(num_computed, 10), [1, 2, 3]) == expected


def test_the_table_of_a_step_in_flight_is_longer_than_the_hashes() -> None:
    # 40 tokens known, 44 launched: the eleventh block is full and has no hash.
    info = request(num_computed=44, num_hashes=10)
    assert found(ONE, info, list(range(1, 13))) == list(range(1, 11))


def test_hashes_that_are_late_cut_every_group_where_they_end() -> None:
    tables = ([1, 2, 3, 4, 5, 6], [11, 12, 13, 14], [21, 22])
    assert found(MIXED, request(24, 12), *tables) == [*tables[0], *tables[1], *tables[2]]
    assert found(MIXED, request(24, 11), *tables) == [1, 2, 3, 4, 5, 11, 12, 13, 21]
    assert found(MIXED, request(24, 5), *tables) == [1, 2, 11]
    assert found(MIXED, request(24, 0), *tables) == []


def test_released_blocks_of_a_window_are_skipped() -> None:
    assert found(ONE, request(20, 10), [NULL, NULL, 3, NULL, 5]) == [3, 5]
    assert found(ONE, request(20, 10), [7, 7, 3], null_block_id=7) == [3]


def test_a_request_without_blocks_has_none() -> None:
    assert found(MIXED, request(0, 20), [], [], []) == []
    assert found(ONE, request(12, 10), []) == []


def test_blocks_that_end_before_first_token_are_skipped() -> None:
    table = [1, 2, 3, 4, 5]
    for first_token in range(24):
        ends = [n for n in range(1, 6) if 4 * n > first_token]
        assert found(ONE, request(20, 10), table, first_token=first_token) == ends
    assert found(MIXED, request(12, 20), [1, 2, 3], [4, 5], [6], first_token=8) == [3, 5, 6]


geometries = st.sampled_from(
    [
        ONE,
        MIXED,
        CacheGeometry(8, 4, (FullAttention(8),)),
        CacheGeometry(12, 2, (Mamba(12), FullAttention(2), SlidingWindow(4, 6))),
    ]
)


@given(
    geometry=geometries,
    num_computed=st.integers(0, 60),
    num_hashes=st.integers(0, 30),
    first_token=st.integers(0, 60),
    data=st.data(),
)
def test_every_block_that_is_full_hashed_and_there_and_no_other(
    geometry: CacheGeometry,
    num_computed: int,
    num_hashes: int,
    first_token: int,
    data: st.DataObject,
) -> None:
    tables = [
        data.draw(st.lists(st.sampled_from([NULL, *range(1, 30)]), max_size=30))
        for _ in geometry.groups
    ]
    info = request(num_computed, num_hashes)
    expected = []
    for index, (group, table) in enumerate(zip(geometry.groups, tables, strict=True)):
        for number, block_id in enumerate(table):
            tokens = range(number * group.block_size, (number + 1) * group.block_size)
            is_computed = all(token < num_computed for token in tokens)
            is_hashed = tokens[-1] < num_hashes * geometry.hash_block_size
            if block_id != NULL and is_computed and is_hashed and tokens[-1] >= first_token:
                name = b"hash %d" % (tokens[-1] // geometry.hash_block_size)
                expected.append((index, number, block_id, make_offload_key(name, index)))
    assert list(full_blocks(geometry, info, tuple(tables), first_token=first_token)) == expected
