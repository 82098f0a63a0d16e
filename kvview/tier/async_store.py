"""The base of a store with an asyncio client, whose author writes three coroutines."""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar, final

from typing_extensions import override

from kvview.tier.namespace import Namespace
from kvview.tier.threaded import Threaded

ResultT = TypeVar("ResultT")


class AsyncStore(Threaded):
    """The base of stores whose author writes the coroutines ``find``, ``fetch`` and ``send``.

    1. All coroutines run in one thread, so they share a client without locks.
    2. If one of them raises, the key fails, or is a miss for ``find``.
    3. ``close`` cancels the coroutines that still run, and then awaits ``disconnect``.

    Args:
        namespace: Namespace of the store; keep it apart from every other (``namespace.digest``).
        at_once: Maximum of coroutines that run at the same time.
    """

    def __init__(self, namespace: Namespace, *, at_once: int = 16) -> None:
        self._loop = asyncio.new_event_loop()
        self._starting = threading.Lock()
        self._is_ending = False
        self._loop_thread = threading.Thread(
            target=self._loop.run_forever, name=f"{type(self).__name__}-loop", daemon=True
        )
        self._loop_thread.start()
        super().__init__(namespace, threads=at_once)

    async def find(self, key: bytes, /) -> bool:
        """Whether a key is stored completely; the default finds no key, like ``Threaded.has``."""
        return False

    @abstractmethod
    async def fetch(self, key: bytes, page: memoryview, /) -> bool:
        """Fill a page with exactly the bytes that were sent; False if that is impossible."""

    @abstractmethod
    async def send(self, key: bytes, page: memoryview, /) -> bool:
        """Store a page whole or not at all."""

    async def disconnect(self) -> None:
        """Close the client."""

    @final
    @override
    def has(self, key: bytes, /) -> bool:
        return self._run(self.find(key))

    @final
    @override
    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        return self._run(self.fetch(key, page))

    @final
    @override
    def write(self, key: bytes, page: memoryview, /) -> bool:
        return self._run(self.send(key, page))

    @override
    def close(self) -> None:
        """End the coroutines, the threads and the loop."""
        if not self._loop.is_closed():
            with self._starting:  # so that every coroutine is either cancelled or refused
                self._is_ending = True
                self._loop.call_soon_threadsafe(self._cancel_all)
            super().close()
            asyncio.run_coroutine_threadsafe(self.disconnect(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join()
            self._loop.close()

    def _run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        with self._starting:
            if self._is_ending:
                call.close()
                raise OSError("the store is closed, so it accepts no jobs")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise OSError("the store was closed during this job") from None

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
