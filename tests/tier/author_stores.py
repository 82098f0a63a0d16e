"""Small stores as authors write them, in three media; ``wrong_*.txt`` have edits of two."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
import threading
from pathlib import Path

from examples.folder_store import FolderStore
from kvview import ConfigError
from kvview.tier import Namespace, Threaded

_HEAD = struct.Struct("<HI")  # bytes of the key and of the page


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


class LogStore(Threaded):
    """One file that only grows, for one process at a time, with an index in memory."""

    def __init__(self, namespace: Namespace, root: str) -> None:
        Path(root).mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._log = os.open(Path(root, namespace.digest.hex()), flags)
        try:
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._log)
            raise ConfigError("another process has this log open") from None
        self._places: dict[bytes, tuple[int, int]] = {}
        self._end = 0
        self._read_log()
        self._lock = threading.Lock()
        super().__init__(namespace, threads=2)

    def _read_log(self) -> None:
        size = os.fstat(self._log).st_size
        while self._end + _HEAD.size <= size:
            key_bytes, num_bytes = _HEAD.unpack(os.pread(self._log, _HEAD.size, self._end))
            start = self._end + _HEAD.size + key_bytes
            if start + num_bytes > size:
                break
            key = os.pread(self._log, key_bytes, start - key_bytes)
            self._places[key] = start, num_bytes
            self._end = start + num_bytes
        os.ftruncate(self._log, self._end)  # an entry that was being written by a killed process

    def close(self) -> None:
        super().close()
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def has(self, key: bytes, /) -> bool:
        return key in self._places

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        start, num_bytes = self._places[key]
        return num_bytes == len(page) == os.preadv(self._log, [page], start)

    def write(self, key: bytes, page: memoryview, /) -> bool:
        entry = _HEAD.pack(len(key), len(page)) + key + page
        with self._lock:
            if os.write(self._log, entry) != len(entry):
                os.ftruncate(self._log, self._end)
                return False
            self._places[key] = self._end + len(entry) - len(page), len(page)
            self._end += len(entry)
        return True


RIGHT = (SqliteStore, WALStore, LogStore, FolderStore)
