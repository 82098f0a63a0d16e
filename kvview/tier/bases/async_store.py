"""The base of stores with an asyncio client, for which the author writes three coroutines."""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Coroutine, Iterable
from concurrent.futures import CancelledError
from typing import Any, TypeVar, final

from typing_extensions import override

from kvview.tier.bases.threaded import Threaded
from kvview.tier.namespace import Namespace

ResultT = TypeVar("ResultT")
_LONGEST_REMOVAL = 5.0  # seconds for the removals that run at the end


class AsyncStore(Threaded):
    """The base of stores whose author writes the coroutines ``find``, ``fetch`` and ``send``.

    1. All coroutines run in one thread, so they share a client without locks.
    2. If ``fetch`` or ``send`` raises, the key has failed; if ``find`` raises, the key is a miss.
    3. ``close`` cancels the coroutines of jobs and lookups, gives those of removals five seconds,
       and then awaits ``disconnect``. The threads end even if ``disconnect`` raises.

    Args:
        namespace: Namespace of the store, which must share no bytes with other namespaces (use
            ``namespace.digest``).
        at_once: Maximum of coroutines that run at the same time.
    """

    def __init__(self, namespace: Namespace, *, at_once: int = 16) -> None:
        self._loop = asyncio.new_event_loop()
        self._starting = threading.Lock()
        self._jobs: set[asyncio.Task[Any] | None] = set()
        self._is_ending = False  # no job starts
        self._has_ended = False  # no coroutine starts
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
        return self.run(self._job(self.find(key)))

    @final
    @override
    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        return self.run(self._job(self.fetch(key, page)))

    @final
    @override
    def write(self, key: bytes, page: memoryview, /) -> bool:
        return self.run(self._job(self.send(key, page)))

    @final
    def run(self, call: Coroutine[Any, Any, ResultT], /) -> ResultT:
        """Run a coroutine to its end, for example in ``delete``; must not be called in a coroutine.

        Raises:
            OSError: The store is closed.
        """
        with self._starting:
            if self._has_ended:
                call.close()
                raise OSError("the store is closed, so it accepts no jobs")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise OSError("the store was closed during this job") from None

    async def _job(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine that ``close`` cancels."""
        if self._is_ending:
            call.close()
            raise OSError("the store is closed, so it accepts no jobs")
        task = asyncio.current_task()
        self._jobs.add(task)
        try:
            return await call
        finally:
            self._jobs.discard(task)

    @override
    def close(self) -> None:
        """End the coroutines, the threads and the loop."""
        if not self._loop.is_closed():
            self._is_ending = True
            self._loop.call_soon_threadsafe(self._cancel, self._jobs)
            limit = threading.Timer(_LONGEST_REMOVAL, self._end_removals)
            limit.start()
            super().close()
            limit.cancel()
            limit.join()
            self._end_removals()
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

    def _end_removals(self) -> None:
        with self._starting:  # so that every coroutine is either cancelled or refused
            self._has_ended = True
            self._loop.call_soon_threadsafe(lambda: self._cancel(asyncio.all_tasks()))

    def _cancel(self, tasks: Iterable[asyncio.Task[Any] | None]) -> None:
        for task in filter(None, [*tasks]):
            task.cancel()
