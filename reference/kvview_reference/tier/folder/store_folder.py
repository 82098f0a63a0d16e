"""``StoreFolder``: the folder of one namespace; files outside the folder are never accessed.

1. Each path is ``name`` or ``folder/name``. Each folder is opened without following a link, and a
   file is opened by its name in the open folder. A link in place of a folder is an error, even if
   the link replaces the folder later.
2. Only regular files count as files. A link, folder, pipe, socket or device is never read or
   removed.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvview.tier.store import MAX_KEY_BYTES

SHARDS = [f"{number:02x}" for number in range(256)]
"""Names of the folders over which the files of a namespace are spread."""

NOTE = "namespace.json"
MODE = 0o600  # files contain prompts of users
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _NO_LINK
_MOST_OF_A_NOTE = 1 << 20  # bytes


def path_of(key: bytes) -> str:
    """Return the path of the file of a key."""
    return f"{SHARDS[zlib.crc32(key) & 0xFF]}/{key.hex()}"


def key_of(path: str) -> bytes | None:
    """Return the key whose file has this path; None for a path that no store writes."""
    try:
        key = bytes.fromhex(path.rpartition("/")[2])
    except ValueError:
        return None
    return key if 0 < len(key) <= MAX_KEY_BYTES and path_of(key) == path else None


class StoreFolder:
    """Functions of ``os`` on regular files below one folder.

    Args:
        path: Path of the folder.

    Raises:
        OSError: The folder cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, _FOLDER)
        except ValueError as error:  # the path has a zero byte
            raise OSError(str(error)) from None
        except OSError:
            if os.path.islink(path):
                raise OSError("the path is a link, which a store does not follow") from None
            raise

    def close(self) -> None:
        """Close the folder; every later call fails."""
        file, self._file = self._file, -1  # because the system reuses the number for another file
        if file >= 0:
            os.close(file)

    def make_folder(self, name: str) -> None:
        """Create a subfolder, unless it exists."""
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=self._file)

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        """Open a regular file.

        Raises:
            OSError: The file cannot be opened, or is not a regular file.
        """
        with self._parent(path) as (folder, name):
            # A pipe that nothing writes to would block the open.
            file = os.open(name, flags | _NO_LINK | os.O_NONBLOCK, MODE, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "the path is not a regular file", path)
        except BaseException:
            os.close(file)
            raise
        return file

    def stat(self, path: str) -> os.stat_result:
        """Return the size and the times of a regular file.

        Raises:
            OSError: The file does not exist, or cannot be examined.
        """
        with self._parent(path) as (folder, name):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(errno.ENOENT, "the path is not a regular file", path)
        return found

    def has(self, path: str) -> bool:
        """Whether a regular file exists."""
        try:
            self.stat(path)
        except OSError:
            return False
        return True

    def read_note(self, path: str) -> bytes:
        """Return the content of a small file.

        Raises:
            OSError: The file cannot be read, or is too large.
        """
        file = self.open(path)
        try:
            content = os.read(file, _MOST_OF_A_NOTE + 1)
        finally:
            os.close(file)
        if len(content) > _MOST_OF_A_NOTE:
            raise OSError(errno.EFBIG, "the file is too large", path)
        return content

    def set_time_of_use(self, path: str, nanoseconds: int) -> None:
        """Set the times of a file."""
        with self._parent(path) as (folder, name):
            times = (nanoseconds, nanoseconds)
            os.utime(name, ns=times, dir_fd=folder, follow_symlinks=False)

    def unlink(self, path: str) -> int:
        """Remove a regular file, and return its size in bytes.

        Raises:
            OSError: The file does not exist, or cannot be removed.
        """
        size = self.stat(path).st_size
        with self._parent(path) as (folder, name):
            os.unlink(name, dir_fd=folder)  # removes a link itself, not its target
        return size

    def rename(self, old: str, new: str) -> None:
        """Rename a file; this replaces a file with the new name, but not a folder."""
        with self._parent(old) as (source, old_name), self._parent(new) as (target, new_name):
            os.rename(old_name, new_name, src_dir_fd=source, dst_dir_fd=target)

    def files(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield path and state of each regular file in a folder, if the folder exists.

        Raises:
            OSError: The folder cannot be listed.
        """
        with ExitStack() as opened:
            try:
                file, _ = opened.enter_context(self._parent(f"{folder}/"))
            except (FileNotFoundError, NotADirectoryError):
                return
            for entry in opened.enter_context(os.scandir(file)):
                with suppress(OSError):  # removed just now
                    state = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(state.st_mode):
                        yield f"{folder}/{entry.name}", state

    def entries(self, shard: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield path and state of each file of a key in a shard."""
        return ((path, state) for path, state in self.files(shard) if key_of(path) is not None)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        folder, _, name = path.rpartition("/")
        if not folder:
            yield self._file, name
            return
        file = os.open(folder, _FOLDER, dir_fd=self._file)
        try:
            yield file, name
        finally:
            os.close(file)
