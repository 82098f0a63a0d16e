"""Engines in processes of their own: forked off this one, watched, and killed at the end.

1. An engine that says nothing for too long is killed, with all that it started.
2. Whatever ends one, Ctrl-C here too, none is left.
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
_TOLD_EVERY = 1.0
_NOT_OF_THE_CONNECTOR = re.compile(r"/(vllm|torch|kvview\w*|python3[.\d]*|multiprocessing)/")


@dataclass
class _Engine:
    process: Any
    pipe: Connection
    log: Path
    name: str
    last_heard: float


def run_engines(
    jobs: Sequence[JobT],
    serve: Callable[[JobT, Callable[[str], None]], Served],
    silence: float,
    on_progress: Callable[[str], None],
) -> list[Served]:
    """Run each job in a process of its own, a few at a time.

    Args:
        jobs: What to serve; ``str`` of one is its name.
        serve: Serves one; it is given what to tell its progress to.
        silence: Seconds without any progress until an engine is killed.
        on_progress: Told what is being done.

    Returns:
        What each showed, in order.
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
                    served = _hear(engine, silence)
                    if served is not None:
                        done[number] = served
                        _end(running.pop(number))
        finally:
            for engine in running.values():
                _end(engine)
    return [done[number] for number in range(len(jobs))]


def _start(job: JobT, serve: Callable[[JobT, Callable[[str], None]], Served], log: Path) -> _Engine:
    context = multiprocessing.get_context("fork")  # it has imported vLLM already
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(there, job, serve, log))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads; those of torch rest
        process.start()
    there.close()
    return _Engine(process, here, log, str(job), time.monotonic())


def _hear(engine: _Engine, silence: float) -> Served | None:
    """What an engine showed, when it is done; None while it goes on."""
    try:
        while engine.pipe.poll():
            said = engine.pipe.recv()
            engine.last_heard = time.monotonic()
            if isinstance(said, Served):
                return said
    except (EOFError, OSError):
        engine.process.join(5)
        told = f"its process died, exit code {engine.process.exitcode}"
        return Served(law="ENGINE", message=f"{told}{_last_line(engine.log)}")
    if time.monotonic() - engine.last_heard < silence:
        return None
    stands = _where_it_stands(engine)
    told = f"no step ended within {silence:.0f} s, and the engine was killed"
    return Served(law="CONN-3", message=told + stands)


def _where_it_stands(engine: _Engine) -> str:
    """The line of the connector, or of whoever else, that does not return."""
    with suppress(OSError):
        size = engine.log.stat().st_size
        os.kill(engine.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', engine.log.read_text()[size:])
        own = [frame for frame in frames if not _NOT_OF_THE_CONNECTOR.search(frame[0])]
        for file, line, function in (own or frames)[:1]:
            return f"; it stands in {function}, {os.path.basename(file)}:{line}"
    return ""


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        if lines := [line for line in lines if line]:
            return f": {line_of(lines[-1])}"
    return ""


def _end(engine: _Engine) -> None:
    """The engine, and the workers that it started."""
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

    os.setsid()  # a group to be killed as one; Ctrl-C is the parent's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    told = 0.0

    def tell(text: str) -> None:
        nonlocal told
        if time.monotonic() - told > _TOLD_EVERY:
            told = time.monotonic()
            pipe.send(text)

    try:
        pipe.send(serve(job, tell))
    finally:
        os._exit(0)  # nothing that the parent has registered for its own end
