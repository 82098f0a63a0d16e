"""The names of a block's KV: the block hash, and the offload key (hash and KV-cache group).

Laws: KEY-1 to KEY-3 in ``kvview/laws.toml``.

Keys are bytes and not tuples, because the garbage collector does not track a bytes object. Keys are
packed like vLLM's ``BlockHashWithGroupId``.

Source: ``vllm/v1/kv_offload/base.py`` (0.20.0 and later).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType, cast

from kvview.errors import NotAnOffloadKeyError

BlockHash = NewType("BlockHash", bytes)
"""Hash of the tokens of a block and of all tokens before it; any length, no group (KEY-1)."""

OffloadKey = NewType("OffloadKey", bytes)
"""``block_hash + group_idx`` as 4 big-endian bytes (KEY-2)."""

MAX_GROUPS = 1 << 16
"""Group indices are below this number, so that the first two bytes of an index are zero (KEY-3)."""

_GROUP_BYTES = 4


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Pack a block hash and a KV-cache-group index.

    Args:
        block_hash: A :data:`BlockHash`, or plain bytes.
        group_idx: Index of the KV-cache group.

    Raises:
        NotAnOffloadKeyError: ``group_idx`` is not from 0 to 65,535, or the hash is empty.
    """
    if not 0 <= group_idx < MAX_GROUPS or not block_hash:
        raise NotAnOffloadKeyError(
            f"KEY-3: group_idx must be from 0 to {MAX_GROUPS - 1} and the hash not empty, got "
            f"{group_idx} and {block_hash!r}"
        )
    return OffloadKey(block_hash + group_idx.to_bytes(_GROUP_BYTES, "big"))


def make_offload_keys(block_hashes: Sequence[bytes], group_idx: int) -> list[OffloadKey]:
    """Pack many block hashes of one KV-cache group; all hashes are checked first.

    Raises:
        NotAnOffloadKeyError: As for :func:`make_offload_key`.
    """
    if not 0 <= group_idx < MAX_GROUPS or not all(block_hashes):
        return [make_offload_key(block_hash, group_idx) for block_hash in block_hashes]
    suffix = group_idx.to_bytes(_GROUP_BYTES, "big")
    return cast("list[OffloadKey]", [block_hash + suffix for block_hash in block_hashes])


def require_offload_key(key: bytes) -> OffloadKey:
    """Check that bytes can be a key, and return them with the type of a key.

    Raises:
        NotAnOffloadKeyError: The bytes cannot be a key; most likely they are a block hash (KEY-3).
    """
    if len(key) <= _GROUP_BYTES or key[-_GROUP_BYTES:-2] != b"\0\0":
        raise NotAnOffloadKeyError(
            f"KEY-3: {key.hex()} is not an offload key: its last 4 bytes are not a KV-cache group "
            f"below {MAX_GROUPS}. If it is a block hash, use make_offload_key(hash, group_idx)"
        )
    return OffloadKey(key)


def get_offload_block_hash(key: OffloadKey) -> BlockHash:
    """Return the block hash inside a key."""
    return BlockHash(key[:-_GROUP_BYTES])


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the index of the KV-cache group inside a key."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")
