"""The messages from the scheduler half to the worker half of a :class:`~kvview.StoreConnector`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvview.connector.plan import StepPlan
from kvview.keys import OffloadKey, get_offload_group_idx

EPOCH_BYTES = 8
"""Length of the epoch, which follows the key in a page's name and separates runs and resets."""


def group_of(name: bytes) -> int:
    """Return the KV-cache group of a page."""
    return get_offload_group_idx(OffloadKey(name[:-EPOCH_BYTES]))


PagePlace = tuple[bytes, bool, bool]
"""The name of a page, whether memory holds it, and whether the store holds it from now on."""


@dataclass(slots=True)
class StoreSpec:
    """Names of pages, in the order of the GPU blocks with which they pair.

    Args:
        names: Names of the pages.
        in_memory: Whether a store job keeps the pages in memory.
        in_store: Whether a store job writes the pages to the store.
    """

    medium: ClassVar[str] = "STORE"

    names: Sequence[bytes]
    in_memory: bool = False
    in_store: bool = False


@dataclass(frozen=True)
class StorePlan(StepPlan):
    """The jobs of a step, and the pages whose place changes before these jobs.

    Args:
        places: New places, at most one for each page.
    """

    places: Sequence[PagePlace] = ()
