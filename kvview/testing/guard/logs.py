"""The capture of log messages during a check; they are not printed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override


@contextmanager
def logged() -> Iterator[list[str]]:
    """Capture warnings and errors that the ``with`` block logs; other handlers get none."""
    messages: list[str] = []

    class Keep(logging.Handler):
        @override
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    root = logging.getLogger()
    before = root.handlers
    gc.collect()  # so that an object that an earlier check dropped logs before the block
    root.handlers = [Keep(logging.WARNING)]
    try:
        yield messages
    finally:
        root.handlers = before
