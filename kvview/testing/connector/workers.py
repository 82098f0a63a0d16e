"""Forked processes that run seeds on all cores; a crash ends only one process.

The processes are forked before any thread is started. So the processes have all classes, even those
defined in a function or in ``__main__``, and import no module again.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NoReturn

import torch

from kvview.testing.connector.process import END_SIGNALS, can_fork, signals_held

Answer = Callable[[Any], Any]

_SECONDS_PER_POLL = 1.0  # seconds, because a child of a dead process may keep its pipe open
_SECONDS_TO_END = 1.0  # seconds after SIGTERM until a process is killed
_SECONDS_TO_ANSWER = 1.0  # seconds that a process has for an answer that is not needed


@dataclass(frozen=True)
class Died:
    """The answer to a question whose process died.

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


class Workers:
    """Worker processes that answer questions.

    1. Answers are returned in the order of the questions, for any number of processes.
    2. A process that dies is replaced; the answer to its question is :class:`Died`.
    3. If the caller closes ``map`` early, a process that still works on an answer is ended a second
       later, because its answer is not needed.
    4. Temporary files of a process are removed at its end.

    Args:
        answer: Function that answers a question in a process; its results are pickled.
        number: Number of processes; with 0, this process answers.
    """

    def __init__(self, answer: Answer, number: int) -> None:
        self._answer = answer
        self._workers: list[_Worker] = []
        self._ended: list[_Worker] = []  # received SIGTERM
        self._folder = tempfile.TemporaryDirectory(prefix="kvview-", ignore_cleanup_errors=True)
        try:
            for _ in range(number):
                self._workers.append(self._start())
        except BaseException:
            self.close()
            raise

    def map(self, questions: Iterable[Any]) -> Generator[Any, None, None]:
        """Yield the answers in order; a free process receives the next question at once.

        Raises:
            Exception: The first exception that a question raised.
        """
        if not self._workers:
            yield from map(self._answer, questions)
            return
        answers: dict[int, tuple[bool, Any]] = {}
        coming = enumerate(questions)
        upcoming = next(coming, None)
        number = 0
        try:
            while True:
                for worker in self._workers:
                    if worker.is_free and upcoming is not None:
                        worker.ask(*upcoming)
                        upcoming = next(coming, None)
                if number in answers:
                    has_raised, answer = answers.pop(number)
                    if has_raised:
                        raise answer
                    yield answer
                    number += 1
                elif upcoming is None and all(one.number is None for one in self._workers):
                    return
                else:
                    answers.update(self._answered())
        finally:
            for worker in self._workers:
                if worker.number is not None:
                    worker.number = None  # a late answer is dropped
                    worker.late_from = time.monotonic()

    def _answered(self) -> Iterator[tuple[int, tuple[bool, Any]]]:
        """Yield answers as they arrive, with the numbers of their questions."""
        busy = {worker.pipe: worker for worker in self._workers if not worker.is_free}
        ready = set(wait(list(busy), _SECONDS_PER_POLL))
        for pipe, worker in busy.items():
            if pipe not in ready and worker.process.exitcode is None:
                if worker.is_too_late:
                    worker.process.terminate()
                    self._ended.append(worker)
                    self._workers[self._workers.index(worker)] = self._start()
                continue
            number, answer = worker.number, worker.take()
            if isinstance(answer[1], Died):
                worker.end()
                self._workers[self._workers.index(worker)] = self._start()
            if number is not None:
                yield number, answer

    def close(self) -> None:
        """End the processes and their children; may be called twice."""
        for worker in self._workers:
            worker.process.terminate()
        ending = [*self._workers, *self._ended]
        deadline = time.monotonic() + _SECONDS_TO_END
        for worker in ending:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        for worker in ending:
            worker.end()
        self._workers.clear()
        self._ended.clear()
        self._folder.cleanup()

    def _start(self) -> _Worker:
        return _Worker(self._answer, self._folder.name, [one.pipe for one in self._workers])


@contextmanager
def workers(answer: Answer, number: int) -> Iterator[Workers]:
    """Make :class:`Workers` that end with the ``with`` block."""
    made = Workers(answer, number)
    try:
        yield made
    finally:
        made.close()


class _Worker:
    """One process, with its current question."""

    def __init__(self, answer: Answer, folder: str, of_others: list[Connection]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, child_end = context.Pipe()
        self.is_free = True
        self.number: int | None = None
        self.late_from = 0.0  # s, when its answer was no longer needed
        not_its_own = [self.pipe, *of_others]
        self.process = context.Process(target=_serve, args=(child_end, not_its_own, answer, folder))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise both processes would write the buffered text
        with signals_held():
            self.process.start()
        assert self.process.pid is not None, "a process that is started has an id"
        self._pid = self.process.pid
        with suppress(OSError):  # the process has set its group itself, or has ended
            os.setpgid(self._pid, self._pid)
        child_end.close()

    @property
    def is_too_late(self) -> bool:
        """Whether the process has worked too long on an answer that is not needed."""
        return self.number is None and time.monotonic() - self.late_from > _SECONDS_TO_ANSWER

    def ask(self, number: int, question: Any) -> None:
        """Send a question; the process must be free."""
        self.is_free, self.number = False, number
        with suppress(OSError):  # the answer reports a dead process
            self.pipe.send_bytes(pickle.dumps(question))

    def take(self) -> tuple[bool, Any]:
        """Return the answer, preceded by whether it is an error to raise."""
        self.is_free, self.number = True, None
        try:
            if self.pipe.poll():
                answer: tuple[bool, Any] = pickle.loads(self.pipe.recv_bytes())
                return answer
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


def _serve(pipe: Connection, not_its_own: list[Connection], answer: Answer, folder: str) -> None:
    """Answer questions in a process until the pipe is closed."""
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
    try:
        while not is_ending:
            question = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(_answered(answer, question))
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
    except (EOFError, OSError, KeyboardInterrupt):
        pass
    finally:
        os._exit(0)  # does not run the exit handlers of the parent


def _ignore(unraisable: object) -> None:
    pass


def _answered(answer: Answer, question: Any) -> bytes:
    try:
        return pickle.dumps((False, answer(question)))
    except BaseException as error:  # a hook may also raise KeyboardInterrupt
        text = "".join(traceback.format_exception(error))
        try:
            pickled = pickle.dumps((True, error))
            pickle.loads(pickled)
        except Exception:  # the error cannot be pickled
            pickled = pickle.dumps((True, RuntimeError(text)))
        return pickled
