"""The event contract: a tier reports its keys to routers and indexers.

Laws: EVENT-1 to EVENT-5 in ``kvview/laws.toml``.

An offloading event has no block size, because one event may name keys of groups with different
block sizes. A reader that needs the size finds it in the GPU events of the same blocks.

Source: vLLM PR #36644 (removes the block size from the event), issue #43468 (a router drops every
event without a block size), ``vllm/distributed/kv_events.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvview.keys import OffloadKey

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Keys that were stored in, or removed from, one offloading medium.

    Args:
        keys: The keys, in the order of the changes.
        medium: Name of the tier, ``"CPU"`` for example.
        removed: Whether the keys can no longer be loaded; if False, they can be loaded now.
    """

    keys: Sequence[OffloadKey]
    medium: str
    removed: bool
