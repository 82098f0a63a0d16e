"""The kit on the example in SQLite with a write-ahead log, and on wrong ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from examples import sqlite_store
from kvview.testing import run_checks
from tests.mutants.edits import Base, Variant, read_variants

pytest.importorskip("xxhash")
pytestmark = pytest.mark.slow

EXAMPLE = Base("SQLiteStore", (Path(sqlite_store.__file__),))
WITH_LOG = (
    ("    CREATE TABLE", "    PRAGMA journal_mode = WAL;\n    CREATE TABLE"),
    (
        "_USED_BYTES = ",
        '_TO_DATABASE = "PRAGMA wal_checkpoint(TRUNCATE)"\n_USED_BYTES = ',
    ),
    (
        "        has_room = len(page)",
        """\
        try:
            return self._write(key, page)
        finally:
            self.db.execute(_TO_DATABASE)  # the log counts too

    def _write(self, key: bytes, page: memoryview) -> bool:
        has_room = len(page)""",
    ),
    (
        "_DELETE_OLDEST).rowcount > 0",
        "_DELETE_OLDEST).rowcount > 0\n            self.db.execute(_TO_DATABASE)",
    ),
)


def test_the_right_store_is_green() -> None:
    store = Variant(EXAMPLE, "", "", "the right one", WITH_LOG).load()
    report = run_checks(store, options={"root": "{tmp}"}, seeds=20)
    assert report.is_clean, [str(result.failure) for result in report.failures]


WRONG = [
    replace(wrong, edits=(*WITH_LOG, *wrong.edits))
    for wrong in read_variants(Path(__file__).with_name("wrong_wal.txt"), EXAMPLE)
]


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.name for wrong in WRONG])
def test_a_wrong_store_is_red(wrong: Variant) -> None:
    select = [wrong.notes["check"]]
    report = run_checks(wrong.load(), options={"root": "{tmp}"}, steps=20, select=select)
    assert wrong.law in {failure.check.law for failure in report.failures}, report.summary()
