"""The decisions about one level that an author may replace."""

from __future__ import annotations

from collections.abc import Iterator

from kvview.connector.request import FullBlock, RequestInfo
from kvview.keys import OffloadKey


class Policy:
    """Least recently used, everything admitted. Override the methods that should differ.

    1. A level has a policy of its own. ``added`` and ``removed`` alternate for each key.
    2. All calls come from the scheduler's thread, so none may wait.
    """

    def __init__(self) -> None:
        self._order: dict[OffloadKey, None] = {}

    def admits(self, block: FullBlock, request: RequestInfo) -> bool:
        """Whether a block is stored when it is computed; False computes it again next time."""
        return True

    def added(self, key: OffloadKey) -> None:
        """The level holds a key from now on."""
        self._order[key] = None

    def used(self, key: OffloadKey) -> None:
        """A request computed or loads a key that the level holds."""
        del self._order[key]
        self._order[key] = None

    def removed(self, key: OffloadKey) -> None:
        """The level no longer holds a key."""
        del self._order[key]

    def victims(self) -> Iterator[OffloadKey]:
        """Keys in the order of eviction; the caller skips those that are being read."""
        return iter(self._order)
