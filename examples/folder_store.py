r"""A store in a folder, one file for each page, and a connector made of it.

    kvview check examples/folder_store.py:FolderStore --option root={tmp}
    kvview check examples/folder_store.py:FolderConnector --option root={tmp} --option weights=1

``Threaded`` adds threads, jobs and lookups that do not block. The guard in front of every store
adds checksums, deadlines and protection against a store that hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from kvview.tier import Namespace, Threaded
from kvview_reference.store_connector import StoreConnector
from kvview_reference.tier import NamespaceFolder


class FolderStore(Threaded):
    """Keeps each page in a separate file."""

    def __init__(self, namespace: Namespace, root: str, threads: int = 4) -> None:
        self._folder = NamespaceFolder(root, namespace)
        self._scratch = self._folder.make_scratch()
        super().__init__(namespace, threads=threads)

    def has(self, key: bytes, /) -> bool:
        """Whether the file of a key exists."""
        return self._path(key).is_file()

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        """Read the page, and refuse a file that is shorter or longer than the page."""
        with self._path(key).open("rb", buffering=0) as file:
            return file.readinto(page) == len(page) and not file.read(1)

    def write(self, key: bytes, page: memoryview, /) -> bool:
        """Write to a temporary name and rename the file, so that each final file is complete."""
        path = self._path(key)
        half = self._scratch / f".{path.name}.{threading.get_ident()}"
        try:
            half.write_bytes(page)
            half.rename(path)
        finally:
            half.unlink(missing_ok=True)  # after a failure
        return True

    def delete(self, keys: Sequence[bytes], /) -> None:
        """Remove the files of keys on a thread."""
        self.remove_later(keys, lambda key: self._path(key).unlink(missing_ok=True))

    def close(self) -> None:
        """End the jobs in flight, and remove the files that no other process uses."""
        super().close()
        self._folder.close()

    def _path(self, key: bytes) -> Path:
        return self._folder.path / key.hex()


class FolderConnector(StoreConnector):
    """The options are ``root``, ``threads``, and either ``store_blocks`` or ``weights``."""

    store = FolderStore
