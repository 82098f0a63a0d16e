"""The kit on stores as authors write them, in three media: right ones, and wrong edits of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples import folder_store, remote_store, sqlite_store
from kvview.testing import run_checks
from kvview.testing.effort import Effort
from kvview.testing.runner import plan_checks, run_planned
from kvview.testing.tier.suite import suite_of
from tests.mutants.edits import Base, Variant, read_variants

pytest.importorskip("xxhash")

FOLDER = Path(__file__).parent
REMOTE = Base("RemoteStore", (Path(remote_store.__file__),))
BASES = {
    "wrong_folder.txt": Base("FolderStore", (Path(folder_store.__file__),)),
    "wrong_sqlite.txt": Base("SQLiteStore", (Path(sqlite_store.__file__),)),
    "wrong_remote.txt": REMOTE,
}
WRONG = [wrong for file, base in BASES.items() for wrong in read_variants(FOLDER / file, base)]
FEW = ["check_tier_1", "TIER-6", "TIER-7", "TIER-9", "TIER-10", "TIER-11"]
LONG = ("killed_process", "broken_connections")


def assert_green(store: Any, options: dict[str, object], **effort: Any) -> None:
    report = run_checks(store, options=options, **effort)
    assert report.is_clean, [str(result.failure) for result in report.failures]


def test_the_store_of_a_server_is_green(port: int) -> None:
    assert_green(Variant(REMOTE, "", "", "right").load(), {"port": port}, seeds=5, steps=20)


@pytest.mark.slow
def test_the_store_of_a_folder_is_green() -> None:
    assert_green(folder_store.FolderStore, {"root": "{tmp}"}, steps=10, select=FEW)


@pytest.mark.slow
def test_the_example_with_a_byte_budget_is_green() -> None:
    assert_green(sqlite_store.SQLiteStore, {"root": "{tmp}"}, seeds=3, select=[*FEW, "TIER-8"])


@pytest.mark.slow
def test_a_store_that_declares_it_may_keep_space(monkeypatch: pytest.MonkeyPatch) -> None:
    (store,) = [wrong.load() for wrong in WRONG if wrong.name == "Preallocates"]
    monkeypatch.setattr(store, "reuses_space", True, raising=False)
    assert_green(store, {"root": "{tmp}"}, seeds=10, select=["TIER-8", "TIER-9"])


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(
            wrong,
            marks=[pytest.mark.slow] if wrong.notes["check"].endswith(LONG) else [],
            id=wrong.name,
        )
        for wrong in WRONG
    ],
)
def test_a_wrong_store_is_red(wrong: Variant, request: pytest.FixtureRequest) -> None:
    is_remote = wrong.base == REMOTE
    options = {"port": request.getfixturevalue("port")} if is_remote else {"root": "{tmp}"}
    suite, effort = suite_of(wrong.load(), options), Effort(is_brief=True)
    plan = plan_checks(suite, effort, select=wrong.notes["check"].split(", "))[1]
    failures = [run_planned(planned, effort).failure for planned in plan]
    laws = {failure.law for failure in failures if failure}
    selected = {planned.check.law for planned in plan}
    assert wrong.law in selected
    assert laws & selected, laws  # the first of two laws to break may depend on time
