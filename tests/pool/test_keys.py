"""KEY-1 to KEY-3: a hash names tokens, a key names KV, and other bytes are refused."""

from __future__ import annotations

import pytest

from kvview import (
    BlockHash,
    CacheGeometry,
    FullAttention,
    NotAnOffloadKeyError,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
    require_offload_key,
)
from kvview.keys import MAX_GROUPS

HASH = BlockHash(bytes(range(1, 33)))


def test_key_1_a_hash_names_the_same_tokens_in_every_group() -> None:
    geometry = CacheGeometry(16, 16, (FullAttention(16), FullAttention(16)))
    keys = [geometry.block_key([HASH], group, 0) for group in range(2)]
    assert None not in keys
    assert len(set(keys)) == 2
    assert {get_offload_block_hash(key) for key in keys if key is not None} == {HASH}


@pytest.mark.parametrize("group_idx", [0, 1, 255, 256, MAX_GROUPS - 1])
@pytest.mark.parametrize("block_hash", [b"h", HASH, HASH * 2])
def test_key_2_a_key_contains_its_hash_and_group(block_hash: bytes, group_idx: int) -> None:
    key = require_offload_key(make_offload_key(block_hash, group_idx))
    assert get_offload_block_hash(key) == block_hash
    assert get_offload_group_idx(key) == group_idx
    assert key == block_hash + group_idx.to_bytes(4, "big")


@pytest.mark.parametrize("wrong", [b"", b"\0\0\0\0", HASH, b"h\0\1\0\0", b"h\1\0\0\0"])
def test_key_3_bytes_that_cannot_be_a_key_are_refused(wrong: bytes) -> None:
    with pytest.raises(NotAnOffloadKeyError, match="KEY-3: "):
        require_offload_key(wrong)


@pytest.mark.parametrize(("block_hash", "group_idx"), [(b"", 0), (b"h", -1), (b"h", MAX_GROUPS)])
def test_key_3_an_impossible_hash_or_group_is_refused(block_hash: bytes, group_idx: int) -> None:
    with pytest.raises(NotAnOffloadKeyError, match="KEY-3: "):
        make_offload_key(block_hash, group_idx)
