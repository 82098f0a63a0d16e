"""A small store in LMDB; ``wrong_lmdb.txt`` has edits of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import lmdb

from kvview.tier import Namespace, Threaded


class LMDBStore(Threaded):
    """A database for each namespace; a process opens it once, and its stores share it."""

    databases: ClassVar[dict[Path, tuple[Any, set[LMDBStore]]]] = {}
    lock = threading.Lock()

    def __init__(self, namespace: Namespace, root: str) -> None:
        self._folder = Path(root, namespace.digest.hex())
        with self.lock:
            if self._folder not in self.databases:
                self._folder.mkdir(parents=True, exist_ok=True)
                database = lmdb.open(str(self._folder), map_size=1 << 30, sync=False)
                self.databases[self._folder] = database, set()
            self._db, users = self.databases[self._folder]
            users.add(self)
        super().__init__(namespace, threads=2)

    def close(self) -> None:
        super().close()
        with self.lock:
            _, users = self.databases.get(self._folder, (None, {self}))
            users.discard(self)
            if not users:
                self.databases.pop(self._folder, None)
                self._db.close()

    def has(self, key: bytes, /) -> bool:
        with self._db.begin() as transaction:
            return transaction.get(key) is not None

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        with self._db.begin(buffers=True) as transaction:
            found = transaction.get(key)
            if found is None or len(found) != len(page):
                return False
            page[:] = found
            return True

    def write(self, key: bytes, page: memoryview, /) -> bool:
        with self._db.begin(write=True) as transaction:
            return bool(transaction.put(key, page))
