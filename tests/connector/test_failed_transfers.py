"""Loads and stores that fail although the check injected no failure."""

from __future__ import annotations

from typing import ClassVar

from kvview.testing.connector import check_connector
from kvview.testing.connector.exercised.coverage import loads_that_failed
from kvview_reference.store_connector import StoreConnector, Transform


class Grows(Transform):
    """Encodes each page into more bytes than it permits itself."""

    def max_bytes(self, page_bytes: int) -> int:
        return page_bytes

    def encode(self, key: bytes, page: memoryview) -> bytes:
        return b"\0" + bytes(page)

    def decode(self, key: bytes, data: memoryview, page: memoryview) -> None:
        page[:] = data[1:]


class StoresNothing(StoreConnector):
    """Its host memory refuses every page, because no encoded page fits."""

    transform = Grows
    defaults: ClassVar = {"cpu_bytes": 1 << 20}


def test_stores_that_fail_by_themselves_are_counted_in_a_note() -> None:
    report = check_connector(StoresNothing, seeds=3, first_seed=7, max_shrink_runs=0)
    assert not report.failures
    (note,) = [note for note in report.notes if "stores failed" in note]
    assert "stores failed without an injected failure" in note


def test_loads_of_a_store_that_evicts_name_the_remedy() -> None:
    counts = {"loads without an injected failure": 9, "of these, loads that failed": 2}
    (gap,) = loads_that_failed(counts, "1 of 2 pages were missing", may_evict=True)
    assert "2 of 9 loads failed" in gap.what
    assert "--option store_blocks='{blocks}'" in gap.what
    (gap,) = loads_that_failed(counts, "1 of 2 pages were missing")
    assert "store_blocks" not in gap.what
