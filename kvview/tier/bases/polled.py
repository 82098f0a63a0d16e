"""The base of stores that poll for ended jobs, such as a store over an engine's own tier."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

from kvview.tier.namespace import Namespace
from kvview.tier.store import require_tier_job

_BETWEEN_POLLS = 0.0003  # seconds


class Polled(ABC):
    """Tracks the jobs of a store; the author writes methods that start jobs and find ended ones.

    1. ``begin`` is called with well-formed jobs that have at least one key.
    2. ``collect`` calls :meth:`report` for each job that ended.
    3. All calls come from one thread.

    Args:
        namespace: Namespace of the store.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self._num_keys: dict[int, int] = {}  # of jobs that have not ended
        self._done: dict[int, list[bool]] = {}  # until poll returns them
        self._is_closed = False

    @abstractmethod
    def begin(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], *, is_get: bool
    ) -> None:
        """Start a job."""

    @abstractmethod
    def collect(self) -> None:
        """Report the jobs that ended, without waiting."""

    @abstractmethod
    def end(self) -> None:
        """Release all resources; called once, after which no page may be touched."""

    @final
    def report(self, job: int, flags: list[bool]) -> None:
        """Record the end of a job."""
        del self._num_keys[job]
        self._done[job] = flags

    @final
    def put(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        """Start a store job."""
        self._start(job, keys, pages, is_get=False)

    @final
    def get(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        """Start a load job."""
        self._start(job, keys, pages, is_get=True)

    @final
    def poll(self) -> list[tuple[int, list[bool]]]:
        """Return the jobs that ended."""
        if not self._is_closed:
            self.collect()
        done, self._done = self._done, {}
        return [*done.items()]

    @final
    def drain(self, timeout: float, /) -> bool:
        """Wait for all jobs."""
        until = time.monotonic() + timeout
        while self._num_keys and not self._is_closed:
            self.collect()
            if time.monotonic() > until:
                break
            time.sleep(_BETWEEN_POLLS)
        return not self._num_keys

    @final
    def close(self) -> None:
        """Close the store and fail the jobs in flight."""
        if not self._is_closed:
            self.end()
            self._is_closed = True
        for job, num_keys in [*self._num_keys.items()]:
            self.report(job, [False] * num_keys)

    def _start(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], *, is_get: bool
    ) -> None:
        in_flight = job in self._num_keys or job in self._done
        require_tier_job(keys, pages, is_get=is_get, in_flight=in_flight)
        self._num_keys[job] = len(keys)
        if self._is_closed or not keys:
            self.report(job, [False] * len(keys))
            return
        try:
            self.begin(job, keys, pages, is_get=is_get)
        except BaseException:
            self._num_keys.pop(job, None)
            raise
