"""The project's own tests: its connector under kvview's simulation."""

from __future__ import annotations

from kv_shelf import ShelfConnector

from kvview.testing.connector import check_connector


def test_the_shelf_keeps_the_contract() -> None:
    report = check_connector(ShelfConnector, seeds=20, options={"max_blocks": 40})
    assert report.is_clean, report.summary()
    assert report.coverage.get("loads", 0) > 0, "a connector that does nothing keeps it too"
