"""Which request of a trace comes next, and when."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvview_reference.engine.request import Request
from kvview_reference.replay.conversations import Conversations
from kvview_reference.replay.trace_schemas import TraceRequest


def by_arrival(rows: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Rows of sessions that each begin at 0, in the order in which they come.

    All of them are in memory meanwhile, 8 bytes a block.
    """
    packed = [replace(row, hash_ids=array("Q", row.hash_ids)) for row in rows]
    yield from sorted(packed, key=lambda row: row.arrival_s)


class Arrivals:
    """The requests of a trace, each when it has come and it is its turn.

    1. Rows come in the order of the trace, the first one at 0.
    2. A turn never comes before the one before it, as far as the trace says which that is,
       has ended; nor before its own time. It then waits behind those that came meanwhile.

    Args:
        rows: Of the trace.
        block_size: Tokens of a hash id.
        speed: Seconds of the trace in one second; None: all come at once.

    Attributes:
        last_s: When the last row that has come did so.
    """

    def __init__(self, rows: Iterable[TraceRequest], block_size: int, speed: float | None) -> None:
        self._rows = iter(rows)
        self._next = next(self._rows, None)
        self._start_s = self._next.arrival_s if self._next else 0.0
        self._speed = speed
        self._conversations = Conversations(block_size)
        # By the request that they continue: when the first was held, and all of them.
        self._held: dict[str, tuple[int, list[TraceRequest]]] = {}
        self._num_held = 0
        self._taken: set[str] = set()  # requests that others continue, and that may have ended
        self._waiting_ids: set[str] = set()  # of rows that were read and not taken
        self._ready: deque[tuple[TraceRequest, float]] = deque()  # since when
        self.last_s = 0.0

    def next_s(self) -> float | None:
        """When the next row comes; None when none does."""
        return None if self._next is None else self._arrival_s(self._next)

    def advance(self, now: float) -> None:
        """Let all come that have come by now: rows, and turns whose turn before has ended."""
        while self._next is not None and self._arrival_s(self._next) <= now:
            self._read()
        self._release(now)

    def take(self) -> tuple[Request, TraceRequest, float] | None:
        """The next request that may start.

        Returns:
            The request, its row, and since when it might have started; None: not now.
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
