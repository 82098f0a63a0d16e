"""The guard of a tier as an executable model of its strikes, pauses and counters."""

from __future__ import annotations

from collections import Counter

PUT_FAULTS = {
    "": "",
    "is full": "failed",
    "put raises": "raised",
    "put exits": "raised",
    "too few flags": "malformed",
    "too many flags": "malformed",
    "flags are None": "malformed",
    "reports twice": "unknown",
    "never reports": "late",
}
"""Faults of a put, each with the counter of the guard that it increases by one."""

GET_FAULTS = {
    "": "",
    "get raises": "raised",
    "flips a bit": "damaged",
    "too few flags": "malformed",
    "never reports": "late",
}
LOOKUP_FAULTS = {
    "": "",
    "lookup raises": "raised",
    "lookup is None": "malformed",
    "lookup has too few flags": "malformed",
    "lookup never knows": "unanswered",
}
_STRIKES = ("raised", "malformed", "late", "unanswered")


class TierGuardModel:
    """The strikes and counters of a guard whose jobs come one after the other (TIER-12).

    Args:
        trip_after: Number of consecutive strikes after which the store is paused.
        retry_after: Seconds until a trial job; doubled after each failed trial.
    """

    def __init__(self, trip_after: int, retry_after: float) -> None:
        self.trip_after = trip_after
        self.retry_after = self.pause = retry_after
        self.strikes = 0
        self.until: float | None = None
        """The time at which the guard tries a paused store again."""
        self.counts: Counter[str] = Counter()

    def reaches(self, now: float) -> bool:
        """Whether the guard passes a job to the store."""
        return self.until is None or now >= self.until

    def job(self, method: str, count: str, num_keys: int, now: float) -> bool:
        """End a job that increases the counter ``count``; returns whether its keys succeed."""
        if not self.reaches(now):
            self.counts += Counter(refused=1, failed=num_keys)
            return False
        is_good = count in ("", "unknown")
        self.counts[f"{method}s" if is_good else "failed"] += num_keys
        if count in _STRIKES:
            self.counts[count] += 1
            self.strike(now)
            return False
        if count == "damaged":
            self.counts["damaged"] += num_keys
        self.counts["unknown"] += count == "unknown"
        self.strikes, self.until = 0, None
        return is_good

    def lookup(self, count: str, now: float) -> None:
        """End a lookup that increases the counter ``count``."""
        if self.reaches(now) and count:
            self.counts[count] += 1
            self.strike(now)

    def strike(self, now: float) -> None:
        """Count a strike; the store is paused after several strikes, or after one in a trial."""
        self.strikes += 1
        if self.until is not None:
            self.pause = min(2 * self.pause, 16 * self.retry_after)
        elif self.strikes < self.trip_after:
            return
        else:
            self.pause = self.retry_after
        self.until = now + self.pause
        self.counts["trips"] += 1
