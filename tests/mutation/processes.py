"""Runs a function in a forked process, with an end to its time."""

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
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Generic, TypeVar

JobT = TypeVar("JobT")
Say = Callable[[object], None]

_WALL_PER_CPU = 8  # a machine that is shared; a process that waits for itself uses no CPU
_MAX_BYTES = 12 << 30  # of address space: an endless list must not take the machine


class Ended(Generic[JobT]):
    """What came of a job.

    Args:
        job: The job.
        said: All that its process sent, in order.
        why: Empty when it came to its end; ``"timeout"``, or how the process died.
    """

    def __init__(self, job: JobT, said: list[Any], why: str) -> None:
        self.job = job
        self.said = said
        self.why = why


def run_forked(
    jobs: Iterable[JobT], run: Callable[[JobT, Say], None], *, num_processes: int, seconds: float
) -> Iterator[Ended[JobT]]:
    """Run each job in a process of its own, forked from this one.

    Args:
        jobs: Taken as processes become free.
        run: Called in the process with the job and what to send results with.
        num_processes: At a time.
        seconds: CPU time that one may take; much more may pass on a clock.
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
                running[ours] = job, process, [], time.monotonic() + _WALL_PER_CPU * seconds
            for pipe in wait(list(running), timeout=1.0):
                assert isinstance(pipe, Connection), "only pipes are waited for"
                try:
                    running[pipe][2].append(pipe.recv())
                except EOFError:
                    job, process, said, _ = running.pop(pipe)
                    process.join()
                    yield Ended(job, said, _why(process.exitcode))
            for pipe, (job, process, said, deadline) in list(running.items()):
                if time.monotonic() > deadline:
                    process.kill()
                    process.join()
                    del running[pipe]
                    yield Ended(job, said, "timeout")
    finally:
        for _, process, _, _ in running.values():
            process.kill()


def _why(code: int | None) -> str:
    import signal

    if code == 0:
        return ""
    return "timeout" if code == -signal.SIGXCPU else f"ended with {code}"


def _child(run: Callable[[JobT, Say], None], job: JobT, pipe: Connection, seconds: float) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    end = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (end, end + 5))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    run(job, pipe.send)
    pipe.close()
    os._exit(0)  # whatever threads a mutant has left behind


def forget(packages: Sequence[str]) -> None:
    """Have these packages imported anew."""
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            del sys.modules[name]


def import_instead(code_of: Callable[[str, Path], CodeType | None]) -> None:
    """Have modules compiled by a function of their name and path; None leaves one as it is."""
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
