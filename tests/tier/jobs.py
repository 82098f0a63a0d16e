"""Jobs on a store, run to their end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvview.tier import Namespace, TierStore

HERE, THERE = Namespace("m", weights="1"), Namespace("m", weights="2")
SIZE = 1000


def page(key: bytes, size: int = SIZE) -> memoryview:
    """The bytes that a key names."""
    return memoryview(bytearray((key * size)[:size]))


def moved(store: TierStore, method: str, *keys: bytes, size: int = SIZE) -> list[bool]:
    """The flags of a job; every page that was loaded is as it was put."""
    pages = [page(key if method == "put" else b"\0", size) for key in keys]
    flags = moved_pages(store, method, keys, pages)
    for key, found, flag in zip(keys, pages, flags, strict=True):
        assert not flag or found == page(key, size)
    return flags


def moved_pages(
    store: TierStore, method: str, keys: Sequence[bytes], pages: Sequence[memoryview]
) -> list[bool]:
    """The flags of a job."""
    getattr(store, method)(1, keys, pages)
    assert store.drain(60.0), "the job does not end"
    [(_, flags)] = store.poll()
    return [*flags]


def looked_up(store: TierStore, *keys: bytes) -> list[bool | None]:
    """The flags of a lookup that has all answers."""
    end = time.monotonic() + 60.0
    while None in (flags := [*store.lookup(keys)]):
        assert time.monotonic() < end, "the lookup does not end"
        time.sleep(0.001)
    return flags
