"""The base of stores with an asyncio client, for which the author writes three coroutines."""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar, final

from typing_extensions import override

from kvview.tier.bases.threaded import Threaded
from kvview.tier.namespace import Namespace

ResultT = TypeVar("ResultT")


class AsyncStore(Threaded):
    """The base of stores whose author writes the coroutines ``find``, ``fetch`` and ``send``.

    1. All coroutines run in one thread, so they share a client without locks.
    2. If ``fetch`` or ``send`` raises, the key has failed; if ``find`` raises, the key is a miss.
    3. ``close`` cancels the coroutines that still run, and then awaits ``disconnect``. Unfinished
       removals fail. The threads end even if ``disconnect`` raises.

    Args:
        namespace: Namespace of the store, which must share no bytes with other namespaces (use
            ``namespace.digest``).
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
        """Whether a key is stored completely; by default False, as for ``Threaded.has``."""
        return False

    @abstractmethod
    async def fetch(self, key: bytes, page: memoryview, /) -> bool:
        """Fill a page with exactly the bytes that were sent; False if this is not possible."""

    @abstractmethod
    async def send(self, key: bytes, page: memoryview, /) -> bool:
        """Store a page completely or not at all."""

    async def disconnect(self) -> None:
        """Close the client."""

    @final
    @override
    def has(self, key: bytes, /) -> bool:
        return self.run(self.find(key))

    @final
    @override
    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        return self.run(self.fetch(key, page))

    @final
    @override
    def write(self, key: bytes, page: memoryview, /) -> bool:
        return self.run(self.send(key, page))

    @final
    def run(self, call: Coroutine[Any, Any, ResultT], /) -> ResultT:
        """Run a coroutine to its end, for example in ``delete``; must not be called in a coroutine.

        Raises:
            OSError: The store is closed.
        """
        with self._starting:
            if self._is_ending:
                call.close()
                raise OSError("the store is closed, so it accepts no jobs")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise OSError("the store was closed during this job") from None

    @override
    def close(self) -> None:
        """End the coroutines, the threads and the loop."""
        if not self._loop.is_closed():
            with self._starting:  # so that every coroutine is either cancelled or refused
                self._is_ending = True
                self._loop.call_soon_threadsafe(self._cancel_all)
            super().close()
            try:
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop_thread.join()
                self._loop.close()

    async def _end(self) -> None:
        try:
            await self.disconnect()
        finally:
            await self._loop.shutdown_default_executor()  # the threads of asyncio.to_thread

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
