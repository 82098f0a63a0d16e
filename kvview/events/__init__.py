"""The event contract, and the wire formats in which vLLM publishes events.

:mod:`kvview.events.tier` defines the events of a tier, and :mod:`kvview.events.gpu` the events of
the GPU prefix cache. :mod:`kvview.events.fold` computes the contents of a tier from events.
:mod:`kvview.events.formats` has the wire formats of vLLM's releases. :mod:`kvview.events.wire`
reads and writes bytes, and :mod:`kvview.events.channel` receives them. ``wire`` and ``channel``
need the extra ``events``, so this package does not import them.
"""

from kvview.events.fold import FoldedEvents as FoldedEvents, fold_events as fold_events
from kvview.events.gpu import (
    AllBlocksCleared as AllBlocksCleared,
    BlockRemoved as BlockRemoved,
    BlockStored as BlockStored,
    GPUEvent as GPUEvent,
)
from kvview.events.tier import (
    MEDIUM_CPU as MEDIUM_CPU,
    MEDIUM_GPU as MEDIUM_GPU,
    MEDIUM_STORAGE as MEDIUM_STORAGE,
    OffloadingEvent as OffloadingEvent,
)
