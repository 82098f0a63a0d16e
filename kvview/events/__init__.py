"""The event contract, and the wire format in which engines publish it.

The laws and what a tier says (:mod:`kvview.events.tier`), the join with the GPU's events
(:mod:`kvview.events.block_sizes`), and the wire formats of every producer
(:mod:`kvview.events.formats`). What reads and writes bytes, :mod:`kvview.events.wire` and
:mod:`kvview.events.channel`, needs the extra ``events`` and is imported by name.
"""

from kvview.events.block_sizes import (
    AllBlocksCleared,
    BlockRemoved,
    BlockSizeIndex,
    BlockStored,
    GPUEvent,
)
from kvview.events.tier import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    OffloadingEvent,
    SupportsSilentTiers,
    fold_events,
)

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockSizeIndex",
    "BlockStored",
    "GPUEvent",
    "OffloadingEvent",
    "SupportsSilentTiers",
    "fold_events",
]
