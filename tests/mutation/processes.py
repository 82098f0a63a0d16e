"""Runs functions in forked processes, with a limit on their time."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

Say = Callable[[object], None]

_FORK = multiprocessing.get_context("fork")
_WALL_PER_CPU = 8  # for a shared machine, and for a process that waits
_PATIENCE = 20.0  # seconds of wall-clock time in addition
_MAX_BYTES = 12 << 30  # of address space, because an endless list must not exhaust the machine


@dataclass(frozen=True)
class Limit:
    """A message of a job: the time that its next part may take.

    Args:
        seconds: CPU time from now on; :data:`_WALL_PER_CPU` times as much wall-clock time.
    """

    seconds: float


@dataclass(frozen=True)
class Ended:
    """The end of a job.

    Args:
        said: The messages of its process, in order.
        why: Empty for a regular end; otherwise ``"timeout"``, or how the process died.
        cpu_seconds: CPU time of the process.
    """

    said: Sequence[Any]
    why: str
    cpu_seconds: float


def run_forked(run: Callable[[Say], None], *, seconds: float) -> Ended:
    """Run a job in a process that is forked from this one.

    Args:
        run: Called in the process with a function that sends results.
        seconds: CPU time of the job, until it sends a :class:`Limit`.
    """
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_child, args=(run, theirs, seconds))
    process.start()
    theirs.close()
    said: list[Any] = []
    deadline = _deadline(seconds)
    try:
        while time.monotonic() <= deadline:
            if not ours.poll(1.0):
                continue
            try:
                message = ours.recv()
            except EOFError:
                cpu_seconds = _join(process)
                return Ended(said, _why(process.exitcode), cpu_seconds)
            if isinstance(message, Limit):
                deadline = _deadline(message.seconds)
            else:
                said.append(message)
        process.kill()
        return Ended(said, "timeout", _join(process))
    finally:
        process.kill()


class Room:
    """A process that keeps its own imports, and answers calls.

    Args:
        make: Called in the process; returns the function that answers.

    Raises:
        RuntimeError: ``make`` has failed.
    """

    def __init__(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        self._pipe, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_serve, args=(make, theirs))
        self._process.start()
        theirs.close()
        self._receive()

    def __call__(self, argument: object) -> Any:
        """Return the answer to an argument."""
        self._pipe.send(argument)
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the process has ended; its error is printed above") from None
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()


def _serve(make: Callable[[], Callable[[Any], Any]], pipe: Connection) -> None:
    with suppress(KeyboardInterrupt, EOFError):
        answer = make()
        pipe.send(None)
        while True:
            pipe.send(answer(pipe.recv()))


def _join(process: Any) -> float:
    """Wait for the end of a process, and return its CPU time."""

    def of_ended() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = of_ended()
    process.join()
    return of_ended() - before


def _deadline(seconds: float) -> float:
    return time.monotonic() + _PATIENCE + _WALL_PER_CPU * seconds


def _why(code: int | None) -> str:
    import signal

    if code == 0:
        return ""
    return "timeout" if code == -signal.SIGXCPU else f"ended with {code}"


def _child(run: Callable[[Say], None], pipe: Connection, seconds: float) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    _limit_cpu(seconds)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))

    def say(message: object) -> None:
        if isinstance(message, Limit):
            _limit_cpu(message.seconds)
        pipe.send(message)

    run(say)
    pipe.close()
    os._exit(0)  # does not wait for threads that a mutant has left


def _limit_cpu(seconds: float) -> None:
    end = int(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))


def forget(packages: Sequence[str]) -> None:
    """Make the next import load these packages again."""
    for name in list(sys.modules):
        if any(f"{name}.".startswith(f"{package}.") for package in packages):
            del sys.modules[name]


def import_instead(code_of: Callable[[str, Path], CodeType | None]) -> None:
    """Compile modules with a function of their name and path; None leaves a module unchanged."""
    sys.meta_path.insert(0, _Finder(code_of))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, code_of: Callable[[str, Path], CodeType | None]) -> None:
        self._code_of = code_of

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        code = self._code_of(name, Path(spec.origin))
        if code is None:
            return None
        loader = _Loader(name, spec.origin)
        loader.code = code
        spec.loader = loader
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    code: CodeType

    def get_code(self, fullname: str) -> CodeType:
        return self.code
