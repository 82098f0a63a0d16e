"""Results of lookups that run on another thread, so that no caller waits (TIER-5)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice

_FOREVER = float("inf")
_UNREAD = 10.0  # seconds for which the result of a lookup waits for its first reader


class LookupAnswers:
    """The known results of lookups, and the keys whose lookups have not ended.

    1. A result is valid for ``seconds``, because other processes also put and evict keys. A result
       that no caller has read is valid for ten seconds, because a step of an engine may take longer
       than ``seconds``. A lookup that has no result after ``patience`` seconds is a miss.
    2. A key that failed is a miss until it is stored again, whatever the store returns (TIER-4).
    3. The result of a lookup is dropped if a put, a failed get or a deletion of the key came first,
       because the lookup may have started before it.

    This class is not thread-safe; its owner holds a lock.

    Args:
        clock: Returns seconds.
        patience: Seconds until a lookup without a result is a miss.
        seconds: Seconds for which a result is valid.
        max_keys: Maximum of results that are kept; the oldest results are dropped first.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        patience: float = _FOREVER,
        seconds: float = 1.0,
        max_keys: int = 1 << 20,
    ) -> None:
        self._clock = clock
        self._patience = patience
        self._seconds = seconds
        self._max_keys = max_keys
        self._known: dict[bytes, tuple[bool, float]] = {}  # in order of arrival
        self._failed: dict[bytes, None] = {}
        self._asked: dict[bytes, float] = {}
        self._is_asked = False
        self.num_unanswered = 0
        """Number of lookups so far that took longer than ``patience``."""

    def flags(self, keys: Sequence[bytes]) -> tuple[list[bool | None], list[bytes]]:
        """Return the known results, and the keys whose lookups must start now."""
        flags: list[bool | None] = []
        ask: list[bytes] = []
        now, known = self._clock(), self._known
        self._is_asked = True
        for key in keys:
            found = known.get(key)
            if key in self._failed:
                flags.append(False)
            elif found is not None and found[1] > now:
                flags.append(found[0])
                if found[1] > now + self._seconds:
                    known[key] = found[0], now + self._seconds
            elif key not in self._asked:
                self._asked[key] = now
                ask.append(key)
                flags.append(None)
            else:
                flags.append(None if self.waits_for(key) else False)
        return flags, ask

    def waits_for(self, key: bytes) -> bool:
        """Whether a lookup has not ended; a lookup that takes too long becomes a miss."""
        asked = self._asked.get(key)
        if asked is None or self._clock() - asked <= self._patience:
            return asked is not None
        self.num_unanswered += 1
        self._answer(key, False)
        return False

    def looked_up(self, key: bytes, flag: bool) -> None:
        """Record the result of a lookup; ignored if the lookup has already ended otherwise."""
        if key in self._asked:
            self._answer(key, flag, _UNREAD)

    def stored(self, key: bytes) -> None:
        """Record a successful put; ignored before the first lookup."""
        if self._is_asked or key in self._failed:
            self._answer(key, True)

    def failed(self, key: bytes) -> None:
        """Record a get that failed, or the deletion of a key that the store cannot delete."""
        self._asked.pop(key, None)
        self._failed[key] = None
        if len(self._failed) > self._max_keys:
            del self._failed[next(iter(self._failed))]

    def deleted(self, key: bytes) -> None:
        """Record that the store deletes a key; later lookups of the store find it missing."""
        self._answer(key, False)

    def _answer(self, key: bytes, flag: bool, seconds: float = 0.0) -> None:
        self._asked.pop(key, None)
        self._known.pop(key, None)
        self._failed.pop(key, None)
        now = self._clock()
        self._known[key] = flag, now + max(seconds, self._seconds)
        # Drop up to two old results for each new one, so that expired results do not accumulate.
        for oldest in [*islice(self._known, 2)]:
            if len(self._known) > self._max_keys or self._known[oldest][1] <= now:
                del self._known[oldest]
