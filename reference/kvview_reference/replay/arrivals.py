"""The order in which, and the times at which, the requests of a trace may start."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvview_reference.engine.request import Request
from kvview_reference.replay.conversations import Conversations
from kvview_reference.replay.trace_schemas import TraceRequest


def by_arrival(rows: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Sort rows by arrival, for a trace in which each session starts at time 0.

    All rows are in memory during the sort, with 8 bytes for each block.
    """
    packed = [replace(row, hash_ids=array("Q", row.hash_ids)) for row in rows]
    yield from sorted(packed, key=lambda row: row.arrival_s)


class Arrivals:
    """A queue of the requests of a trace that have arrived and may start.

    1. Rows arrive in the order of the trace, the first row at time 0.
    2. A turn starts neither before its own time nor, if the trace names its previous turn, before
       that turn has ended. A turn that had to wait starts after the requests that arrived in the
       meantime.

    Args:
        rows: Rows of the trace.
        block_size: Number of tokens of a hash id.
        speed: Seconds of the trace in one simulated second; None lets all rows arrive at the start.

    Attributes:
        last_s: Arrival time of the latest row that has arrived.
    """

    def __init__(self, rows: Iterable[TraceRequest], block_size: int, speed: float | None) -> None:
        self._rows = iter(rows)
        self._next = next(self._rows, None)
        self._start_s = self._next.arrival_s if self._next else 0.0
        self._speed = speed
        self._conversations = Conversations(block_size)
        # For each request that rows continue: the order in which rows first waited for it, and the
        # rows.
        self._held: dict[str, tuple[int, list[TraceRequest]]] = {}
        self._num_held = 0
        self._taken: set[str] = set()  # requests that other rows continue
        self._waiting_ids: set[str] = set()  # of rows that have not started
        # And the time since which it could start.
        self._ready: deque[tuple[TraceRequest, float]] = deque()
        self.last_s = 0.0

    def next_s(self) -> float | None:
        """Return the arrival time of the next row; None at the end of the trace."""
        return None if self._next is None else self._arrival_s(self._next)

    def advance(self, now: float) -> None:
        """Queue the rows that have arrived, and the turns whose previous turn has ended."""
        while self._next is not None and self._arrival_s(self._next) <= now:
            self._read()
        self._release(now)

    def take(self) -> tuple[Request, TraceRequest, float] | None:
        """Take the next request that may start.

        Returns:
            The request, its row, and the time since which it could start; None if no request can
            start.
        """
        if self._speed is None:
            self._release(0.0)
            while self._next is not None and not self._ready:
                self._read()
        if not self._ready:
            return None
        row, since = self._ready.popleft()
        self._waiting_ids.discard(row.request_id)
        if row.request_id in self._held:
            self._taken.add(row.request_id)
        return self._conversations.make_request(row), row, since

    def _read(self) -> None:
        row, self._next = self._next, next(self._rows, None)
        assert row is not None
        since = self.last_s = max(self.last_s, self._arrival_s(row))
        if row.continues is not None and self._is_unfinished(row.continues):
            self._num_held += 1
            self._held.setdefault(row.continues, (self._num_held, []))[1].append(row)
            if row.continues not in self._waiting_ids:
                self._taken.add(row.continues)
        else:
            self._ready.append((row, since))
        self._waiting_ids.add(row.request_id)

    def _release(self, now: float) -> None:
        ended = {name for name in self._taken if not self._is_unfinished(name)}
        self._taken -= ended
        for _, rows in sorted(self._held.pop(name) for name in ended):
            self._ready += ((row, now) for row in rows)

    def _arrival_s(self, row: TraceRequest) -> float:
        return 0.0 if self._speed is None else (row.arrival_s - self._start_s) / self._speed

    def _is_unfinished(self, request_id: str) -> bool:
        return request_id in self._waiting_ids or self._conversations.is_unfinished(request_id)
