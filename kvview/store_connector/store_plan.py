"""The messages from the scheduler half to the worker half of a :class:`~kvview.StoreConnector`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from kvview.connector.plan import StepPlan
from kvview.keys import OffloadKey, get_offload_group_idx


class Move(Enum):
    """A change of the levels that moves no GPU block."""

    DROP = auto()
    """Memory forgets the page."""
    DEMOTE = auto()
    """The page moves from memory to the store."""
    FETCH = auto()
    """The page is copied from the store to memory."""
    RAISE = auto()
    """The page moves from the store to memory."""
    DELETE = auto()
    """The store forgets the page."""


@dataclass(slots=True)
class StoreSpec:
    """Pages by name, in the order of the GPU blocks that they pair with.

    Args:
        names: Of the pages.
        in_memory: Whether a store job keeps them in memory.
        in_store: Whether a store job writes them to the store.
    """

    medium: ClassVar[str] = "STORE"

    names: Sequence[bytes]
    in_memory: bool = False
    in_store: bool = False


@dataclass(frozen=True)
class StorePlan(StepPlan):
    """The jobs of a step, and the moves between the levels that come before them.

    Args:
        moves: In order.
    """

    moves: Sequence[tuple[Move, bytes]] = ()


EPOCH_BYTES = 8
"""At the end of a page's name, after its key: they separate runs and resets."""


def group_of(name: bytes) -> int:
    """The KV-cache group of a page."""
    return get_offload_group_idx(OffloadKey(name[:-EPOCH_BYTES]))
