"""The exception behind a job that failed without an injected failure.

A worker half turns an exception into a :class:`~kvview.TransferResult` with the text of the
exception, so the traceback is lost. So a seed with a job that failed in this way is run once more,
and each exception that passes through the author's code is recorded.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import FrameType
from typing import Any

from kvview import ConfigError
from kvview.errors import line_of
from kvview.testing.connector.result import SimulationResult
from kvview.testing.supervision.source_lines import with_source

_CONTROL_FLOW = (StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError)
_IN_NORMAL_USE = (LookupError, AttributeError)


@dataclass(frozen=True)
class _Error:
    kind: type[BaseException]
    text: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind.__name__}: {self.text}".removesuffix(": ") + f" at {self.place}"


def first_error(paths: Collection[str], play: Callable[[], SimulationResult]) -> str:
    """Run a connector and return the exception behind its first failed job, as one line.

    Args:
        paths: Files of the author.
        play: Runs the connector, in this process only.

    Returns:
        The exception with its line of source, or the error in the result of the job if no
        exception was recorded.
    """
    recorder = _Recorder(frozenset(paths))
    text = line_of(recorder.run(play).first_error)
    errors = recorder.errors
    behind = (one for one in errors if one.text and one.text in text)
    failures = [one for one in errors if not issubclass(one.kind, _CONTROL_FLOW)]
    unusual = (one for one in failures if not issubclass(one.kind, _IN_NORMAL_USE))
    found = next(behind, None) or next(unusual, None) or next(iter(failures), None)
    return str(found) if found else text


class _Recorder:
    """Records exceptions that pass through some files, in all threads."""

    def __init__(self, paths: Collection[str]) -> None:
        self.errors: list[_Error] = []
        self._paths = paths

    def run(self, block: Callable[[], SimulationResult]) -> SimulationResult:
        before, of_threads = sys.gettrace(), threading.gettrace()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            return block()
        finally:
            sys.settrace(before)
            threading.settrace(of_threads)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in self._paths:
            return None
        frame.f_trace_lines = False
        return self._trace

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception":
            kind, value, _ = arg
            # The check tries options that a connector may refuse with such an exception.
            if issubclass(kind, ConfigError):
                return self._trace
            path = frame.f_code.co_filename.removeprefix(os.getcwd() + os.sep)
            error = _Error(kind, line_of(value), with_source(f"{path}:{frame.f_lineno}"))
            known = self.errors[-1:]
            if not known or (known[0].kind, known[0].text) != (error.kind, error.text):
                self.errors.append(error)
        return self._trace
