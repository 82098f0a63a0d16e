"""The event contract, and the wire formats in which engines publish events.

:mod:`kvview.events.tier` defines the events of a tier. :mod:`kvview.events.fold` computes the
contents of a tier from events, and :mod:`kvview.events.block_sizes` joins tier events with the
events of the GPU. :mod:`kvview.events.formats` has the wire formats of all producers.
:mod:`kvview.events.wire` and :mod:`kvview.events.channel` read and write bytes. ``wire`` and
``channel`` need the extra ``events``, so this package does not import them.
"""

from kvview.events.block_sizes import (
    AllBlocksCleared,
    BlockRemoved,
    BlockSizeIndex,
    BlockStored,
    GPUEvent,
)
from kvview.events.fold import FoldedEvents, fold_events
from kvview.events.tier import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    OffloadingEvent,
    SupportsSilentTiers,
)

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockSizeIndex",
    "BlockStored",
    "FoldedEvents",
    "GPUEvent",
    "OffloadingEvent",
    "SupportsSilentTiers",
    "fold_events",
]
