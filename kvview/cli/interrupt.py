"""Handling of Ctrl-C in commands that read rows, which then report the partial result."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from kvview.cli.echo import echo

RowT = TypeVar("RowT")


class UntilInterrupted(Generic[RowT]):
    """Rows that end at the first Ctrl-C; a second Ctrl-C ends the command without a result.

    Args:
        rows: The rows, iterated once, on the main thread.
    """

    def __init__(self, rows: Iterable[RowT]) -> None:
        self._rows = rows
        self.is_interrupted = False
        """Whether the rows ended early."""

    def __iter__(self) -> Iterator[RowT]:
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            for row in self._rows:
                yield row
                if self.is_interrupted:
                    return
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_interrupt(self, *_: object) -> None:
        self.is_interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        echo("kvview: interrupted: the result covers only the requests so far", err=True)
