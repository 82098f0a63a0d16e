"""Stores that refuse pages, that have a budget by default, or whose place the kit cannot see."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

import pytest

from examples.compressed_memory import CompressedConnector
from examples.folder_store import FolderStore
from examples.host_memory import HostMemoryConnector
from kvview.testing import ExpectedFailure, LawBroken, NotExercised, Outcome, Report, run_checks
from kvview.testing.checks import coverage_check
from kvview.testing.effort import Effort
from kvview.testing.results.law_broken import Gap
from kvview.testing.runner import PlannedCheck, plan_checks, run_planned
from kvview.testing.tier.suite import suite_of
from kvview.tier import Namespace, Threaded
from kvview_reference.store_connector import StoreConnector, Transform
from kvview_reference.tier import FileStore


class OnAServer(Threaded):
    """Keeps pages outside of every folder, where another store of the namespace finds them."""

    pages: ClassVar[dict[bytes, bytes]] = {}

    def __init__(self, namespace: Namespace, max_bytes: int = 0) -> None:
        self.prefix, self.max_bytes = namespace.digest, max_bytes
        super().__init__(namespace, threads=1)

    def has(self, key: bytes, /) -> bool:
        return self.prefix + key in self.pages

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        found = self.pages.get(self.prefix + key, b"")
        if len(found) == len(page):
            page[:] = found
        return len(found) == len(page)

    def write(self, key: bytes, page: memoryview, /) -> bool:
        if self.max_bytes and len(page) > self.max_bytes:
            return False
        self.pages[self.prefix + key] = bytes(page)
        mine = [name for name in self.pages if name.startswith(self.prefix)]
        while self.max_bytes and sum(len(self.pages[name]) for name in mine) > self.max_bytes:
            del self.pages[mine.pop(0)]
        return True


class IsDown(FolderStore):
    def write(self, key: bytes, page: memoryview, /) -> bool:
        raise ConnectionError("the server is down")


class IsUnreachable(IsDown):
    """Its client tries again and again before it raises."""

    def has(self, key: bytes, /) -> bool:
        time.sleep(0.2)
        raise ConnectionError("the server is down")


class RefusesSome(FolderStore):
    """Right: it stores seven of ten keys."""

    def write(self, key: bytes, page: memoryview, /) -> bool:
        return sum(key) % 10 >= 3 and super().write(key, page)


class SmallByDefault(FileStore):
    """Right: it keeps 3 MB, unless an option sets another budget."""

    def __init__(self, namespace: Namespace, root: str, max_bytes: int = 3_000_000) -> None:
        super().__init__(namespace, root=root, max_bytes=max_bytes)


def gaps_in(report: Report) -> dict[str, str]:
    found = [one.failure for one in report.not_checked if isinstance(one.failure, NotExercised)]
    return {gap.name: gap.what for failure in found for gap in failure.gaps}


def test_a_store_on_a_server_names_the_laws_that_the_kit_cannot_check() -> None:
    select = ["TIER-9", "TIER-10", "check_tier_8", "coverage"]
    report = run_checks(OnAServer, seeds=15, steps=6, select=select)
    assert not report.failures
    assert "cannot be counted, because" in gaps_in(report)["TIER-8"]
    outcomes = {one.name: one.outcome for one in report}
    assert outcomes["check_tier_10"] == outcomes["check_tier_9"] == Outcome.PASSED
    accepted = [ExpectedFailure("coverage: TIER-8", "the server limits its memory")]
    report = run_checks(OnAServer, seeds=15, steps=6, select=["coverage"], expected=accepted)
    assert report.is_clean


def test_a_store_that_stores_nothing_is_not_checked_and_names_the_exception() -> None:
    report = run_checks(IsDown, options={"root": "{tmp}"}, seeds=3, steps=6, select=["coverage"])
    assert report.verdict().startswith("not checked: no page was ever stored; the first exception")
    assert 'raise ConnectionError("the server is down")' in report.verdict()


def test_a_store_that_waits_for_its_server_is_red_with_the_exception() -> None:
    suite = suite_of(IsUnreachable, {"root": "{tmp}"})
    suite.patience = 0.5
    machine: Any = suite.Machine()
    machine.start()
    for _ in range(2):  # the first lookup ends with an exception
        machine.ask("lookup", [b"key"])
        time.sleep(0.3)
    suite.patience = 0.05
    with pytest.raises(LawBroken, match="the first exception: ConnectionError: the server is down"):
        machine.results([b"another"])
    machine.teardown()


@pytest.mark.slow
@pytest.mark.parametrize("store", [RefusesSome, SmallByDefault])
def test_a_right_but_unusual_store_is_green(store: Any) -> None:
    report = run_checks(store, options={"root": "{tmp}"}, seeds=15)
    assert report.is_clean, [str(result.failure) for result in report.failures]


# --- the parts of a connector ---


class Truncates(Transform):
    """Wrong: it drops zeros at the end of a page."""

    def encode(self, key: bytes, page: memoryview) -> bytes:
        return bytes(page).rstrip(b"\0")

    def decode(self, key: bytes, data: memoryview, page: memoryview) -> None:
        page[: len(data)] = data


class HasAKeyOfItsProcess(Transform):
    """Right, unless other processes load the pages: it encrypts with a key that no file has."""

    own = hash("a text") & 255

    def encode(self, key: bytes, page: memoryview) -> bytes:
        return bytes(byte ^ self.own for byte in page)

    def decode(self, key: bytes, data: memoryview, page: memoryview) -> None:
        page[:] = self.encode(key, data)


class Ciphered(StoreConnector):
    store = FolderStore
    transform = HasAKeyOfItsProcess


class KeepsEqualPagesOnce(Threaded):
    """Keeps equal pages once; whether it counts their keys decides whether it is right."""

    counts_keys = True

    def __init__(self, namespace: Namespace) -> None:
        self.names: dict[bytes, bytes] = {}
        super().__init__(namespace, threads=1)

    def has(self, key: bytes, /) -> bool:
        return key in self.names

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        found = self.names[key]
        if len(found) == len(page):
            page[:] = found
        return len(found) == len(page)

    def write(self, key: bytes, page: memoryview, /) -> bool:
        self.names[key] = bytes(page)
        return True

    def delete(self, keys: Sequence[bytes], /) -> None:
        self.remove_later(keys, self.remove)

    def remove(self, key: bytes) -> None:
        page = self.names.pop(key, None)
        if not self.counts_keys:
            for other in [other for other in self.names if self.names[other] == page]:
                self.names[other] = b""


class CountsNoKeys(KeepsEqualPagesOnce):
    counts_keys = False


class SaysStored(FolderStore):
    """Wrong: a write that fails is reported as a success."""

    def write(self, key: bytes, page: memoryview, /) -> bool:
        try:
            return super().write(key, page) and len(page) < 2000
        finally:
            self._path(key).unlink() if len(page) == 4096 else None

    def has(self, key: bytes, /) -> bool:
        return True


class BelievesEachWrite(FolderStore):
    """Wrong: a write on a full disk is reported as a success."""

    def write(self, key: bytes, page: memoryview, /) -> bool:
        with suppress(OSError):
            super().write(key, page)
        return True


class Wrong(StoreConnector):
    store = SaysStored
    transform = Truncates


@pytest.mark.slow
def test_a_check_of_a_connector_checks_its_parts_first() -> None:
    options = {"root": "{tmp}", "cpu_blocks": "{blocks}", "weights": "{tmp}"}
    select = ["check_tier_7", "check_transform_*"]
    report = run_checks(Wrong, options=options, seeds=5, select=select)
    broken = [(one.part, one.law) for one in report.failures]
    assert ("SaysStored", "TIER-7") in broken
    assert ("Truncates", "TIER-1") in broken
    assert "SaysStored" in report.verdict()


def test_failures_of_their_own_come_before_other_gaps() -> None:
    results = []
    for name in ("TIER-8", "failed loads"):

        def gaps(factory: Any, name: str = name) -> list[Gap]:
            return [Gap(name, f"{name}!")]

        check = coverage_check(f"check_{name}", "", "connector", gaps)
        results.append(run_planned(PlannedCheck(check, Wrong, "", ""), Effort()))
    report = Report("target", "connector", 0, 1, results, 2)
    assert report.verdict() == "not checked: failed loads!"


def _laws(connector: Any, **options: Any) -> set[tuple[str, str]]:
    _, planned = plan_checks(connector, Effort(options=options))
    return {(one.part, one.check.law) for one in planned if not one.skip_reason}


def test_parts_follow_from_the_options() -> None:
    assert ("Zlib", "TIER-1") in _laws(CompressedConnector, cpu_bytes="{bytes}")
    store = f"{__name__}:OnAServer"
    assert ("OnAServer", "TIER-9") in _laws(StoreConnector, store=store, weights="w")
    assert {part for part, _ in _laws(StoreConnector)} == {""}


def test_a_connector_without_lookups_needs_none_of_its_store() -> None:
    report = run_checks(HostMemoryConnector, seeds=2, select=["check_tier_7"])
    assert report.is_clean, [str(result.failure) for result in report.failures]


@pytest.mark.slow  # starts an interpreter
@pytest.mark.parametrize(("weights", "is_green"), [("", True), ("1", False)])
def test_a_page_is_decoded_in_another_process_if_runs_share_it(
    weights: str, is_green: bool
) -> None:
    options = {"root": "{tmp}", "weights": weights} if weights else {"root": "{tmp}"}
    report = run_checks(Ciphered, options=options, select=["test_tier_1_another_process"])
    assert report.is_clean == is_green
    assert {one.law for one in report.failures} == (set() if is_green else {"TIER-1"})


def test_a_success_on_a_full_disk_is_believed() -> None:
    for store in (FolderStore, BelievesEachWrite):
        report = run_checks(store, options={"root": "{tmp}"}, select=["test_tier_6_full_disk"])
        assert report.is_clean == (store is FolderStore)


@pytest.mark.slow
def test_some_keys_have_equal_pages() -> None:
    assert run_checks(KeepsEqualPagesOnce, select=["check_tier_7"]).is_clean
    assert not run_checks(CountsNoKeys, select=["check_tier_7"]).is_clean
