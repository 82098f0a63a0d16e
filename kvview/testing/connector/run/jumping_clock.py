"""Clocks of :mod:`time` that jump ahead at each call of a hook.

Loops of :mod:`asyncio` use the real clock, because after a jump, requests would time out although
the medium responds in time. Timeouts of locks, queues and sockets also use the real clock.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

_CLOCKS = ("time", "monotonic", "perf_counter")


class _Jumps:
    seconds = 0.0
    """Seconds of one jump."""
    passed = 0.0
    """Seconds of all jumps so far."""


def jump() -> None:
    """Move the clocks ahead by one jump."""
    _Jumps.passed += _Jumps.seconds


@contextmanager
def jumping_clock(connector_class: type, seconds: float) -> Iterator[None]:
    """Let each call of :func:`jump` in the block move the clocks ahead.

    Args:
        connector_class: The connector; functions that its modules imported from :mod:`time` also
            jump.
        seconds: Seconds of one jump; 0 does not change the clocks.
    """
    if not seconds:
        yield
        return
    names = {one.__module__ for one in connector_class.__mro__} - {"builtins"}
    modules = [vars(sys.modules[name]) for name in names if name in sys.modules]
    _Jumps.seconds, _Jumps.passed = seconds, 0.0
    with ExitStack() as stack:
        monotonic = time.monotonic
        stack.enter_context(patch.object(asyncio.BaseEventLoop, "time", lambda _: monotonic()))
        for name in _CLOCKS:
            for unit, suffix in ((1, ""), (10**9, "_ns")):
                real = getattr(time, name + suffix)
                moved = _moved(real, unit)
                stack.enter_context(patch.object(time, name + suffix, moved))
                for module in modules:
                    imported = [as_name for as_name, value in module.items() if value is real]
                    stack.enter_context(patch.dict(module, dict.fromkeys(imported, moved)))
        stack.callback(setattr, _Jumps, "seconds", 0.0)
        yield


def _moved(real: Callable[[], Any], unit: int) -> Callable[[], Any]:
    def read() -> Any:
        return real() + type(real())(_Jumps.passed * unit)

    return read
