"""Small stores as authors write them: right ones in three media, and wrong ones."""

from __future__ import annotations

import dbm.dumb
import os
import sqlite3
import threading
import uuid
from pathlib import Path

from examples.folder_store import FolderStore
from kvview.tier import Namespace, Threaded


class SqliteStore(Threaded):
    """One database file with a rollback journal; a connection for each thread."""

    journal = "DELETE"

    def __init__(self, namespace: Namespace, root: str) -> None:
        folder = Path(root, namespace.digest.hex())
        folder.mkdir(parents=True, exist_ok=True)
        self._file = str(folder / "pages.db")
        self._local = threading.local()
        with self._db as db:
            db.execute(f"PRAGMA journal_mode={self.journal}")
            db.execute("CREATE TABLE IF NOT EXISTS pages (key BLOB PRIMARY KEY, page BLOB)")
        super().__init__(namespace, threads=2)

    @property
    def _db(self) -> sqlite3.Connection:
        if not hasattr(self._local, "db"):
            self._local.db = sqlite3.connect(self._file, timeout=20)
            self._local.db.execute("PRAGMA synchronous=OFF")
        connection: sqlite3.Connection = self._local.db
        return connection

    def close(self) -> None:
        super().close()
        if hasattr(self._local, "db"):
            self._local.db.close()
            del self._local.db

    def _page(self, key: bytes) -> bytes:
        row = self._db.execute("SELECT page FROM pages WHERE key=?", (key,)).fetchone()
        return row[0] if row else b""

    def has(self, key: bytes, /) -> bool:
        return bool(self._page(key))

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        found = self._page(key)
        if len(found) == len(page):
            page[:] = found
        return len(found) == len(page)

    def write(self, key: bytes, page: memoryview, /) -> bool:
        with self._db as db:
            db.execute("INSERT OR REPLACE INTO pages VALUES (?, ?)", (key, bytes(page)))
        return True


class WALStore(SqliteStore):
    """The same with a write-ahead log, whose index is mapped into memory."""

    journal = "WAL"


class DbmStore(Threaded):
    """Python's own ``dbm.dumb``: one process at a time, one lock for all threads."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        Path(root).mkdir(parents=True, exist_ok=True)
        self._db = dbm.dumb.open(str(Path(root, namespace.digest.hex())))
        self._lock = threading.Lock()
        super().__init__(namespace, threads=2)

    def close(self) -> None:
        super().close()
        with self._lock:
            self._db.close()

    def has(self, key: bytes, /) -> bool:
        with self._lock:
            return key in self._db

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        with self._lock:
            found = self._db.get(key, b"")
        if len(found) == len(page):
            page[:] = found
        return len(found) == len(page)

    def write(self, key: bytes, page: memoryview, /) -> bool:
        with self._lock:
            self._db[key] = bytes(page)
            self._db.sync()
        return True


# --- wrong ---


class LeavesATemporaryFile(FolderStore):
    """TIER-9: each put leaves an empty file behind."""

    def write(self, key: bytes, page: memoryview, /) -> bool:
        (self._folder / f".{uuid.uuid4().hex}").touch()
        return super().write(key, page)


class LosesLongKeys(FolderStore):
    """TIER-9: a store that is reopened does not find keys of more than 64 bytes."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(namespace, root)
        self._before = set(os.listdir(self._folder))

    def has(self, key: bytes, /) -> bool:
        return super().has(key) and not (len(key) > 64 and key.hex() in self._before)


class CommitsLate(SqliteStore):
    """TIER-9: pages are committed by the next close, so that a killed process loses them."""

    def write(self, key: bytes, page: memoryview, /) -> bool:
        self._db.execute("INSERT OR REPLACE INTO pages VALUES (?, ?)", (key, bytes(page)))
        return True


class IgnoresTheSize(SqliteStore):
    """TIER-1: a page of another size is filled as far as it goes."""

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        found = self._page(key)
        size = min(len(found), len(page))
        page[:size] = found[:size]
        return bool(found)


class SharesTheTable(SqliteStore):
    """TIER-10: all namespaces have one database."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        super().__init__(Namespace("all", weights="all"), root)


class IgnoresTheCase(SqliteStore):
    """TIER-7: keys are texts that are compared without regard to case."""

    def _page(self, key: bytes) -> bytes:
        return super()._page(key.lower())

    def write(self, key: bytes, page: memoryview, /) -> bool:
        return super().write(key.lower(), page)


class OpensAFileForEachLoad(FolderStore):
    """TIER-11: a load leaves its file open."""

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        os.open(self._path(key), os.O_RDONLY)
        return super().read_into(key, page)


RIGHT = (SqliteStore, WALStore, DbmStore, FolderStore)
WRONG = {
    LeavesATemporaryFile: "TIER-9",
    LosesLongKeys: "TIER-9",
    CommitsLate: "TIER-9",
    IgnoresTheSize: "TIER-1",
    SharesTheTable: "TIER-10",
    IgnoresTheCase: "TIER-7",
    OpensAFileForEachLoad: "TIER-11",
}
