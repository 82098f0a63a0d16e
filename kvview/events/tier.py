"""The event contract: what a tier says it holds, for routers and indexers.

Laws: EVENT-1 to EVENT-5 in ``kvview/laws.toml``.

An offloading event carries no block size: one event may name keys of groups
whose blocks differ in size. Who needs the size joins it from the GPU events of
the same blocks with :class:`BlockSizeIndex`, instead of guessing.

Source: vLLM PR #36644 (the block size leaves the event), issue #43468 (a router
that drops every event without one), ``vllm/distributed/kv_events.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvview.errors import EventOrderError
from kvview.keys import OffloadKey

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Keys that appeared in, or vanished from, one offloading medium.

    Args:
        keys: The keys, in the order in which it happened.
        medium: Name of the tier, ``"CPU"`` for example.
        removed: True when the keys can no longer be loaded, False when now they can.
    """

    keys: Sequence[OffloadKey]
    medium: str
    removed: bool


@runtime_checkable
class SupportsSilentTiers(Protocol):
    """A scheduler half that promises from several tiers, of which some give no events."""

    def comes_from_silent_tier(self, request_id: str) -> bool:
        """Whether no event speaks of what was promised to a request last (EVENT-2).

        Args:
            request_id: Of a request that ``match_prefix`` has just promised something to.
        """
        ...


def fold_events(events: Iterable[OffloadingEvent]) -> dict[str, set[OffloadKey]]:
    """Replay a stream from its beginning into what each medium advertises.

    Args:
        events: All events since the tier was empty, in order.

    Returns:
        ``{medium: loadable keys}`` (EVENT-2); a medium stays once it was seen.

    Raises:
        EventOrderError: A key is removed that was not stored (EVENT-1).
    """
    held: dict[str, set[OffloadKey]] = {}
    for number, event in enumerate(events):
        keys = held.setdefault(event.medium, set())
        if not event.removed:
            keys.update(event.keys)
            continue
        for key in event.keys:
            if key not in keys:
                raise EventOrderError(
                    f"EVENT-1: event {number} removes key {key.hex()} from medium "
                    f"{event.medium!r}, which does not hold it"
                )
            keys.remove(key)
    return held
