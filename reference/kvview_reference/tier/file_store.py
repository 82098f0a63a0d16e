"""``FileStore``: a file a key, for many threads and processes on one folder.

    <root>/<namespace>/namespace.json   whose bytes these are
                       <shard>/<key>    a header with a seal, then the page
                       half/            what is being written
                       lock, budget     see ``file_budget``

1. A file gets its name when it is whole (TIER-9). There is no fsync: what a power cut leaves
   half-written fails its seal.
2. What fails its seal is removed, so that the next put stores it again (TIER-4).
3. ``max_bytes`` is a budget of this namespace, for all processes together (TIER-8).
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvview import ConfigError
from kvview.tier import Namespace, TierUsage
from kvview_reference.tier.deleting import DeletingStore
from kvview_reference.tier.entry import EntryFormat
from kvview_reference.tier.file_budget import MODE, SHARDS, FileBudget


class FileStore(DeletingStore):
    """A tier in a folder (``verifies``: its own seals see what was damaged).

    Args:
        namespace: Whose bytes; a folder of its own.
        root: Folder for the folders of namespaces; made if it is missing.
        max_bytes: Budget of this namespace, None for no limit.
        threads: That read and write.
        checksum: ``"xxh3"``, ``"crc32"``, or ``"none"`` where the guard's is enough.

    Raises:
        ConfigError: An option that cannot be used.
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
        self._folder = Path(root, namespace.digest.hex())
        self._half = self._folder / "half"
        try:
            self._half.mkdir(parents=True, exist_ok=True)
            self._claim(namespace)
        except OSError as error:
            raise ConfigError(f"the folder {str(self._folder)!r} cannot be used: {error}") from None
        self._numbers = itertools.count()
        self._budget = FileBudget(self._folder, max_bytes)
        super().__init__(namespace, threads=threads)

    def holds(self, key: bytes, /) -> bool:
        """Whether there is a file."""
        return os.path.exists(self._path(key))

    def load(self, key: bytes, page: memoryview, /) -> bool:
        """Read and compare."""
        path = self._path(key)
        head, more = bytearray(EntryFormat.head_bytes(key)), bytearray(b"?")
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                num_read = os.readv(file, [head, page, more])
            finally:
                os.close(file)
        except OSError as error:
            if error.errno == errno.EIO:
                return False
            raise
        if num_read != len(head) + len(page) or head != self._format.head(key, page):
            return False
        self._budget.used(path)
        return True

    def store(self, key: bytes, page: memoryview, *, is_replaced: bool) -> bool:
        """Write under another name, then give it its own."""
        path = self._path(key)
        if is_replaced:
            self._budget.remove(path)
        elif os.path.exists(path):
            self._budget.used(path)
            return True
        head = self._format.head(key, page)
        num_bytes = len(head) + len(page)
        if not self._budget.reserve(num_bytes):
            return False
        half = f"{self._half}/{os.getpid()}-{threading.get_ident()}-{next(self._numbers)}"
        try:
            file = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE)
            try:
                if os.writev(file, [head, page]) != num_bytes:
                    raise OSError(errno.ENOSPC, "a write was cut short")
            finally:
                os.close(file)
            self._budget.used(half)
            self._budget.commit(half, path, num_bytes)
        except BaseException:
            self._budget.give_up(half, num_bytes)
            raise
        return True

    def remove(self, key: bytes, /) -> None:
        """Remove the file."""
        self._budget.remove(self._path(key))

    def touch(self, keys: Sequence[bytes], /) -> None:
        """Set the times of files, on a thread."""
        self._later(partial(self._touch, [*keys]))

    def usage(self) -> TierUsage:
        """Bytes of all files, as this process knows them."""
        return TierUsage(self._budget.used_bytes, self._budget.max_bytes)

    def on_evicted(self, evicted: Callable[[Sequence[bytes]], None], /) -> None:
        """Call ``evicted`` with keys whose files this process removed to make room."""
        self._budget.on_evicted = lambda path: evicted([bytes.fromhex(os.path.basename(path))])

    def close(self) -> None:
        """End what is in flight; the folder is free for others."""
        super().close()
        self._budget.close()

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._budget.used(self._path(key))

    def _path(self, key: bytes) -> str:
        return f"{self._folder}/{SHARDS[zlib.crc32(key) & 0xFF]}/{key.hex()}"

    def _claim(self, namespace: Namespace) -> None:
        """Say whose folder it is, or refuse another's (TIER-10)."""
        path = self._folder / "namespace.json"
        while not path.exists():
            half = self._half / f"namespace-{os.getpid()}-{threading.get_ident()}"
            with suppress(FileNotFoundError):  # who opens the folder alone just now removes it
                half.write_text(namespace.to_json(), encoding="utf-8")
                half.rename(path)
        found = Namespace.from_json(path.read_text(encoding="utf-8"))
        namespace.require_same(found, str(self._folder))
