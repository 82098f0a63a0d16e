"""A store with a byte budget, in an SQLite database, and a connector made of it.

    kvview check examples/sqlite_store.py:SQLiteStore --option root={tmp}
    kvview check examples/sqlite_store.py:SQLiteConnector --option root={tmp} --option weights=1

All files under ``root`` count against the budget, including the journal of a transaction.
"""

from __future__ import annotations

import sqlite3

from kvview.tier import Namespace, Threaded
from kvview_reference.store_connector import StoreConnector
from kvview_reference.tier import NamespaceFolder

_SCHEMA = """
    PRAGMA page_size = 1024;      -- small, so that an entry wastes little
    PRAGMA auto_vacuum = FULL;    -- the file shrinks when pages are evicted
    PRAGMA synchronous = OFF;     -- a power cut may damage pages, and the guard finds these
    CREATE TABLE IF NOT EXISTS pages (number INTEGER PRIMARY KEY, key BLOB UNIQUE, page BLOB);
"""
_USED_BYTES = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
_DELETE_OLDEST = "DELETE FROM pages WHERE number = (SELECT min(number) FROM pages)"


class SQLiteStore(Threaded):
    """Evicts the oldest pages, so that the database and its journal fit into ``max_bytes``."""

    def __init__(self, namespace: Namespace, root: str, max_bytes: int = 10**9) -> None:
        self.folder = NamespaceFolder(root, namespace)
        # The journal of one eviction has at most twice the bytes of the largest page.
        self.largest_page, self.largest_file = max_bytes // 10, max_bytes * 7 // 10
        self.db = sqlite3.connect(self.folder.path / "pages.db", timeout=5, check_same_thread=False)
        self.db.executescript(_SCHEMA)
        super().__init__(namespace, threads=1)  # SQLite has one writer at a time

    def has(self, key: bytes, /) -> bool:
        return bool(self.db.execute("SELECT 1 FROM pages WHERE key = ?", (key,)).fetchone())

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        found = self.db.execute("SELECT page FROM pages WHERE key = ?", (key,)).fetchone()
        if found is None or len(found[0]) != len(page):
            return False
        page[:] = found[0]
        return True

    def write(self, key: bytes, page: memoryview, /) -> bool:
        has_room = len(page) <= self.largest_page
        while has_room:
            with self.db:
                self.db.execute("BEGIN IMMEDIATE")  # no other process writes until the end
                (used,) = self.db.execute(_USED_BYTES).fetchone()
                if used + len(page) <= self.largest_file:
                    self.db.execute("REPLACE INTO pages (key, page) VALUES (?, ?)", (key, page))
                    return True
                has_room = self.db.execute(_DELETE_OLDEST).rowcount > 0
        return False

    def close(self) -> None:
        super().close()
        self.db.close()
        self.folder.close()


class SQLiteConnector(StoreConnector):
    """The options are ``root``, ``max_bytes`` and ``weights``."""

    store = SQLiteStore
