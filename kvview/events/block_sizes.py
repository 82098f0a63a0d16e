"""The events of the GPU prefix cache, and an index of block sizes from these events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvview.events.fold import FoldedEvents
from kvview.events.tier import MEDIUM_GPU, OffloadingEvent
from kvview.keys import OffloadKey, make_offload_key


@dataclass(frozen=True, slots=True)
class BlockStored:
    """GPU blocks of one group became reusable through the prefix cache.

    Args:
        block_hashes: Hashes without the group, in prefix order.
        parent_block_hash: Hash of the block before the first of these blocks; None at the start of
            a prompt.
        block_size: Tokens in each of the blocks.
        group_idx: KV-cache group of the blocks.
        medium: The medium of the blocks.
    """

    block_hashes: Sequence[bytes]
    parent_block_hash: bytes | None
    block_size: int
    group_idx: int
    medium: str = MEDIUM_GPU


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """GPU blocks of one group were evicted from the prefix cache."""

    block_hashes: Sequence[bytes]
    group_idx: int
    medium: str = MEDIUM_GPU


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The GPU prefix cache was reset."""

    medium: str = MEDIUM_GPU


GPUEvent = BlockStored | BlockRemoved | AllBlocksCleared


class BlockSizeIndex:
    """Finds the block size of an offloaded key from the GPU events of its block.

    1. A size is known while the GPU or any offloading medium holds the key, whichever event arrives
       first. A GPU block may be evicted before its offloading event arrives, because vLLM publishes
       the offloading events of a step last (#57159).
    2. So when no medium holds a key any more, the index remembers the size of the key for a while,
       but does not return it. The size is dropped after N other keys were released, where N is the
       largest number of keys that were held at once, at least 1,024. So memory is proportional to
       the number of cached keys.

    Apply every GPU event and every offloading event, each stream in order. Events of the two
    streams may be mixed in any order within a batch. Events may also be mixed across batches, as
    long as no size has been dropped (2.).
    """

    _FEWEST_RELEASED = 1024

    def __init__(self) -> None:
        self._sizes: dict[OffloadKey, int] = {}
        self._fold: FoldedEvents[OffloadKey] = FoldedEvents()
        self._released: dict[OffloadKey, None] = {}  # keys that no medium holds, oldest first
        self._most_held = 0

    def block_size(self, key: OffloadKey) -> int | None:
        """Return the tokens in a key's block; None if the size is unknown or no medium holds it."""
        return None if key in self._released else self._sizes.get(key)

    def learn(self, key: OffloadKey, block_size: int) -> None:
        """Record the size of a held key from an offloading event that contains the size."""
        if self._fold.is_held(key):
            self._sizes[key] = block_size
            self._hold((key,))

    def apply_batch(self, events: Iterable[GPUEvent | OffloadingEvent]) -> None:
        """Apply all events of one batch; sizes are dropped only after the last event."""
        for event in events:
            self._apply(event)
        self._forget()

    def _apply(self, event: GPUEvent | OffloadingEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self._release(self._fold.clear_gpu())
            return
        if isinstance(event, OffloadingEvent):
            keys, is_removal = event.keys, event.removed
        else:
            keys = [make_offload_key(h, event.group_idx) for h in event.block_hashes]
            is_removal = isinstance(event, BlockRemoved)
        if isinstance(event, BlockStored):
            self._sizes.update(dict.fromkeys(keys, event.block_size))
        for key in keys:
            self._fold.change(event.medium, key, removed=is_removal)
        if is_removal:
            self._release(keys)
        else:
            self._hold(keys)

    def _hold(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self._released.pop(key, None)
        self._most_held = max(self._most_held, len(self._sizes) - len(self._released))

    def _release(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            if key in self._sizes and not self._fold.is_held(key):
                self._released[key] = None

    def _forget(self) -> None:
        surplus = len(self._released) - max(self._most_held, self._FEWEST_RELEASED)
        for key in list(islice(self._released, max(surplus, 0))):
            del self._released[key], self._sizes[key]
