"""The options of the suite; pytest loads this in every run, so it imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of ``pytest --pyargs kvview.testing.suite``."""
    group = parser.getgroup("kvview", "conformance of KV-cache implementations")
    group.addoption(
        "--kvview-target", metavar="TARGET", help="package.module:factory or file.py:factory"
    )
    group.addoption(
        "--kvview-expected-failures", metavar="FILE", help="lines of 'check_name: reason'"
    )
    group.addoption("--kvview-profile", default="ci", metavar="NAME", help="ci (default) or soak")
