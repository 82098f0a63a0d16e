"""A store in memory, with which a bridge can be tried."""

from __future__ import annotations

from kvview.tier.bases.threaded import Threaded
from kvview.tier.namespace import Namespace


class MemoryStore(Threaded):
    """Keeps pages in this process, so that a bridge can be tried without a store."""

    def __init__(self, namespace: Namespace) -> None:
        self._pages: dict[bytes, bytes] = {}
        super().__init__(namespace, threads=1)

    def has(self, key: bytes, /) -> bool:
        """Whether the key was written."""
        return key in self._pages

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        """Copy the page."""
        found = self._pages.get(key)
        if found is None or len(found) != len(page):
            return False
        page[:] = found
        return True

    def write(self, key: bytes, page: memoryview, /) -> bool:
        """Copy the page."""
        self._pages[key] = bytes(page)
        return True
