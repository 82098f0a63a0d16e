"""A connector's offloading events as the KV-cache events of the installed vLLM.

The block size is that of the key's group, never 0, and hashes take the form that
the GPU's own events have, so a consumer can join the two (EVENT-2).

Source: vllm/distributed/kv_events.py; the fields grew from release to release.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

from kvview import CacheGeometry, OffloadingEvent, get_offload_block_hash, get_offload_group_idx


def to_vllm_events(events: Iterable[OffloadingEvent], geometry: CacheGeometry) -> Iterator[Any]:
    """Convert events, splitting each by KV-cache group.

    Args:
        events: In order.
        geometry: Tells the block size of each group.

    Yields:
        ``BlockStored`` and ``BlockRemoved`` of the installed vLLM.
    """
    for event in events:
        hashes: dict[int, list[Any]] = {}
        for key in event.keys:
            block_hash = _external_hash(get_offload_block_hash(key))
            hashes.setdefault(get_offload_group_idx(key), []).append(block_hash)
        for group_idx, block_hashes in hashes.items():
            yield _vllm_event(event, group_idx, block_hashes, geometry)


def _vllm_event(
    event: OffloadingEvent, group_idx: int, block_hashes: list[Any], geometry: CacheGeometry
) -> Any:
    kv_events: Any = importlib.import_module("vllm.distributed.kv_events")
    kind = kv_events.BlockRemoved if event.removed else kv_events.BlockStored
    values = {
        "block_hashes": block_hashes,
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": geometry.groups[group_idx].block_size,
        "lora_id": None,
        "medium": event.medium,
        "lora_name": None,  # required from 0.14.0, rejected before
        "group_idx": group_idx,  # 0.20.0
    }
    return kind(**{name: values[name] for name in kind.__struct_fields__ if name in values})


def _external_hash(block_hash: bytes) -> Any:
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    return utils.maybe_convert_block_hash(block_hash)
