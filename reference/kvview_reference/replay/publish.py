"""The events of a replay, published in vLLM's format for tests of routers without a GPU.

A trace has hashes but no tokens. So the tokens of a block are derived from its hash, and equal
blocks have equal tokens.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvview import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheGeometry,
    OffloadingEvent,
    OffloadKey,
    SlidingWindow,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from kvview.events.channel import Publisher
from kvview.events.formats import WireFormat
from kvview.events.wire import Batch, WireEvent, codec, encode
from kvview_reference.engine import Engine

_VOCABULARY = 2**17
_KNOWN_PARENTS = 2**20
"""Number of blocks whose parents are remembered, so that memory does not grow with the trace."""
_KINDS = {
    "FullAttention": "full_attention",
    "SlidingWindow": "sliding_window",
    "ChunkedLocalAttention": "chunked_local_attention",
    "Mamba": "mamba",
}  # the names of kv_cache_spec_kind: vllm/v1/kv_cache_interface.py


class EventFeed:
    """Publishes the changes of each step as one batch.

    Args:
        publisher: The channel.
        geometry: Geometry of the engine.
        wire_format: Format of the batches.
    """

    def __init__(
        self, publisher: Publisher, geometry: CacheGeometry, wire_format: WireFormat
    ) -> None:
        self._publisher, self._geometry = publisher, geometry
        self._format, self._writer = wire_format, codec(wire_format)
        self._parents: OrderedDict[OffloadKey, bytes | None] = OrderedDict()
        self.num_events = 0

    def publish(self, engine: Engine) -> None:
        """Publish the events of the engine; no batch is sent for a step without events."""
        events: list[WireEvent] = []
        for event in engine.kv_cache.pool.take_events():
            events.append(self._gpu_event(event))
        for offloading in engine.take_offloading_events():
            events += self._tier_events(offloading)
        if events:
            self._publisher.publish(encode(Batch(time.time(), events, 0, self._format)))
            self.num_events += len(events)

    def _gpu_event(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> WireEvent:
        if isinstance(event, AllBlocksCleared):
            return self._writer.make("AllBlocksCleared")
        if isinstance(event, BlockRemoved):
            return self._removed(event.block_hashes, event.group_idx, event.medium)
        parent = event.parent_block_hash
        for block_hash in event.block_hashes:
            key = make_offload_key(block_hash, event.group_idx)
            self._parents[key], parent = parent, block_hash
            self._parents.move_to_end(key)
        while len(self._parents) > _KNOWN_PARENTS:
            self._parents.popitem(last=False)
        return self._stored(
            event.block_hashes, event.parent_block_hash, event.group_idx, event.medium
        )

    def _tier_events(self, event: OffloadingEvent) -> Iterator[WireEvent]:
        for key in event.keys:
            hashes, group_idx = [get_offload_block_hash(key)], get_offload_group_idx(key)
            if event.removed:
                yield self._removed(hashes, group_idx, event.medium)
            else:
                yield self._stored(hashes, self._parents.get(key), group_idx, event.medium)

    def _stored(
        self, hashes: Sequence[bytes], parent: bytes | None, group_idx: int, medium: str
    ) -> WireEvent:
        group = self._geometry.groups[group_idx]
        tokens = [token for name in hashes for token in _tokens(name, group.block_size)]
        return self._writer.make(
            "BlockStored",
            block_hashes=[_number(name) for name in hashes],
            parent_block_hash=None if parent is None else _number(parent),
            token_ids=tokens,
            block_size=group.block_size,
            medium=medium,
            extra_keys=[None] * len(hashes),
            group_idx=group_idx,
            kv_cache_spec_kind=_KINDS.get(type(group).__name__),
            kv_cache_spec_sliding_window=group.sliding_window
            if isinstance(group, SlidingWindow)
            else None,
        )

    def _removed(self, hashes: Sequence[bytes], group_idx: int, medium: str) -> WireEvent:
        numbers = [_number(name) for name in hashes]
        return self._writer.make(
            "BlockRemoved", block_hashes=numbers, group_idx=group_idx, medium=medium
        )


def _number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def _tokens(block_hash: bytes, block_size: int) -> range:
    first = _number(block_hash) % (_VOCABULARY - block_size)
    return range(first, first + block_size)
