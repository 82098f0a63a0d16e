"""A store of coroutines: all of them end with the store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from typing_extensions import override

from kvview.tier import AsyncStore, Namespace
from kvview.tier.bases import async_store

MODEL = Namespace("m", weights="1")


class SlowDictionary(AsyncStore):
    def __init__(self, namespace: Namespace = MODEL, seconds: float = 0.0) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.seconds = seconds
        self.is_connected = True
        super().__init__(namespace)

    @override
    async def find(self, key: bytes, /) -> bool:
        await asyncio.sleep(self.seconds)
        return key in self.pages

    @override
    async def fetch(self, key: bytes, page: memoryview, /) -> bool:
        await asyncio.sleep(self.seconds)
        page[:] = self.pages[key]
        return True

    @override
    async def send(self, key: bytes, page: memoryview, /) -> bool:
        await asyncio.sleep(self.seconds)
        self.pages[key] = bytes(page)
        return True

    async def drop(self, key: bytes) -> None:
        await asyncio.sleep(self.seconds)
        del self.pages[key]

    def delete(self, keys: Sequence[bytes], /) -> None:
        self.remove_later(keys, lambda key: self.run(self.drop(key)))

    @override
    async def disconnect(self) -> None:
        self.is_connected = False


def test_the_thread_ends_although_disconnect_raises() -> None:
    class CannotDisconnect(SlowDictionary):
        @override
        async def disconnect(self) -> None:
            raise ConnectionResetError("the server has gone")

    before = threading.active_count()
    store = CannotDisconnect()
    with pytest.raises(ConnectionResetError, match="the server has gone"):
        store.close()
    assert threading.active_count() == before


def test_close_ends_coroutines_that_never_end() -> None:
    before = threading.active_count()
    store = SlowDictionary(seconds=1e6)
    store.put(1, [b"key"], [memoryview(bytearray(8))])
    store.close()
    assert store.poll() == [(1, [False])]
    assert not store.is_connected
    assert threading.active_count() == before


def test_close_lets_removals_end() -> None:
    store = SlowDictionary(seconds=0.02)
    keys = [b"%d" % number for number in range(40)]  # more than threads
    store.put(1, keys, [memoryview(bytearray(8)) for _ in keys])
    assert store.drain(10.0)
    assert len(store.pages) == 40
    for key in keys:
        store.delete([key])
    store.close()
    assert not store.pages


def test_close_ends_removals_that_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_store, "_LONGEST_REMOVAL", 0.2)
    before = threading.active_count()
    store = SlowDictionary()
    store.seconds = 1e6
    store.delete([b"key"])
    store.close()
    assert not store.is_connected
    assert threading.active_count() == before
    with pytest.raises(OSError, match="the store is closed"):
        store.run(store.drop(b"key"))


class ToThread(SlowDictionary):
    @override
    async def fetch(self, key: bytes, page: memoryview, /) -> bool:
        return await asyncio.to_thread(bool, key)


def test_close_ends_the_threads_of_to_thread() -> None:
    before = {*threading.enumerate()}
    store = ToThread()
    store.get(1, [b"key"], [memoryview(bytearray(4))])
    assert store.drain(10.0)
    store.close()
    assert {*threading.enumerate()} == before
