"""The block sizes in a stream, which come from the event itself or from GPU events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvview.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockSizeIndex,
    BlockStored,
    GPUEvent,
    OffloadingEvent,
)
from kvview.events.wire import AnyEvent, ClearedEvent, Hash, RemovedEvent, StoredEvent
from kvview.keys import MAX_GROUPS, OffloadKey, make_offload_key


class WireSizes:
    """Finds the size of each held block.

    1. An event of a tier without a size (vLLM's own offloading, ``location_only``) takes
       the size of the GPU's event of the same block and group, found by
       :class:`~kvview.BlockSizeIndex`, because vLLM publishes the events of a tier last.
    2. An event whose size differs from the size in the GPU's event of the same block is reported.
    """

    def __init__(self) -> None:
        self._index = BlockSizeIndex()

    def apply(self, events: Sequence[AnyEvent]) -> Iterator[tuple[int, str]]:
        """Apply a batch.

        Returns:
            For each event that contradicts a GPU event (2.), the index of the event and the fault.
        """
        self._index.apply_batch(_translated(events))
        for number, event in enumerate(events):
            if isinstance(event, StoredEvent) and (event.medium or MEDIUM_GPU) != MEDIUM_GPU:
                for key in _keys(event) if (event.block_size or 0) > 0 else ():
                    known = self._index.block_size(key)
                    if known is None:
                        self._index.learn(key, event.block_size)
                    elif known != event.block_size:
                        yield (
                            number,
                            f"has blocks of {event.block_size} in {event.medium}, but the "
                            f"GPU's event of a block has {known}",
                        )
                        break

    def find(self, block_hash: Hash, group: int | None) -> int | None:
        """Return the number of tokens in a block; None if no event contains it."""
        return self._index.block_size(_key(block_hash, group))

    def num_tokens(self, blocks: Iterable[tuple[Hash, int | None]]) -> tuple[int, int]:
        """Return the tokens in some blocks, and the number of blocks of unknown size."""
        sizes = [self.find(*block) for block in blocks]
        return sum(size or 0 for size in sizes), sizes.count(None)


def _bytes(block_hash: Hash) -> bytes:
    if isinstance(block_hash, bytes):
        return block_hash or b"\0"  # a key is not empty (KEY-3), but a hash of a stream may be
    return (block_hash % 2**64).to_bytes(8, "big")


def _key(block_hash: Hash, group: int | None) -> OffloadKey:
    return make_offload_key(_bytes(block_hash), (group or 0) % MAX_GROUPS)


def _keys(event: StoredEvent | RemovedEvent) -> list[OffloadKey]:
    return [_key(block_hash, event.group_idx) for block_hash in event.block_hashes]


def _translated(events: Sequence[AnyEvent]) -> Iterator[GPUEvent | OffloadingEvent]:
    for event in events:
        if isinstance(event, ClearedEvent):
            yield AllBlocksCleared()
        elif isinstance(event, StoredEvent | RemovedEvent):
            medium, is_removal = event.medium or MEDIUM_GPU, isinstance(event, RemovedEvent)
            if medium != MEDIUM_GPU:
                yield OffloadingEvent(_keys(event), medium, is_removal)
                continue
            group = (event.group_idx or 0) % MAX_GROUPS
            hashes = [_bytes(block_hash) for block_hash in event.block_hashes]
            if isinstance(event, RemovedEvent):
                yield BlockRemoved(hashes, group)
            elif (event.block_size or 0) > 0:
                yield BlockStored(hashes, None, event.block_size, group)
