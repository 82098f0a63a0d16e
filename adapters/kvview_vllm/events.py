"""A connector's offloading events as the KV-cache events of the installed vLLM.

The block size is that of the key's group, never 0, and hashes take the form that
the GPU's own events have, so a consumer can join the two (EVENT-2). A medium is
published as the connector names it, in every release.

Source: vllm/distributed/kv_events.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvview import CacheGeometry, OffloadingEvent, get_offload_block_hash, get_offload_group_idx
from kvview_vllm.releases.calls import make_event


def to_vllm_events(events: Iterable[OffloadingEvent], geometry: CacheGeometry) -> Iterator[Any]:
    """Convert events, splitting each by KV-cache group.

    Args:
        events: In order.
        geometry: Tells the block size of each group.

    Yields:
        ``BlockStored`` and ``BlockRemoved`` of the installed vLLM.
    """
    for event in events:
        hashes: dict[int, list[bytes]] = {}
        for key in event.keys:
            hashes.setdefault(get_offload_group_idx(key), []).append(get_offload_block_hash(key))
        for group_idx, block_hashes in hashes.items():
            size = geometry.groups[group_idx].block_size
            yield make_event(event, group_idx, block_hashes, size)
