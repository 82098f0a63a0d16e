"""A watch for I/O on the calling thread, because I/O would delay a scheduler (TIER-5)."""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

_local = threading.local()
_STATS = ("stat", "lstat", "access", "read", "write", "pread", "pwrite", "readv", "writev", "fsync")


class _Hook:
    is_installed = False


@contextmanager
def watching_io(folder: str) -> Iterator[list[str]]:
    """Record the calls of this thread on files below a folder, during the ``with`` block.

    The watch records Python's audit events (open, rename, remove, listing ...) and the functions of
    ``os`` that have no audit event. Other threads are not watched.
    """
    if not _Hook.is_installed:
        _Hook.is_installed = True
        sys.addaudithook(_audit)
    seen: list[str] = []
    _local.folder, _local.seen = folder, seen
    try:
        with _replaced(_STATS, _noted):
            yield seen
    finally:
        _local.seen = None


def slow_renames(seconds: float) -> AbstractContextManager[None]:
    """Delay each rename, so that other processes find half-written files."""

    def slow(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def renamed(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return function(*args, **kwargs)

        return renamed

    return _replaced(("rename", "replace", "link"), slow)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Limit the size of this process's files, so that larger writes fail as on a full disk."""
    import resource  # this limit does not exist on every system

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def open_files(folder: str) -> list[str]:
    """Return the open files of this process below a folder, if the system lists open files."""
    found = []
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{name}")
                if path.startswith(folder):
                    found.append(path)
    return sorted(found)


def open_sockets() -> dict[int, int]:
    """Return the inodes and numbers of the sockets that this process has open."""
    found = {}
    with suppress(FileNotFoundError):
        for name in os.listdir("/dev/fd"):
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = int(name)
    return found


def break_connections(others: Iterable[int]) -> int:
    """Shut down the connections of this process, as if their server had ended.

    Args:
        others: Inodes of sockets that stay open.

    Returns:
        The number of connections.
    """
    broken = 0
    for inode, number in open_sockets().items():
        if inode not in others:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                if connection.getpeername():  # otherwise both ends are in this process
                    connection.shutdown(socket.SHUT_RDWR)
                    broken += 1
    return broken


@contextmanager
def _replaced(names: Iterable[str], make: Callable[..., Callable[..., Any]]) -> Iterator[None]:
    before = {name: getattr(os, name) for name in names}
    for name, function in before.items():
        setattr(os, name, make(name, function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(os, name, function)


def _noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        _note(f"os.{name}", args)
        return function(*args, **kwargs)

    return noted


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" or event.startswith(("os.", "shutil.", "sqlite3.")):
        _note(event, args)


def _note(event: str, args: tuple[Any, ...]) -> None:
    seen = getattr(_local, "seen", None)
    if seen is None:
        return
    _local.seen = None  # calls of the watch itself do not count
    try:
        for arg in args[:2]:
            path = _path_of(arg)
            if _local.folder in path:
                seen.append(f"{event}({path!r})")
                break
    finally:
        _local.seen = seen


def _path_of(arg: object) -> str:
    if isinstance(arg, int) and not isinstance(arg, bool):  # the argument is an open file
        try:
            return os.readlink(f"/proc/self/fd/{arg}")
        except OSError:
            return ""
    return os.fsdecode(arg) if isinstance(arg, (str, bytes, os.PathLike)) else ""
