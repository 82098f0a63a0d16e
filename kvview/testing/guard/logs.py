"""The capture of log messages during a check, so that the messages are not printed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override


@contextmanager
def logged() -> Iterator[list[str]]:
    """Capture warnings and errors that the ``with`` block logs, in place of other handlers."""
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
