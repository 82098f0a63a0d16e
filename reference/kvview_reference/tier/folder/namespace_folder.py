"""``NamespaceFolder``: a store's folder, whose temporary part does not outlive its process.

    <root>/<namespace>       pages
    <root>/<name>.run        lock of a folder that belongs to one process
           <name>            this folder: the pages of a run, or files that are being written

The process keeps the lock until it ends, however it ends. So a folder whose lock is free belongs to
a process that is gone, and the next process that opens a folder below the same root removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvview import ConfigError
from kvview.tier import Namespace
from kvview_reference.tier.folder.file_lock import lock_file

_LOCK = re.compile(r"([0-9a-f]{32})\.run")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_PATIENCE = 10.0  # seconds to wait for a process that is looking whether a run is dead


class NamespaceFolder:
    """The folder of a namespace, and the removal of all folders that dead processes left.

    Args:
        root: Folder for the folders of namespaces; created if it is missing.
        namespace: Namespace of the pages. If it belongs to a run, :meth:`close` removes its folder,
            unless another store of this run has it open.

    Raises:
        ConfigError: The folder cannot be used.
    """

    def __init__(self, root: str, namespace: Namespace) -> None:
        self.path = Path(root, namespace.digest.hex())
        """Folder of the pages."""
        self._root = Path(root)
        self._owned: dict[Path, int] = {}  # each folder of this process, and its lock
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            if namespace.run:
                self._own(self.path)
            self.path.mkdir(exist_ok=True)
        except (OSError, ValueError) as error:
            self._close_locks()
            raise ConfigError(f"the folder {str(self.path)!r} cannot be used: {error}") from None
        for folder in dead_folders(root):  # before the first page, so that limits hold
            remove_folder(folder)

    def make_scratch(self) -> Path:
        """Make a folder for files that are being written, which is removed with the process.

        Raises:
            OSError: The folder cannot be made.
        """
        if self.path in self._owned:
            return self.path
        folder = self._root / uuid.uuid4().hex
        self._own(folder)
        folder.mkdir()
        return folder

    def close(self) -> None:
        """Remove the folders of this process; a second call does nothing."""
        owned, self._owned = self._owned, {}
        for folder, lock in owned.items():
            with suppress(OSError):  # another store has it open
                lock_file(lock, fcntl.LOCK_EX, 0.0)
                remove_folder(folder)
            os.close(lock)

    def _own(self, folder: Path) -> None:
        path = lock_of(folder)
        while folder not in self._owned:
            lock = os.open(path, _FLAGS | os.O_CREAT, 0o600)
            try:
                lock_file(lock, fcntl.LOCK_SH, _PATIENCE)
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock), os.lstat(path)):
                        self._owned[folder] = lock
            finally:
                if folder not in self._owned:  # another process removed the lock meanwhile
                    os.close(lock)

    def _close_locks(self) -> None:
        while self._owned:
            os.close(self._owned.popitem()[1])


def dead_folders(root: str) -> Iterator[Path]:
    """Yield the folders of processes that are gone, each while this process has its lock."""
    with suppress(OSError, ValueError):  # a path with a null character
        for name in sorted(os.listdir(root)):
            if not (found := _LOCK.fullmatch(name)):
                continue
            if (lock := _open_if_dead(Path(root, name))) is not None:
                try:
                    yield Path(root, found[1])
                finally:
                    os.close(lock)


def remove_folder(folder: Path) -> None:
    """Remove a folder whose lock this process has; what cannot be removed stays for later."""
    with suppress(OSError):
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)  # follows no link
        lock_of(folder).unlink()


def lock_of(folder: Path) -> Path:
    """Return the path of the lock of a folder that belongs to one process."""
    return folder.with_name(f"{folder.name}.run")


def _open_if_dead(path: Path) -> int | None:
    with suppress(OSError):
        lock = os.open(path, _FLAGS)
        try:
            lock_file(lock, fcntl.LOCK_EX, 0.0)
        except BaseException:
            os.close(lock)
            raise
        return lock
    return None
