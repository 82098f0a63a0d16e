"""``full_blocks``: the blocks that may be stored, compared with a table of tokens."""

from __future__ import annotations

from hypothesis import given, strategies as st

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

geometries = st.sampled_from(
    [
        CacheGeometry.single(4),
        CacheGeometry(24, 2, (FullAttention(4), SlidingWindow(6, 9), Mamba(12))),
        CacheGeometry(8, 4, (FullAttention(8),)),
        CacheGeometry(12, 2, (Mamba(12), FullAttention(2), SlidingWindow(4, 6))),
    ]
)


@given(
    geometry=geometries,
    num_computed=st.integers(0, 60),
    num_hashes=st.integers(0, 30),
    first_token=st.integers(0, 60),
    null=st.sampled_from([0, 7]),
    data=st.data(),
)
def test_every_block_that_is_full_hashed_and_there_and_no_other(
    geometry: CacheGeometry,
    num_computed: int,
    num_hashes: int,
    first_token: int,
    null: int,
    data: st.DataObject,
) -> None:
    tables = [
        data.draw(st.lists(st.sampled_from([null, *range(30)]), max_size=30))
        for _ in geometry.groups
    ]
    hashes = [BlockHash(b"hash %d" % number) for number in range(num_hashes)]
    info = RequestInfo("r", 40, hashes, num_computed)
    expected = []
    for index, (group, table) in enumerate(zip(geometry.groups, tables, strict=True)):
        for number, block_id in enumerate(table):
            tokens = range(number * group.block_size, (number + 1) * group.block_size)
            is_computed = all(token < num_computed for token in tokens)
            is_hashed = tokens[-1] < num_hashes * geometry.hash_block_size
            if block_id != null and is_computed and is_hashed and tokens[-1] >= first_token:
                name = b"hash %d" % (tokens[-1] // geometry.hash_block_size)
                expected.append((index, number, block_id, make_offload_key(name, index)))
    blocks = full_blocks(geometry, info, tuple(tables), first_token=first_token, null_block_id=null)
    assert list(blocks) == expected
