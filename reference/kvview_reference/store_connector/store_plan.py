"""The messages from the scheduler half to the worker half of a :class:`StoreConnector`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from kvview.connector.plan import StepPlan
from kvview.keys import OffloadKey, get_offload_group_idx

EPOCH_BYTES = 8
"""Length of the epoch, which follows the key in a page's name and separates runs and resets."""


def group_of(name: bytes) -> int:
    """Return the KV-cache group of a page."""
    return get_offload_group_idx(OffloadKey(name[:-EPOCH_BYTES]))


class PagePlace(NamedTuple):
    """The place of a page from now on.

    Args:
        name: Name of the page.
        host_page: Number of the host page that holds it; None if host memory does not hold it.
        in_store: Whether the store holds it.
    """

    name: bytes
    host_page: int | None
    in_store: bool


@dataclass(slots=True)
class StoreSpec:
    """Names of pages, in the order of the GPU blocks with which they pair.

    Args:
        names: Names of the pages.
        host_pages: Host pages that a store job fills; empty if it fills no host memory.
        in_store: Whether a store job writes the pages to the store.
    """

    medium: ClassVar[str] = "STORE"

    names: Sequence[bytes]
    host_pages: Sequence[int] = ()
    in_store: bool = False


@dataclass(frozen=True)
class StorePlan(StepPlan):
    """The jobs of a step, and the pages whose place changes before these jobs.

    Args:
        places: New places, at most one for each page.
    """

    places: Sequence[PagePlace] = ()
