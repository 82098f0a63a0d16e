"""Engines in forked processes, which are monitored, and killed at the end.

1. An engine that reports no progress for too long is killed, with every process that it started.
2. Every engine ends with the check, even after Ctrl-C.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from kvview.errors import line_of
from kvview_vllm.inference.traffic import Served

JobT = TypeVar("JobT")

_MOST_PROCESSES = 2
_SECONDS_BETWEEN_MESSAGES = 1.0
_NOT_OF_THE_CONNECTOR = re.compile(r"/(vllm|torch|kvview\w*|python3[.\d]*|multiprocessing)/")


@dataclass
class _Engine:
    process: Any
    pipe: Connection
    log: Path
    name: str
    last_message: float


def run_engines(
    jobs: Sequence[JobT],
    serve: Callable[[JobT, Callable[[str], None]], Served],
    silence: float,
    on_progress: Callable[[str], None],
) -> list[Served]:
    """Run each job in a separate process, a few jobs at a time.

    Args:
        jobs: The jobs; the name of a job is its ``str``.
        serve: Serves a job; its second argument is a function that reports progress.
        silence: Seconds without any progress until an engine is killed.
        on_progress: Called with the names of the running jobs.

    Returns:
        The result of each job, in order.
    """
    done: dict[int, Served] = {}
    waiting = deque(enumerate(jobs))
    running: dict[int, _Engine] = {}
    with tempfile.TemporaryDirectory(prefix="kvview-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < min(_MOST_PROCESSES, os.cpu_count() or 1):
                    number, job = waiting.popleft()
                    running[number] = _start(job, serve, Path(folder, f"{number}.log"))
                on_progress(", ".join(engine.name for engine in running.values()))
                wait([engine.pipe for engine in running.values()], timeout=1.0)
                for number, engine in list(running.items()):
                    served = _receive(engine, silence)
                    if served is not None:
                        done[number] = served
                        _end(running.pop(number))
        finally:
            for engine in running.values():
                _end(engine)
    return [done[number] for number in range(len(jobs))]


def _start(job: JobT, serve: Callable[[JobT, Callable[[str], None]], Served], log: Path) -> _Engine:
    context = multiprocessing.get_context("fork")  # because this process has already imported vLLM
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(there, job, serve, log))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads, but those of torch are idle
        process.start()
    there.close()
    return _Engine(process, here, log, str(job), time.monotonic())


def _receive(engine: _Engine, silence: float) -> Served | None:
    """Return the result of an engine that has ended; None while it runs."""
    try:
        while engine.pipe.poll():
            message = engine.pipe.recv()
            engine.last_message = time.monotonic()
            if isinstance(message, Served):
                return message
    except (EOFError, OSError):
        engine.process.join(5)
        text = f"its process died, exit code {engine.process.exitcode}{_last_line(engine.log)}"
        return Served(law="ENGINE", message=text)
    if time.monotonic() - engine.last_message < silence:
        return None
    text = f"no step ended within {silence:.0f} s, and the engine was killed"
    return Served(law="CONN-3", message=text + _where_it_hangs(engine))


def _where_it_hangs(engine: _Engine) -> str:
    """Return the line at which the engine hangs, in the connector's code if possible."""
    with suppress(OSError):
        size = engine.log.stat().st_size
        os.kill(engine.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', engine.log.read_text()[size:])
        own = [frame for frame in frames if not _NOT_OF_THE_CONNECTOR.search(frame[0])]
        for file, line, function in (own or frames)[:1]:
            return f"; it hangs in {function}, {os.path.basename(file)}:{line}"
    return ""


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        if lines := [line for line in lines if line]:
            return f": {line_of(lines[-1])}"
    return ""


def _end(engine: _Engine) -> None:
    """Kill the engine and the workers that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(engine.process.pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        engine.process.kill()
    engine.process.join()
    engine.pipe.close()


def _child(
    pipe: Connection, job: Any, serve: Callable[[Any, Callable[[str], None]], Served], log: Path
) -> None:
    import faulthandler

    os.setsid()  # a group that is killed together; Ctrl-C goes to the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    last = 0.0

    def on_progress(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > _SECONDS_BETWEEN_MESSAGES:
            last = time.monotonic()
            pipe.send(text)

    try:
        pipe.send(serve(job, on_progress))
    finally:
        os._exit(0)  # without the exit handlers of the parent
