"""What the stores here share: keys that are hidden before what is stored of them is gone."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvview.tier import Namespace, Threaded


class DeletingStore(Threaded):
    """``Threaded`` with ``delete``, for who writes four calls that may block.

    1. A key that was deleted, or that failed to load, is a miss from then on. What is stored of
       it is removed on a thread; where that fails (a medium that cannot be written, credentials
       that may not delete) it stays hidden.
    2. A put of a hidden key replaces what is there, and shows it again; of any other key it
       keeps what is there.

    Args:
        namespace: Whose bytes.
        threads: That call them.
    """

    def __init__(self, namespace: Namespace, *, threads: int) -> None:
        self._hidden: set[bytes] = set()
        self._deleted: set[bytes] = set()
        """Keys whose removal is under way; close removes them."""
        self._removing = threading.Lock()
        self._damaged: Callable[[Sequence[bytes]], object] = lambda keys: None
        super().__init__(namespace, threads=threads)

    @abstractmethod
    def holds(self, key: bytes, /) -> bool:
        """Whether something is stored of a key."""

    @abstractmethod
    def load(self, key: bytes, page: memoryview, /) -> bool:
        """Fill a page; False when what is stored is not what was put, and must go.

        Raises:
            OSError: There is nothing, or it cannot be read now.
        """

    @abstractmethod
    def store(self, key: bytes, page: memoryview, *, is_replaced: bool) -> bool:
        """Store a page whole or not at all; keep what is there unless it is to be replaced."""

    @abstractmethod
    def remove(self, key: bytes, /) -> None:
        """Remove what is stored, if there is something.

        Raises:
            OSError: It cannot be removed.
        """

    def has(self, key: bytes, /) -> bool:
        """Whether a key is stored and not hidden."""
        return key not in self._hidden and self.holds(key)

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        """Load; what is wrong is removed."""
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
        """Store, unless it is there and not hidden."""
        if key not in self._hidden:
            return self.store(key, page, is_replaced=False)
        with self._removing:  # else a removal on its way may end after this
            is_stored = self.store(key, page, is_replaced=True)
            if is_stored:
                self._hidden.discard(key)
            return is_stored

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        """What is known; a hidden key is a miss, also when a put of it ends just now."""
        flags, hidden = super().lookup(keys), self._hidden
        return [False if key in hidden else flag for key, flag in zip(keys, flags, strict=True)]

    def on_damaged(self, damaged: Callable[[Sequence[bytes]], None], /) -> None:
        """Call ``damaged`` with each key whose load found other bytes than were put."""
        self._damaged = damaged

    def delete(self, keys: Sequence[bytes], /) -> None:
        """Hide keys now, and remove what is stored of them on a thread."""
        self._hidden.update(keys)
        self._deleted.update(keys)
        with self._changed:
            for key in keys:
                self._answers.deleted(key)
            puts = [entry for entry in self._jobs.values() if not entry.is_get]
            under_way = [entry for entry in puts if not {*entry.keys}.isdisjoint(keys)]
        self._later(partial(self._delete, [*keys], under_way))

    def close(self) -> None:
        """End what is in flight, and remove what was deleted."""
        super().close()
        self._remove_hidden([*self._deleted])

    def _delete(self, keys: Sequence[bytes], under_way: Sequence[Any]) -> None:
        """Remove keys when puts from before have ended: other threads are at them, or done."""
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
                        self._answers.deleted(key)  # whatever a put has said meanwhile
                    self._hidden.discard(key)
