"""Mistakes that a store can still make: pages fail or are misses, and the check reports them.

``docs/architecture.md`` lists these mistakes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from kvview.cli.exit_codes import ExitCode
from kvview.testing.command import check

STORES = Path(__file__).with_name("wrong_stores.py")
FAILED_LOADS = "loads failed without an injected failure"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "report"),
    [
        ("HalfAPage", FAILED_LOADS),
        ("LosesWrites", FAILED_LOADS),
        ("KeepsTheView", FAILED_LOADS),
        ("FillsNothing", FAILED_LOADS),
        ("ForgetsToReturn", FAILED_LOADS),
        ("DeletesTooMuch", FAILED_LOADS),
        ("OneWayTransform", "XFER-"),
    ],
)
def test_the_check_reports_a_wrong_store(store: str, report: str) -> None:
    options = ["--seeds", "4", "--option", "store_blocks={blocks}"]
    result = CliRunner().invoke(check, [f"{STORES}:{store}", *options])
    assert report in result.output
    assert result.exit_code in (ExitCode.NOT_CHECKED, ExitCode.WRONG)
