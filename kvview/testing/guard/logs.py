"""The log during a check, which is kept but not printed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override


@contextmanager
def logged() -> Iterator[list[str]]:
    """Keep the warnings and errors that are logged in the block; they reach no other handler."""
    messages: list[str] = []

    class Keep(logging.Handler):
        @override
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    root = logging.getLogger()
    before = root.handlers
    gc.collect()  # an object that an earlier check dropped logs before the block
    root.handlers = [Keep(logging.WARNING)]
    try:
        yield messages
    finally:
        root.handlers = before
