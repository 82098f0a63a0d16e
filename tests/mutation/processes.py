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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Generic, TypeVar

JobT = TypeVar("JobT")
Say = Callable[[object], None]

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


class Ended(Generic[JobT]):
    """The end of a job.

    Args:
        job: The job.
        said: The messages of its process, in order.
        why: Empty for a regular end; otherwise ``"timeout"``, or how the process died.
        cpu_seconds: CPU time of the process.
    """

    def __init__(self, job: JobT, said: list[Any], why: str, cpu_seconds: float) -> None:
        self.job = job
        self.said = said
        self.why = why
        self.cpu_seconds = cpu_seconds


def run_forked(
    jobs: Iterable[JobT], run: Callable[[JobT, Say], None], *, num_processes: int, seconds: float
) -> Iterator[Ended[JobT]]:
    """Run each job in a process of its own, forked from this one.

    Args:
        jobs: Taken as processes become free.
        run: Called in the process with the job and a function that sends results.
        num_processes: Number at a time.
        seconds: CPU time of a job, until it sends a :class:`Limit`.
    """
    context = multiprocessing.get_context("fork")
    running: dict[Connection, tuple[JobT, Any, list[Any], float]] = {}
    queue = iter(jobs)
    is_empty = False
    try:
        while running or not is_empty:
            while not is_empty and len(running) < num_processes:
                try:
                    job = next(queue)
                except StopIteration:
                    is_empty = True
                    break
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(run, job, theirs, seconds))
                process.start()
                theirs.close()
                running[ours] = job, process, [], _deadline(seconds)
            for pipe in wait(list(running), timeout=1.0):
                assert isinstance(pipe, Connection), "only pipes are waited for"
                job, process, said, _ = running[pipe]
                try:
                    told = pipe.recv()
                except EOFError:
                    del running[pipe]
                    seconds_taken = _join(process)
                    yield Ended(job, said, _why(process.exitcode), seconds_taken)
                    continue
                if isinstance(told, Limit):
                    running[pipe] = job, process, said, _deadline(told.seconds)
                else:
                    said.append(told)
            for pipe, (job, process, said, deadline) in list(running.items()):
                if time.monotonic() > deadline:
                    process.kill()
                    del running[pipe]
                    yield Ended(job, said, "timeout", _join(process))
    finally:
        for _, process, _, _ in running.values():
            process.kill()


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


def _child(run: Callable[[JobT, Say], None], job: JobT, pipe: Connection, seconds: float) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    _limit_cpu(seconds)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))

    def say(message: object) -> None:
        if isinstance(message, Limit):
            _limit_cpu(message.seconds)
        pipe.send(message)

    run(job, say)
    pipe.close()
    os._exit(0)  # does not wait for threads that a mutant has left


def _limit_cpu(seconds: float) -> None:
    end = int(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))


def forget(packages: Sequence[str]) -> None:
    """Make the next import load these packages again."""
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
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
