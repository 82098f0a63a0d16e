"""The checks as tests: ``pytest --pyargs kvview.testing.suite --kvview-target T``.

In a JUnit file the class of a test consists of the target and the law:
``kvview.my_module:MyConnector.CONN-4``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvview.errors import ConfigError
from kvview.options import read_options
from kvview.targets import load_target
from kvview.testing.effort import Effort
from kvview.testing.parametrize import BoundCheck, make_params
from kvview.testing.runner import read_expected_failures


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of every check of the target."""
    option: Callable[[str], Any] = metafunc.config.getoption
    target, path = option("--kvview-target"), option("--kvview-expected-failures")
    try:
        if target is None:
            raise ConfigError("the suite needs --kvview-target package.module:factory")
        expected = {} if path is None else read_expected_failures(path)
        effort = Effort(
            option("--kvview-seed"),
            option("--kvview-steps"),
            option("--kvview-seeds"),
            option("--kvview-engine"),
            read_options(option("--kvview-option"), "--kvview-option"),
            option("--kvview-hook-seconds"),
            keep_going=option("--kvview-keep-going"),
        )
        select = option("--kvview-select")
        params = make_params(load_target(target), expected, effort, select=select)
    except ConfigError as error:
        raise pytest.UsageError(f"kvview: {error}") from None
    metafunc.parametrize("check", params)


def test_law(
    check: BoundCheck, record_xml_attribute: Callable[[str, object], None], pytestconfig: Any
) -> None:
    """Test that the target satisfies the law."""
    target = pytestconfig.getoption("--kvview-target")
    record_xml_attribute("classname", f"kvview.{target}.{check.check.law}")
    record_xml_attribute("name", check.check.name)
    check()
