"""The event contract as an executable model: how many blocks each medium advertises by key.

EVENT-1 is in :meth:`EventModel.change`, EVENT-2 in :meth:`EventModel.advertised`. Searches,
simulated runs and ``kvview events`` all fold with it. Keys are of any kind, because an engine
names a block by hash and group, and a tier by offload key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

from kvview.events import MEDIUM_GPU

KeyT = TypeVar("KeyT", bound=Hashable)


class EventModel(Generic[KeyT]):
    """The state that a stream of events has described so far."""

    def __init__(self) -> None:
        self.held: dict[str, Counter[KeyT]] = {}
        """Blocks by medium and key; a medium stays once an event named it."""

    def change(self, medium: str, key: KeyT, *, removed: bool) -> bool:
        """Apply one change; returns whether EVENT-1 allows it.

        In a tier, stores and removals of a key take turns, and a store comes first. On the GPU
        several blocks may hold one key, so only a removal can be wrong.
        """
        held = self.held.setdefault(medium, Counter())
        if not removed:
            is_allowed = medium == MEDIUM_GPU or not held[key]
            held[key] += is_allowed
            return is_allowed
        is_allowed = held[key] > 0
        if held[key] > 1:
            held[key] -= 1
        else:
            del held[key]
        return is_allowed

    def clear_gpu(self) -> None:
        """Apply ``AllBlocksCleared``: tiers keep their blocks (EVENT-5)."""
        self.held.pop(MEDIUM_GPU, None)

    def advertised(self) -> set[KeyT]:
        """The keys that some medium holds (EVENT-2)."""
        return set().union(*self.held.values())
