"""Events that readers treat differently: the fields that differ from an ordinary event."""

from __future__ import annotations

from typing import Any

BLOCK_SIZE = 16
STORED: dict[str, Any] = {
    "block_hashes": [2**64 - 1, 2**62],
    "parent_block_hash": None,
    "token_ids": [*range(32)],
    "block_size": BLOCK_SIZE,
    "medium": "GPU",
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
REMOVED: dict[str, Any] = {"block_hashes": STORED["block_hashes"], "medium": "GPU", "group_idx": 0}
ALL_BYTES = [b"h" * 32, b"i" * 32]
STORES: dict[str, dict[str, Any]] = {
    "first of a prompt": {},
    "with a parent": {"parent_block_hash": 7 << 40},
    "small hashes": {"block_hashes": [3, 2**32 - 1]},
    "a small parent": {"parent_block_hash": 2**31},
    "a hash of no bytes": {"block_hashes": [b"", b"h"]},
    "hash of all bytes": {"block_hashes": ALL_BYTES},
    "parent of all bytes": {"parent_block_hash": b"p" * 32},
    "no tokens": {"token_ids": [], "block_size": 0, "medium": "CPU"},
    "fewer tokens than blocks": {"token_ids": [*range(16)]},
    "a hash twice": {"block_hashes": [5 << 50, 5 << 50]},
    "tokens of a block and a half": {"token_ids": [*range(24)]},
    "tokens of another size": {"block_size": 8},
    "no blocks": {"block_hashes": [], "token_ids": []},
    "adapter": {"lora_id": 3, "lora_name": "adapter"},
    "salt": {"extra_keys": [["salt"], ["salt"]]},
    "image": {"extra_keys": [[["image", 4]], None]},
    "bytes as extra key": {"extra_keys": [[b"embedding"], None]},
    "metadata": {"metadata": {"cache_salt": "salt"}},
    "session": {"session_id": "session-1"},
    "tokens ahead": {"lookahead_token_ids": [[5, 6], [7]]},
    "ownership": {"ownership": "kvcr", "medium": "CPU"},
    "another ownership": {"ownership": "file-tier"},
    "locality local": {"locality": "LOCAL"},
    "locality remote": {"locality": "REMOTE"},
    "group that is not named": {"group_idx": None, "kv_cache_spec_kind": None},
    "group 0 without its kind": {"kv_cache_spec_kind": None},
    "group 1 without its kind": {"group_idx": 1, "kv_cache_spec_kind": None},
    "group 1 of full attention": {"group_idx": 1},
    **{
        f"kind {kind}": {"group_idx": 1, "kv_cache_spec_kind": kind}
        for kind in ("mla_attention", "sink_full_attention", "sliding_window", "mamba", "unheard")
    },
    **{
        f"medium {medium}": {"medium": medium}
        for medium in ("CPU", "CPU_PINNED", "DISK", "STORAGE", "EXTERNAL", "FS", "OBJ", "cpu", None)
    },
}
REMOVALS: dict[str, dict[str, Any]] = {
    "removed": {},
    "removed, no medium": {"medium": None},
    "removed, medium unheard": {"medium": "FS"},
    "removed, hash of all bytes": {"block_hashes": ALL_BYTES},
    "removed, ownership": {"ownership": "file-tier"},
    "removed, locality remote": {"locality": "REMOTE"},
    "removed, nothing": {"block_hashes": []},
}
