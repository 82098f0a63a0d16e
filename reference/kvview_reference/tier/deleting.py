"""The base of the stores of this package: a deleted key is hidden before its page is removed."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvview.tier import Namespace, Threaded


class DeletingStore(Threaded):
    """``Threaded`` with ``delete``; a subclass implements four methods, which may block.

    1. A key that was deleted, or whose page had wrong bytes, is hidden: it is a miss until a put
       replaces its page. A thread removes the page. If this fails (the medium cannot be written, or
       the credentials do not permit it), the key stays hidden.
    2. A put of a hidden key replaces the old page and makes the key visible again. A put of any
       other key keeps the old page.

    Args:
        namespace: Namespace of the store.
        threads: Number of threads that call the four methods.
    """

    def __init__(self, namespace: Namespace, *, threads: int) -> None:
        self._hidden: set[bytes] = set()
        self._deleted: set[bytes] = set()
        """Keys whose pages are being removed; ``close`` removes the remaining ones."""
        self._removing = threading.Lock()
        self._damaged: Callable[[Sequence[bytes]], object] = lambda keys: None
        super().__init__(namespace, threads=threads)

    @abstractmethod
    def holds(self, key: bytes, /) -> bool:
        """Whether a page of a key is stored."""

    @abstractmethod
    def load(self, key: bytes, page: memoryview, /) -> bool:
        """Fill a page; return False if the stored bytes are wrong and must be removed.

        Raises:
            OSError: No page is stored, or the page cannot be read now.
        """

    @abstractmethod
    def store(self, key: bytes, page: memoryview, *, is_replaced: bool) -> bool:
        """Store a page completely or not at all; keep an old page unless ``is_replaced``."""

    @abstractmethod
    def remove(self, key: bytes, /) -> None:
        """Remove the page of a key, if it exists.

        Raises:
            OSError: The page cannot be removed.
        """

    def has(self, key: bytes, /) -> bool:
        """Whether a key is stored and not hidden."""
        return key not in self._hidden and self.holds(key)

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        """Load a page, and remove a page with wrong bytes."""
        if key in self._hidden:
            return False
        if self.load(key, page):
            return True
        with self._changed:
            is_new = key not in self._hidden
            self._hidden.add(key)
        if is_new:  # another thread may have read the same file
            self._damaged([key])
        self._remove_hidden([key])
        return False

    def write(self, key: bytes, page: memoryview, /) -> bool:
        """Store a page, unless the key is stored and not hidden."""
        if key not in self._hidden:
            return self.store(key, page, is_replaced=False)
        with self._removing:  # otherwise a removal under way may end after the store
            is_stored = self.store(key, page, is_replaced=True)
            if is_stored:
                self._hidden.discard(key)
            return is_stored

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        """Return the known results; a hidden key is a miss, even if its put has just ended."""
        flags, hidden = super().lookup(keys), self._hidden
        return [False if key in hidden else flag for key, flag in zip(keys, flags, strict=True)]

    def on_damaged(self, damaged: Callable[[Sequence[bytes]], None], /) -> None:
        """Call ``damaged`` with each key whose load found other bytes than were put."""
        self._damaged = damaged

    def delete(self, keys: Sequence[bytes], /) -> None:
        """Hide keys now, and remove their pages on a thread."""
        self._hidden.update(keys)
        self._deleted.update(keys)
        with self._changed:
            for key in keys:
                self._answers.deleted(key)
            under_way = self._puts_of(keys)
        self._later(partial(self._delete, [*keys], under_way))

    def close(self) -> None:
        """End the jobs in flight, and remove the pages of deleted keys."""
        super().close()
        self._remove_hidden([*self._deleted])

    def _delete(self, keys: Sequence[bytes], under_way: Sequence[Any]) -> None:
        """Remove keys, after the puts of these keys by other threads have ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or not any(entry.parts_left for entry in under_way)
            )
        self._remove_hidden(keys)
        self._deleted.difference_update(keys)

    def _remove_hidden(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            with self._removing, suppress(OSError):
                if key in self._hidden:
                    self.remove(key)
                    with self._changed:
                        self._answers.deleted(key)  # even if a put has ended meanwhile
                    self._hidden.discard(key)
