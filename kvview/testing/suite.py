"""Every check as a test: ``pytest --pyargs kvview.testing.suite --kvview-target T``."""

from __future__ import annotations

import pytest

from kvview.errors import ConfigError
from kvview.targets import load_target
from kvview.testing.parametrize import BoundCheck, make_params
from kvview.testing.runner import read_expected_failures


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of every check of the target."""
    option = metafunc.config.getoption
    target, path = option("--kvview-target"), option("--kvview-expected-failures")
    try:
        if target is None:
            raise ConfigError("the suite needs --kvview-target package.module:factory")
        expected = {} if path is None else read_expected_failures(path)
        params = make_params(load_target(target), expected, profile=option("--kvview-profile"))
    except ConfigError as error:
        raise pytest.UsageError(f"kvview: {error}") from None
    metafunc.parametrize("check", params)


def test_law(check: BoundCheck) -> None:
    """The target keeps the law."""
    check()
