"""The fold of a stream of events into the blocks that each medium advertises at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from kvview.errors import EventOrderError
from kvview.events.tier import MEDIUM_GPU, OffloadingEvent
from kvview.keys import OffloadKey

KeyT = TypeVar("KeyT", bound=Hashable)


class FoldedEvents(Generic[KeyT]):
    """The blocks that each medium advertises after the events so far.

    Keys may have any type, because an engine names a block by hash and group, and a tier by offload
    key.
    """

    def __init__(self) -> None:
        self.held: dict[str, Counter[KeyT]] = {}
        """Number of blocks by medium and key; a medium that an event has named is never removed."""

    def change(self, medium: str, key: KeyT, *, removed: bool) -> bool:
        """Apply one change; returns whether EVENT-1 allows the change.

        In a tier, stores and removals of a key alternate, starting with a store. On the GPU several
        blocks may hold one key, so only a removal can be wrong.
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

    def clear_gpu(self) -> Counter[KeyT]:
        """Apply ``AllBlocksCleared``, which leaves tiers unchanged; returns the GPU's blocks."""
        return self.held.pop(MEDIUM_GPU, Counter())

    def advertised(self) -> set[KeyT]:
        """Return the keys that at least one medium advertises (EVENT-2)."""
        return set().union(*self.held.values())


def fold_events(events: Iterable[OffloadingEvent]) -> dict[str, set[OffloadKey]]:
    """Fold a stream of events into the keys that each medium advertises.

    Args:
        events: All events since the tier was empty, in order.

    Returns:
        ``{medium: loadable keys}`` (EVENT-2), with every medium that an event named.

    Raises:
        EventOrderError: An event removes a key that was not stored (EVENT-1).
    """
    fold: FoldedEvents[OffloadKey] = FoldedEvents()
    for number, event in enumerate(events):
        fold.held.setdefault(event.medium, Counter())
        for key in event.keys:
            is_allowed = fold.change(event.medium, key, removed=event.removed)
            if event.removed and not is_allowed:
                raise EventOrderError(
                    f"EVENT-1: event {number} removes key {key.hex()} from medium "
                    f"{event.medium!r}, which does not hold it"
                )
    return {medium: set(held) for medium, held in fold.held.items()}
