"""Answers to lookups that were asked elsewhere, so that no caller waits (TIER-5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

_FOREVER = float("inf")


class LookupAnswers:
    """What is known of keys, and which of them are being asked for.

    1. An answer holds for ``seconds``: others put and evict too. What was asked ``patience``
       seconds ago without an answer is a miss.
    2. A key that failed is a miss until it is stored again, whatever answers come (TIER-4).
    3. An answer counts only while it is waited for: one that was asked before a key was stored
       says nothing of it.

    Not thread-safe: its owner has a lock.

    Args:
        clock: Seconds.
        patience: Seconds.
        seconds: That an answer holds.
        max_keys: That are remembered; of more the oldest are forgotten.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        patience: float = _FOREVER,
        seconds: float = 1.0,
        max_keys: int = 1 << 20,
    ) -> None:
        self._clock = clock
        self._patience = patience
        self._seconds = seconds
        self._max_keys = max_keys
        self._known: dict[bytes, tuple[bool, float]] = {}
        self._asked: dict[bytes, float] = {}
        self._is_asked = False
        self.num_unanswered = 0
        """Lookups that took longer than ``patience``, so far."""

    def flags(self, keys: Sequence[bytes]) -> tuple[list[bool | None], list[bytes]]:
        """What is known, and what must be asked now."""
        flags: list[bool | None] = []
        ask: list[bytes] = []
        now, known = self._clock(), self._known
        self._is_asked = True
        for key in keys:
            found = known.get(key)
            if found is not None and found[1] > now:
                flags.append(found[0])
            elif key not in self._asked:
                self._asked[key] = now
                ask.append(key)
                flags.append(None)
            else:
                flags.append(None if self.waits_for(key) else False)
        return flags, ask

    def waits_for(self, key: bytes) -> bool:
        """Whether an answer is waited for still; what was asked too long ago becomes a miss."""
        asked = self._asked.get(key)
        if asked is None or self._clock() - asked <= self._patience:
            return asked is not None
        self.num_unanswered += 1
        self._answer(key, False)
        return False

    def told(self, key: bytes, flag: bool) -> None:
        """The answer to what was asked."""
        if key in self._asked:
            self._answer(key, flag)

    def stored(self, key: bytes) -> None:
        """A put succeeded; not remembered before the first lookup, because a worker never asks."""
        if self._is_asked or key in self._known:
            self._answer(key, True)

    def failed(self, key: bytes) -> None:
        """A get failed, or a key was deleted that the store cannot delete."""
        self._answer(key, False, _FOREVER)

    def deleted(self, key: bytes) -> None:
        """The store is about to delete a key, and answers for itself from then on."""
        self._answer(key, False)

    def _answer(self, key: bytes, flag: bool, seconds: float | None = None) -> None:
        self._asked.pop(key, None)
        self._known.pop(key, None)
        now = self._clock()
        self._known[key] = (flag, now + self._seconds if seconds is None else seconds)
        # Two for each that comes, so that what has expired does not stay.
        for oldest in [*islice(self._known, 2)]:
            if len(self._known) > self._max_keys or self._known[oldest][1] <= now:
                del self._known[oldest]
