"""The pytest options of the suite; this module imports no package, because every run loads it."""

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
        "--kvview-expected-failures",
        metavar="FILE",
        help=("file of expected failures, with lines of 'check_name: reason'"),
    )
    group.addoption(
        "--kvview-select", action="append", default=[], metavar="NAME", help="a check or a law"
    )
    group.addoption("--kvview-seed", type=int, default=0, metavar="N", help="the first seed")
    group.addoption(
        "--kvview-steps",
        type=int,
        metavar="N",
        help=(
            "maximum number of calls in one sequence; for a connector, minimum number of steps "
            "in one run"
        ),
    )
    group.addoption("--kvview-seeds", type=int, metavar="N", help="number of runs")
    group.addoption("--kvview-engine", metavar="NAME", help="what runs a connector")
    group.addoption(
        "--kvview-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the connector, KEY=VALUE, with a value in JSON or as text",
    )
    group.addoption(
        "--kvview-hook-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="CPU seconds that one call of a hook may take",
    )
    group.addoption(
        "--kvview-keep-going",
        action="store_true",
        help=("run all seeds of a connector, even after a failure"),
    )
