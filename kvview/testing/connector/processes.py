"""Forked processes that run seeds on all cores; a crash ends only one process.

The processes are forked before any thread is started. So the processes have all classes, even those
defined in a function or in ``__main__``, and import no module again.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NoReturn, Self

import torch

from kvview.testing.connector.half.process import END_SIGNALS, can_fork, signals_held

_SECONDS_PER_POLL = 1.0  # seconds, because a child of a dead process may keep its pipe open
_SECONDS_TO_END = 1.0  # seconds after SIGTERM until a process is killed
_OBJECTS_PER_COLLECTION = 20_000  # instead of 700, with which collections take a tenth of the time


@dataclass(frozen=True)
class Task:
    """A call on the object of each process.

    Args:
        method: Function of a module or class, which receives the object first.
        arguments: The other arguments.
    """

    method: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def __call__(self, subject: object) -> Any:
        """Make the call."""
        return self.method(subject, *self.arguments)


@dataclass(frozen=True)
class Died:
    """The result of a task whose process died.

    Args:
        how: Signal or exit code of the process.
    """

    how: str


def default_processes() -> int:
    """Return the number of cores that this process may use; 0 if a fork is not safe.

    A fork copies only one thread, so locks of other threads stay locked. A CUDA context does not
    work in a fork, and a daemon of :mod:`multiprocessing` may not have children.
    """
    is_alone = threading.active_count() == 1
    is_daemon = multiprocessing.current_process().daemon
    has_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not can_fork() or not is_alone or is_daemon or has_cuda:
        return 0
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class Processes:
    """Forked processes that run tasks on copies of one object.

    1. Results are returned in the order of the tasks, for any number of processes.
    2. A process that dies is replaced; the result of its task is :class:`Died`.
    3. If the caller closes ``map`` early, the results of the tasks that still run are dropped.
    4. Temporary files of a process are removed at its end.

    Args:
        subject: The object on which tasks are run; only tasks and results are pickled.
        number: Number of processes; with 0, this process runs the tasks.
    """

    def __init__(self, subject: object, number: int) -> None:
        self._subject = subject
        self._all: list[_Process] = []
        self._number = number
        self._folder = tempfile.TemporaryDirectory(prefix="kvview-", ignore_cleanup_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def map(self, tasks: Iterable[Task]) -> Generator[tuple[Task, Any], None, None]:
        """Yield each task with its result, in order; a free process receives the next task at once.

        Raises:
            Exception: The first exception that a task raised.
        """
        while len(self._all) < self._number:  # at the first call
            self._all.append(self._start())
        if not self._all:
            yield from ((task, task(self._subject)) for task in tasks)
            return
        sent: deque[Task] = deque()
        results: dict[int, tuple[bool, Any]] = {}
        coming = enumerate(tasks)
        upcoming = next(coming, None)
        number = 0
        try:
            while True:
                for one in self._all:
                    if one.is_free and upcoming is not None:
                        one.start(*upcoming)
                        sent.append(upcoming[1])
                        upcoming = next(coming, None)
                if number in results:
                    has_raised, result = results.pop(number)
                    if has_raised:
                        raise result
                    yield sent.popleft(), result
                    number += 1
                elif upcoming is None and all(one.number is None for one in self._all):
                    return
                else:
                    results.update(self._ended_tasks())
        finally:
            for one in self._all:
                one.number = None  # a late result is dropped

    def _ended_tasks(self) -> Iterator[tuple[int, tuple[bool, Any]]]:
        """Yield results as they arrive, with the numbers of their tasks."""
        busy = {one.pipe: one for one in self._all if not one.is_free}
        ready = set(wait(list(busy), _SECONDS_PER_POLL))
        for pipe, one in busy.items():
            if pipe not in ready and one.process.exitcode is None:
                continue
            number, result = one.number, one.take()
            if isinstance(result[1], Died):
                one.end()
                self._all[self._all.index(one)] = self._start()
            if number is not None:
                yield number, result

    def close(self) -> None:
        """End the processes and their children; may be called twice."""
        for one in self._all:
            one.process.terminate()
        deadline = time.monotonic() + _SECONDS_TO_END
        for one in self._all:
            one.process.join(max(0.0, deadline - time.monotonic()))
        for one in self._all:
            one.end()
        self._all.clear()
        self._folder.cleanup()

    def _start(self) -> _Process:
        return _Process(self._subject, self._folder.name, [one.pipe for one in self._all])


class _Process:
    """One process, with the number of its current task."""

    def __init__(self, subject: object, folder: str, of_others: list[Connection]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, child_end = context.Pipe()
        self.is_free = True
        self.number: int | None = None
        not_its_own = [self.pipe, *of_others]
        self.process = context.Process(
            target=_serve, args=(child_end, not_its_own, subject, folder)
        )
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise both processes would write the buffered text
        with signals_held():
            self.process.start()
        assert self.process.pid is not None, "a process that is started has an id"
        self._pid = self.process.pid
        with suppress(OSError):  # the process has set its group itself, or has ended
            os.setpgid(self._pid, self._pid)
        child_end.close()

    def start(self, number: int, task: Task) -> None:
        """Send a task; the process must be free."""
        self.is_free, self.number = False, number
        with suppress(OSError):  # the result reports a dead process
            self.pipe.send_bytes(pickle.dumps(task))

    def take(self) -> tuple[bool, Any]:
        """Return the result, preceded by whether it is an error to raise."""
        self.is_free, self.number = True, None
        try:
            if self.pipe.poll():
                result: tuple[bool, Any] = pickle.loads(self.pipe.recv_bytes())
                return result
        except (EOFError, OSError):
            pass
        self.process.join()
        code = self.process.exitcode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return False, Died(how)

    def end(self) -> None:
        """Kill the process and its children."""
        self.pipe.close()
        with suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)
        self.process.join()


def _serve(pipe: Connection, not_its_own: list[Connection], subject: object, folder: str) -> None:
    """Run tasks in a process until the pipe is closed."""
    is_ending = False

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        nonlocal is_ending
        is_ending = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.unraisablehook = _ignore  # a destructor that is interrupted would print a traceback
        raise KeyboardInterrupt

    os.setpgid(0, 0)  # only the parent receives Ctrl-C, and all children end with this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
    for other in not_its_own:
        other.close()  # otherwise the process would not notice the end of the parent
    tempfile.tempdir = folder
    gc.freeze()  # what was imported lives as long as the process
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    try:
        while not is_ending:
            task = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(_pickled_result(subject, task))
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
    except (EOFError, OSError, KeyboardInterrupt):
        pass
    finally:
        os._exit(0)  # does not run the exit handlers of the parent


def _ignore(unraisable: object) -> None:
    pass


def _pickled_result(subject: object, task: Task) -> bytes:
    try:
        return pickle.dumps((False, task(subject)))
    except BaseException as error:  # a hook may also raise KeyboardInterrupt
        text = "".join(traceback.format_exception(error))
        error.add_note(text)  # because the traceback stays in this process
        try:
            pickled = pickle.dumps((True, error))
            pickle.loads(pickled)
        except Exception:  # the error cannot be pickled
            pickled = pickle.dumps((True, RuntimeError(text)))
        return pickled
