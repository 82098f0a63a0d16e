"""The name of an offloaded block: its hash and its KV-cache group, packed in bytes.

Bytes rather than a tuple: one object per key, and nothing for the garbage
collector to track. The packing is that of vLLM's ``BlockHashWithGroupId``, so a
hash yielded by a view *is* an offload key (POOL-8).

Source: ``vllm/v1/kv_offload/base.py`` (0.20.0 and later).
"""

from __future__ import annotations

from typing import NewType

OffloadKey = NewType("OffloadKey", bytes)
"""``block_hash + group_idx`` as 4 big-endian bytes; the hash has any length."""

_GROUP_BYTES = 4


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Pack a block hash and a KV-cache-group index.

    Raises:
        ValueError: ``group_idx`` is negative or needs more than 4 bytes.
    """
    try:
        return OffloadKey(block_hash + group_idx.to_bytes(_GROUP_BYTES, "big"))
    except OverflowError as error:
        raise ValueError(
            f"group_idx must fit in {_GROUP_BYTES} unsigned bytes, got {group_idx}"
        ) from error


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """The block hash inside a key."""
    return key[:-_GROUP_BYTES]


def get_offload_group_idx(key: OffloadKey) -> int:
    """The KV-cache-group index inside a key."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")
