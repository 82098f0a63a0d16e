"""The kit on a store in LMDB, whose file is mapped into memory, and on five wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvview.testing import run_checks
from tests.mutants.edits import Base, Variant, read_variants

pytest.importorskip("lmdb")
pytest.importorskip("xxhash")

FOLDER = Path(__file__).parent
RIGHT = Base("LMDBStore", (FOLDER / "lmdb_store.py",))


@pytest.mark.slow
def test_the_right_store_is_green() -> None:
    store = Variant(RIGHT, "", "", "the right one").load()
    report = run_checks(store, options={"root": "{tmp}"}, seeds=20)
    assert report.is_clean, report.summary()


WRONG = read_variants(FOLDER / "wrong_lmdb.txt", RIGHT)


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.name for wrong in WRONG])
def test_a_wrong_store_is_red(wrong: Variant) -> None:
    select = [wrong.notes["check"]]
    report = run_checks(wrong.load(), options={"root": "{tmp}"}, steps=20, select=select)
    assert wrong.law in {failure.check.law for failure in report.failures}, report.summary()
