"""A circuit breaker, which stops the use of a store that fails several times in a row."""

from __future__ import annotations

from collections.abc import Callable


class CircuitBreaker:
    """Counts consecutive faults (strikes) of a store, and opens after several strikes.

    1. After ``trip_after`` strikes the breaker is open, and no job passes for ``retry_after``
       seconds.
    2. After this time, one job is passed to the store as a trial. If the trial succeeds, the
       breaker closes. If the trial fails, the breaker stays open for twice as long, at most 16
       times ``retry_after``.
    3. Lookups pass while the breaker is not open, and do not change its state.

    Args:
        clock: Returns seconds.
        trip_after: Number of consecutive strikes that open the breaker.
        retry_after: Seconds until the first trial.
    """

    def __init__(self, clock: Callable[[], float], trip_after: int, retry_after: float) -> None:
        self._clock = clock
        self._trip_after = trip_after
        self._retry_after = self._pause = retry_after
        self._strikes = 0
        self._until: float | None = None
        self._trial: int | None = None
        self.num_trips = 0
        """Number of times that the breaker opened."""

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open, so that no job passes."""
        return self._until is not None and self._clock() < self._until

    def passes(self, job: int) -> bool:
        """Whether a job may go to the store."""
        if self._until is None:
            return True
        if self._clock() < self._until or self._trial is not None:
            return False
        self._trial = job
        return True

    def strike(self) -> None:
        """Count a strike of the store."""
        self._strikes += 1
        if self._until is not None:
            if self._clock() >= self._until:
                self._open(min(2 * self._pause, 16 * self._retry_after))
        elif self._strikes >= self._trip_after:
            self._open(self._retry_after)

    def ended_well(self, job: int) -> None:
        """Record a job that the store reported correctly; while open, only the trial matters."""
        if self._until is None or job == self._trial:
            self._strikes, self._until, self._trial = 0, None, None

    def _open(self, pause: float) -> None:
        self._pause, self._trial = pause, None
        self._until = self._clock() + pause
        self.num_trips += 1
