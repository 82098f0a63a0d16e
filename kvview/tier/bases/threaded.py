"""The base of stores for which the author writes three blocking methods."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

from kvview.errors import ConfigError, one_line
from kvview.tier.answers import LookupAnswers
from kvview.tier.namespace import Namespace
from kvview.tier.store import require_tier_job

_log = logging.getLogger(__name__)
_MAX_THREADS = 1024
_REMOVE = "remove"


def flag_of(method: str, answer: object) -> bool:
    """Return the result of a store's method as a flag.

    Raises:
        TypeError: The method returned None, because its author forgot to return a flag.
    """
    if answer is None:
        raise TypeError(f"{method} returned None, expected True if it succeeded and False if not")
    return bool(answer)


@dataclass(slots=True, eq=False)
class _Removal:
    keys: list[bytes]
    remove: Callable[[bytes], object]
    earlier: list[_Removal]
    """Removals of the same keys for which this removal waits."""
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class _Job:
    keys: list[bytes]
    pages: list[memoryview]
    is_get: bool
    flags: list[bool]
    removals: dict[bytes, _Removal]
    """Removals for which a put waits, because they were started before the put."""
    parts_left: int = 0


class Threaded(ABC):
    """The base of stores whose author writes ``has``, ``read_into`` and ``write``, which may block.

    1. The three methods are called from several threads at once, for different keys or for the same
       key.
    2. If a method raises, the key has failed; if ``has`` raises, the key is a miss. An exception
       is logged once; an ``OSError`` only at the level DEBUG.
    3. The base implements every call of :class:`~kvview.tier.TierStore`; the keys of a job are
       split over the threads.

    Args:
        namespace: Namespace of the store, which must share no bytes with other namespaces (use
            ``namespace.digest``).
        threads: Number of threads that call the three methods, at most 1,024.

    Raises:
        ConfigError: ``threads`` is not from 1 to 1,024.
    """

    keys_of_a_lookup = 64
    """Maximum of keys that one thread looks up in a row; choose a lower number for slow lookups."""

    def __init__(self, namespace: Namespace, *, threads: int = 4) -> None:
        if not 1 <= threads <= _MAX_THREADS:
            raise ConfigError(f"threads must be from 1 to {_MAX_THREADS}, got {threads}")
        self.namespace = namespace
        self._changed = threading.Condition()
        self.__tasks: deque[Callable[[], None]] = deque()
        self.__jobs: dict[int, _Job] = {}
        self.__done: list[tuple[int, list[bool]]] = []
        self.__removals: dict[bytes, _Removal] = {}  # the latest removal of each key
        self._answers = LookupAnswers()
        self._is_closed = False
        self.__wake_up: Callable[[], None] = lambda: None
        self.__logged: set[str] = set()
        self.__threads = [
            threading.Thread(target=self.__work, name=f"{type(self).__name__}-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self.__threads:
            thread.start()

    def has(self, key: bytes, /) -> bool:
        """Whether a key is stored completely.

        The default finds no key. The default is enough for a store of a
        ``StoreConnector`` without the option ``weights``, because such a connector
        makes no lookups.
        """
        return False

    @abstractmethod
    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        """Fill a page with exactly the bytes that were written; False if this is not possible."""

    @abstractmethod
    def write(self, key: bytes, page: memoryview, /) -> bool:
        """Store a page completely or not at all, and replace an older page.

        An older page of the key has the same bytes, unless it is damaged. So a store that removes
        damaged pages may keep the older page.
        """

    @final
    def put(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        """Start a store job."""
        self.__submit(job, keys, pages, is_get=False)

    @final
    def get(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        """Start a load job."""
        self.__submit(job, keys, pages, is_get=True)

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        """Return the known results; a thread looks up the other keys."""
        with self._changed:
            if self._is_closed:
                return [False] * len(keys)
            flags, ask = self._answers.flags(keys)
            for start in range(0, len(ask), self.keys_of_a_lookup):
                part = ask[start : start + self.keys_of_a_lookup]
                self.__tasks.appendleft(partial(self.__ask, part))  # before any I/O
                self._changed.notify()
        return flags

    @final
    def poll(self) -> list[tuple[int, list[bool]]]:
        """Return the jobs that ended."""
        with self._changed:
            done, self.__done = self.__done, []
        return done

    @final
    def drain(self, timeout: float, /) -> bool:
        """Wait for all jobs."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.__jobs, timeout)

    def close(self) -> None:
        """End the jobs in flight; jobs that no thread has started fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self.__threads:
            thread.join()
        with self._changed:  # parts that no thread has started
            for job, entry in self.__jobs.items():
                entry.pages = []
                self.__done.append((job, entry.flags))
            self.__jobs.clear()
        for removal in dict.fromkeys(self.__removals.values()):
            self.__remove(removal)

    @final
    def on_wake_up(self, wake_up: Callable[[], None], /) -> None:
        """Call ``wake_up`` when a job or a lookup has ended."""
        self.__wake_up = wake_up

    @final
    def remove_later(self, keys: Sequence[bytes], remove: Callable[[bytes], object], /) -> None:
        """Make keys a miss at once, and remove their pages on a thread; for use in ``delete``.

        1. A later job of a key waits for all earlier removals of the key. A removal does not wait
           for an earlier put.
        2. If ``remove`` raises, the page stays, and a lookup may find it again after a second.
        3. ``close`` runs the removals that no thread has started.

        Args:
            keys: Keys to remove.
            remove: Removes the page of a key, if the page exists; may block.
        """
        with self._changed:
            removal = _Removal([*keys], remove, [*self.__removals_of(keys).values()])
            for key in keys:
                self._answers.deleted(key)
                self.__removals[key] = removal
            self.__tasks.append(partial(self.__remove, removal))
            self._changed.notify()

    def _later(self, task: Callable[[], None]) -> None:
        """Run a task on a thread, for features of a store beyond the three methods."""
        with self._changed:
            self.__tasks.append(task)
            self._changed.notify()

    def _puts_of(self, keys: Sequence[bytes]) -> list[_Job]:
        """Return the puts of some keys that have not ended; the caller holds ``_changed``."""
        puts = [entry for entry in self.__jobs.values() if not entry.is_get]
        return [entry for entry in puts if not {*entry.keys}.isdisjoint(keys)]

    def __submit(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], is_get: bool
    ) -> None:
        with self._changed:
            in_flight = job in self.__jobs or any(job == done for done, _ in self.__done)
            require_tier_job(keys, pages, is_get=is_get, in_flight=in_flight)
            if self._is_closed or not keys:
                self.__done.append((job, [False] * len(keys)))
                return
            flags = [False] * len(keys)
            entry = _Job([*keys], [*pages], is_get, flags, self.__removals_of(keys))
            self.__jobs[job] = entry
            size = -(-len(keys) // len(self.__threads))
            for start in range(0, len(keys), size):
                part = range(start, min(start + size, len(keys)))
                entry.parts_left += 1
                self.__tasks.append(partial(self.__move, job, entry, part))
            self._changed.notify_all()

    def __work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.__tasks or self._is_closed)
                if self._is_closed:
                    return
                task = self.__tasks.popleft()
            task()
            del task  # because it refers to the pages of its job

    def __move(self, job: int, entry: _Job, part: range) -> None:
        name = "read_into" if entry.is_get else "write"
        for number in part:
            key = entry.keys[number]
            if removal := entry.removals.get(key):
                self.__wait_for(removal)
            flag = self.__tried(name, getattr(self, name), key, entry.pages[number])
            with self._changed:
                entry.flags[number] = flag
                if flag and not entry.is_get:
                    self._answers.stored(key)
                elif not flag and entry.is_get:
                    self._answers.failed(key)
        with self._changed:
            entry.parts_left -= 1
            if entry.parts_left:
                return
            entry.pages = []
            self.__jobs.pop(job, None)
            self.__done.append((job, entry.flags))
            self._changed.notify_all()
        self.__wake_up()

    def __removals_of(self, keys: Sequence[bytes]) -> dict[bytes, _Removal]:
        """Return the latest removal of each key; the caller holds ``_changed``."""
        return {key: self.__removals[key] for key in keys if key in self.__removals}

    def __wait_for(self, removal: _Removal) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or removal.has_ended)

    def __remove(self, removal: _Removal) -> None:
        for earlier in removal.earlier:
            self.__wait_for(earlier)
        removal.earlier.clear()
        for key in removal.keys:
            self.__tried(_REMOVE, removal.remove, key)
        with self._changed:
            removal.has_ended = True
            for key in removal.keys:
                if self.__removals.get(key) is removal:
                    del self.__removals[key]
                    self._answers.deleted(key)  # because a lookup may have found the key meanwhile
            self._changed.notify_all()

    def __ask(self, keys: list[bytes]) -> None:
        flags = [self.__tried("has", self.has, key) for key in keys]
        with self._changed:
            for key, flag in zip(keys, flags, strict=True):
                self._answers.looked_up(key, flag)
        self.__wake_up()

    def __tried(self, name: str, call: Callable[..., object], *args: object) -> bool:
        try:
            answer = call(*args)
            return name == _REMOVE or flag_of(name, answer)
        except Exception as error:
            kind = f"{name} {type(error).__name__}"
            if kind not in self.__logged:
                self.__logged.add(kind)
                level = logging.DEBUG if isinstance(error, OSError) else logging.WARNING
                _log.log(level, "%s.%s: %s", type(self).__name__, name, one_line(error))
            return False
