"""The decisions about one level that an author may replace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvview.connector.request import FullBlock, RequestInfo
from kvview.keys import OffloadKey


class Policy:
    """Admits every block and evicts the least recently used key. Override any method.

    1. Each level has its own policy. For each key, calls of ``added`` and ``removed`` alternate. No
       call names a key twice.
    2. All calls come from the scheduler's thread, so no call may wait.
    """

    def __init__(self) -> None:
        self._order: dict[OffloadKey, None] = {}

    def admits(self, block: FullBlock, request: RequestInfo) -> bool:
        """Whether a computed block is stored; other blocks must be computed again."""
        return True

    def added(self, keys: Sequence[OffloadKey]) -> None:
        """Record keys that the level holds from now on; the first one is the least important."""
        self._order.update(dict.fromkeys(keys))

    def used(self, keys: Sequence[OffloadKey]) -> None:
        """Record keys of the level that a request uses; the first one is the least important."""
        self.removed(keys)
        self.added(keys)

    def removed(self, keys: Sequence[OffloadKey]) -> None:
        """Record keys that the level no longer holds."""
        for key in keys:
            del self._order[key]

    def victims(self) -> Iterator[OffloadKey]:
        """Return keys in the order of eviction; the caller skips keys that are being read."""
        return iter(self._order)
