"""A trial of a tier, which stores and loads one page."""

from __future__ import annotations

import os
import time

from kvview.tier.bases.threaded import Threaded
from kvview.tier.namespace import Namespace
from kvview.tier.store import SupportsDelete, TierStore

_BETWEEN_POLLS = 0.001  # seconds
_PAGE_BYTES = 65_536


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


def try_store(store: TierStore, seconds: float = 60.0) -> str:
    """Store a page under a new key, find it, load it, and delete it if the store can.

    Args:
        store: The store, which only this thread uses.
        seconds: Seconds after which a job or a lookup without a result has failed.

    Returns:
        The fault; empty if the store works.
    """
    key, content = b"kvview doctor" + os.urandom(16), bytearray(os.urandom(_PAGE_BYTES))
    until = time.monotonic() + seconds
    back = bytearray(_PAGE_BYTES)
    store.put(1, [key], [memoryview(content)])
    if _reported(store, 1, until) != [True]:
        return "a page could not be stored"
    while (flag := store.lookup([key])[0]) is None and time.monotonic() < until:
        time.sleep(_BETWEEN_POLLS)
    if not flag:
        return "a page that was stored is not found"
    store.get(2, [key], [memoryview(back)])
    if _reported(store, 2, until) != [True] or back != content:
        return "a page that was stored cannot be loaded"
    if isinstance(store, SupportsDelete):
        store.delete([key])
    return ""


def _reported(store: TierStore, job: int, until: float) -> list[bool]:
    while time.monotonic() < until:
        for number, flags in store.poll():
            if number == job:
                return [*flags]
        time.sleep(_BETWEEN_POLLS)
    return []
