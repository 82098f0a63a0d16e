"""A process that writes into the folder of a store, and can be killed during a write (TIER-9)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from tempfile import TemporaryFile
from typing import IO, Any

from kvview.errors import KVViewError, printable
from kvview.targets import load_target
from kvview.testing.supervision import watchdog
from kvview.testing.tier.model import bytes_of
from kvview.tier import Namespace

_SECONDS = 300.0
_KEYS_OF_A_JOB = 4


class Writer:
    """A process that opens the folder of a store, puts keys, and reports each stored key.

    Args:
        target: Target of the store's class, as ``package.module:Class``.
        options: Options of the store.
        namespace: Namespace of the store.
        keys: Keys, each with the number of bytes of its page.
        largest_file: Size of a file at which the system ends the process; None for no limit.
    """

    def __init__(
        self,
        target: str,
        options: Mapping[str, Any],
        namespace: Namespace,
        keys: Mapping[bytes, int],
        largest_file: int | None = None,
    ) -> None:
        sizes = {key.hex(): size for key, size in keys.items()}
        job = json.dumps([target, dict(options), namespace.to_json(), sizes, largest_file])
        self._output, self._errors = TemporaryFile(), TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import write; write()", job],
            env=environment(),
            stdout=self._output,
            stderr=self._errors,
        )

    def kill(self, num_stored: int, seconds: float) -> None:
        """Kill the process some time after it has stored this number of keys."""
        self._wait_until(lambda: len(self._lines()) > num_stored)
        time.sleep(seconds)
        self._process.kill()

    def stored(self) -> list[bytes] | None:
        """Wait for the process to end; returns the stored keys, or None if the folder was refused.

        Raises:
            RuntimeError: The process ended with an error.
        """
        with self._output, self._errors:
            self._wait_until(lambda: False)
            lines, errors = self._lines(), _text(self._errors)
        if self._process.returncode > 0:
            raise RuntimeError(f"the writing process has failed: {errors[-2000:]}")
        return None if lines == ["refused"] else [bytes.fromhex(line) for line in lines[1:]]

    def _lines(self) -> list[str]:
        """Return the complete lines that the process has printed."""
        return _text(self._output).split("\n")[:-1]

    def _wait_until(self, is_enough: Callable[[], bool]) -> None:
        """Wait until a condition holds or the process has ended."""
        end = time.monotonic() + _SECONDS
        while self._process.poll() is None and not is_enough():
            watchdog.next_call()  # no timeout, because the process has its own limit
            if time.monotonic() > end:
                self._process.kill()
            time.sleep(0.001)


def environment() -> dict[str, str]:
    """Return the environment of a new interpreter, with the modules of this one.

    The salt of ``hash`` differs from that of this process.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    salt = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    return {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": salt}


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), 1 << 22, 0).decode()  # seek would move the process's position


def _end_at(num_bytes: int) -> None:
    """Let the system end this process, without a core dump, when a file grows to a size.

    A store that writes a page with one call gets a short write, and the process ends when the store
    renames or removes the file.
    """
    import resource  # these limits do not exist on every system

    def end(event: str, args: tuple[Any, ...]) -> None:
        if event in ("os.remove", "os.rename", "os.link"):
            folder = args[1] if event == "os.remove" else args[2]
            with suppress(OSError):
                if os.stat(args[0], dir_fd=None if folder == -1 else folder).st_size >= num_bytes:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(end)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores the signal
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def write() -> None:
    """Run the job that was passed to this process as its argument."""
    target, options, namespace, sizes, largest_file = json.loads(sys.argv[1])
    if largest_file is not None:
        _end_at(largest_file)
    try:
        store = load_target(target)(Namespace.from_json(namespace), **options)
    except KVViewError:  # the store allows one process in a place
        print(printable("refused"))
        return
    print(printable("open"), flush=True)
    keys = [*sizes]
    parts = [keys[at : at + _KEYS_OF_A_JOB] for at in range(0, len(keys), _KEYS_OF_A_JOB)]

    def report() -> None:
        for number, flags in store.poll():
            for key, flag in zip(parts[number], flags, strict=True):
                if flag:
                    print(printable(key), flush=True)

    for number, part in enumerate(parts):
        names = [*map(bytes.fromhex, part)]
        pages = [memoryview(bytes_of(k, sizes[k.hex()])) for k in names]
        store.put(number, names, pages)
        if largest_file is not None:  # the number of keys before the end does not depend on time
            store.drain(_SECONDS)
        report()
    while not store.drain(0.001):
        report()
    report()
    store.close()
