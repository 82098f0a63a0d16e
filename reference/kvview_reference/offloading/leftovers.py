"""Memory of dicts that a reset has dropped, which is freed in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Leftovers:
    """Frees dicts that are no longer used, a few entries at a time.

    Freeing a dict of a million keys at once takes 20 ms or more, during which a step would wait.
    """

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []

    def add(self, dicts: Iterable[dict[Any, Any]]) -> None:
        """Take over dicts, which must be the only references to their entries."""
        self._dicts += dicts

    def drop(self, num_entries: int) -> None:
        """Free this number of entries."""
        while self._dicts and num_entries > 0:
            entries = self._dicts[-1]
            num_popped = min(num_entries, len(entries))
            for _ in range(num_popped):
                entries.popitem()
            num_entries -= num_popped
            if not entries:
                self._dicts.pop()

    def __len__(self) -> int:
        return sum(map(len, self._dicts))

    def clear(self) -> None:
        """Free all entries at once."""
        self._dicts.clear()
