"""The keys that a tier advertises, derived from the results of its jobs and from evictions."""

from __future__ import annotations

from collections.abc import Sequence

from kvview.events import MEDIUM_STORAGE, OffloadingEvent
from kvview.keys import OffloadKey


class TierEvents:
    """The events of one tier, as EVENT-1 to EVENT-4 require them.

    1. A key is advertised after a successful put or get. So a key that an earlier process stored is
       advertised after its first load.
    2. A key is withdrawn after a failed get, a lookup that misses, or an eviction. A key that was
       evicted while its put was in flight is not advertised.
    3. If more than ``max_keys`` keys are advertised, the oldest are withdrawn.

    This class is not thread-safe.

    Args:
        medium: Name of the tier.
        max_keys: Maximum of keys that are advertised at once.
    """

    def __init__(self, medium: str = MEDIUM_STORAGE, max_keys: int = 1 << 20) -> None:
        self._medium = medium
        self._max_keys = max_keys
        self._held: dict[bytes, None] = {}
        self._in_flight: dict[bytes, int] = {}  # puts
        self._evicted: set[bytes] = set()  # of these puts, evicted keys
        self._events: list[tuple[list[OffloadKey], bool]] = []

    def began(self, keys: Sequence[bytes]) -> None:
        """Record the start of a put."""
        for key in keys:
            self._in_flight[key] = self._in_flight.get(key, 0) + 1

    def ended(self, keys: Sequence[bytes], flags: Sequence[bool], *, is_get: bool) -> None:
        """Record the report of a job."""
        for key, flag in zip(keys, flags, strict=True):
            if not is_get:
                left = self._in_flight.pop(key) - 1
                if left:
                    self._in_flight[key] = left
                if key in self._evicted:
                    self._evicted.discard(key)
                    continue
            if not flag and is_get:
                self.gone(key)
            elif flag and key not in self._held:
                self._held[key] = None
                self._add(key, removed=False)
                if len(self._held) > self._max_keys:
                    self.gone(next(iter(self._held)))

    def evicted(self, keys: Sequence[bytes]) -> None:
        """Record evictions; must be called before :meth:`ended` of later puts."""
        for key in keys:
            if key in self._in_flight:
                self._evicted.add(key)
            self.gone(key)

    def gone(self, key: bytes) -> None:
        """Withdraw a key that cannot be loaded now."""
        if key in self._held:
            del self._held[key]
            self._add(key, removed=True)

    def take(self) -> list[OffloadingEvent]:
        """Return the new events, in order."""
        events, self._events = self._events, []
        return [OffloadingEvent(tuple(keys), self._medium, removed) for keys, removed in events]

    def _add(self, key: bytes, *, removed: bool) -> None:
        if not self._events or self._events[-1][1] != removed:
            self._events.append(([], removed))
        self._events[-1][0].append(OffloadKey(key))
