"""The decisions about one level that an author may replace."""

from __future__ import annotations

from collections.abc import Iterator

from kvview.connector.request import FullBlock, RequestInfo
from kvview.keys import OffloadKey


class Policy:
    """Least recently used, everything admitted. Override the methods that should differ.

    1. Each level has its own policy. ``added`` and ``removed`` alternate for each key.
    2. All calls come from the scheduler's thread, so none may wait.
    """

    def __init__(self) -> None:
        self._order: dict[OffloadKey, None] = {}

    def admits(self, block: FullBlock, request: RequestInfo) -> bool:
        """Whether a computed block is stored; a block that is not must be computed again."""
        return True

    def added(self, key: OffloadKey) -> None:
        """Note a key that the level holds from now on."""
        self._order[key] = None

    def used(self, key: OffloadKey) -> None:
        """Note that a request computed or loads a key that the level holds."""
        del self._order[key]
        self._order[key] = None

    def removed(self, key: OffloadKey) -> None:
        """Note a key that the level no longer holds."""
        del self._order[key]

    def victims(self) -> Iterator[OffloadKey]:
        """Return keys in the order of eviction; the caller skips those that are being read."""
        return iter(self._order)
