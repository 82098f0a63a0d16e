"""``FileStore``: one file for each key, in a folder that many threads and processes share.

    <root>/<namespace>/namespace.json   the namespace of the pages
                       <shard>/<key>    a header with a seal, then the page
                       half/            files that are being written
                       lock, turn, budget   see ``file_budget``

1. A file gets its final name when it is complete (TIER-9). There is no fsync, because a
   file that a power cut left half-written fails its seal.
2. A file that fails its seal is removed, so that the next put stores it again (TIER-4).
3. ``max_bytes`` is a budget of this namespace, for all processes together (TIER-8).
4. The folder of a namespace that belongs to one run is removed when the run ends, or later if the
   run was killed; see ``namespace_folder``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from kvview import ConfigError
from kvview.tier import Namespace, TierUsage
from kvview_reference.tier.deleting import DeletingStore
from kvview_reference.tier.entry import EntryFormat
from kvview_reference.tier.folder.file_budget import FileBudget
from kvview_reference.tier.folder.namespace_folder import NamespaceFolder
from kvview_reference.tier.folder.store_folder import NOTE, StoreFolder, key_of, path_of

_CLAIMS = 10  # attempts, because two openers may remove each other's half-written note


class FileStore(DeletingStore):
    """A tier in a folder, which verifies its pages with its own seals.

    Args:
        namespace: Namespace of the pages, which has its own folder.
        root: Folder for the folders of namespaces; created if it is missing.
        max_bytes: Budget of this namespace, in bytes; None for no limit.
        threads: Number of threads that read and write.
        checksum: ``"xxh3"``, ``"crc32"``, or ``"none"`` if the checksum of the guard is enough.

    Raises:
        ConfigError: An option cannot be used, or the folder cannot be opened.
        NamespaceMismatchError: The folder was written for another namespace.
    """

    verifies = True

    def __init__(
        self,
        namespace: Namespace,
        *,
        root: str,
        max_bytes: int | None = None,
        threads: int = 4,
        checksum: str = "xxh3",
    ) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise ConfigError(f"max_bytes must be more than 0, got {max_bytes}")
        self._format = EntryFormat(namespace, checksum)
        with ExitStack() as on_error:
            self._folder = NamespaceFolder(root, namespace)
            on_error.callback(self._folder.close)
            try:
                self._files = StoreFolder(self._folder.path)
                on_error.callback(self._files.close)
                self._files.make_folder("half")
                self._claim(namespace)
                self._budget = FileBudget(self._files, max_bytes)
            except OSError as error:
                raise ConfigError(
                    f"the folder {str(self._folder.path)!r} cannot be used: {error}"
                ) from None
            on_error.callback(self._budget.close)
            super().__init__(namespace, threads=threads)
            on_error.pop_all()

    def holds(self, key: bytes, /) -> bool:
        """Whether the file of a key exists."""
        return self._files.has(self._path(key))

    def load(self, key: bytes, page: memoryview, /) -> bool:
        """Read and verify a page; if its file cannot be read, the next put replaces the file."""
        path = self._path(key)
        head, more = bytearray(EntryFormat.head_bytes(key)), bytearray(b"?")
        try:
            file = self._files.open(path)
            try:
                num_read = os.readv(file, [head, page, more])
            finally:
                os.close(file)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno == errno.EIO:
                return False
            self._hidden.add(key)
            raise
        if num_read != len(head) + len(page) or head != self._format.head(key, page):
            return False
        self._budget.used(path)
        return True

    def store(self, key: bytes, page: memoryview, *, is_replaced: bool) -> bool:
        """Write a page into a file with a temporary name, then rename the file."""
        path = self._path(key)
        if is_replaced:
            self._budget.remove(path)
        elif self._files.has(path):
            self._budget.used(path)
            return True
        head = self._format.head(key, page)
        num_bytes = len(head) + len(page)
        if not self._budget.reserve(num_bytes):
            return False
        half = f"half/{uuid.uuid4().hex}"
        try:
            with self._written(half, [head, page]):
                self._budget.used(half)
                self._budget.commit(half, path, num_bytes)
        except BaseException:
            with suppress(OSError):
                self._budget.give_up(half, num_bytes)
            raise
        return True

    def remove(self, key: bytes, /) -> None:
        """Remove the file of a key."""
        self._budget.remove(self._path(key))

    def touch(self, keys: Sequence[bytes], /) -> None:
        """Set the times of files, on a thread."""
        self._later(partial(self._touch, [*keys]))

    def usage(self) -> TierUsage:
        """Return the bytes of all files, which all processes count together."""
        return TierUsage(self._budget.used_bytes, self._budget.max_bytes)

    def on_evicted(self, evicted: Callable[[Sequence[bytes]], None], /) -> None:
        """Call ``evicted`` with the keys whose files this process removes to make room."""

        def report(path: str) -> None:
            if key := key_of(path):
                evicted([key])

        self._budget.oldest.on_evicted = report

    def close(self) -> None:
        """End the jobs in flight, and release the folder."""
        super().close()
        self._budget.close()
        self._files.close()
        self._folder.close()

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._budget.used(self._path(key))

    def _path(self, key: bytes) -> str:
        """Return the path of a key's file in the folder."""
        return path_of(key)

    @contextmanager
    def _written(self, path: str, parts: Sequence[bytes | memoryview]) -> Iterator[None]:
        """Write a new file completely or not at all, and keep its lock while it is renamed."""
        file = self._files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # before the first byte
            if os.writev(file, parts) != sum(map(len, parts)):
                raise OSError(errno.ENOSPC, "only a part of the page was written")
            yield
        except BaseException:
            with suppress(OSError):
                self._files.unlink(path)
            raise
        finally:
            os.close(file)

    def _claim(self, namespace: Namespace) -> None:
        """Write the namespace into the folder; refuse a folder of another namespace (TIER-10)."""
        for _ in range(_CLAIMS):
            with suppress(FileNotFoundError):
                note = self._files.read_note(NOTE).decode("utf-8", "replace")
                break
            half = f"half/{uuid.uuid4().hex}"
            content = namespace.to_json().encode()
            with suppress(FileNotFoundError), self._written(half, [content]):
                self._files.rename(half, NOTE)
        else:
            raise OSError(f"{NOTE} cannot be kept")
        where = str(self._folder.path)
        try:
            found = Namespace.from_json(note)
        except ConfigError as error:
            raise ConfigError(f"the folder {where!r} cannot be used: {NOTE}: {error}") from None
        namespace.require_same(found, where)
