"""Loads and stores that fail although the check injected no failure."""

from __future__ import annotations

from typing import ClassVar

from kvview.testing.connector import check_connector
from kvview.testing.connector.exercised.coverage import failed_by_themselves, is_headline
from kvview_reference.store_connector import StoreConnector, Transform


class Grows(Transform):
    """Encodes each page into more bytes than it permits itself."""

    def encode(self, key: bytes, page: memoryview) -> bytes:
        return b"\0" + bytes(page)


class Refuses(Transform):
    """Raises, as a client of a server that is down does."""

    def encode(self, key: bytes, page: memoryview) -> bytes:
        raise ConnectionError("the server is down")


class StoresNothing(StoreConnector):
    """Its host memory refuses every page, because no encoded page fits."""

    transform: ClassVar[type[Transform]] = Grows
    defaults: ClassVar = {"cpu_bytes": 1 << 20}


class HasNoServer(StoresNothing):
    transform = Refuses


def test_a_connector_whose_stores_fail_is_not_checked_for_this_reason() -> None:
    report = check_connector(StoresNothing, seeds=3, first_seed=7, max_shrink_runs=0)
    assert not report.failures
    first = report.not_exercised[0]
    assert first.name == "failed stores"
    assert "stores failed without an injected failure" in first.what


def test_the_first_exception_of_a_store_is_reported_with_its_line() -> None:
    report = check_connector(HasNoServer, seeds=3, first_seed=7, max_shrink_runs=0)
    error = 'raise ConnectionError("the server is down")'
    first = report.not_exercised[0].what
    assert "the first: ConnectionError: the server is down at " in first
    assert error in first


def test_few_failed_stores_are_a_note_and_failed_loads_are_a_gap() -> None:
    counts = {"stores without an injected failure": 9, "of these, stores that failed": 2}
    counts |= {"loads without an injected failure": 9, "of these, loads that failed": 1}
    stores, loads = failed_by_themselves(counts, "")
    assert not is_headline(stores, counts)
    assert is_headline(loads, counts)


def test_loads_of_a_store_that_evicts_name_the_remedy() -> None:
    counts = {"loads without an injected failure": 9, "of these, loads that failed": 2}
    (gap,) = failed_by_themselves(counts, "1 of 2 pages were missing", may_evict=True)
    assert "2 of 9 loads failed" in gap.what
    assert "--option store_blocks='{blocks}'" in gap.what
    (gap,) = failed_by_themselves(counts, "1 of 2 pages were missing")
    assert "store_blocks" not in gap.what
