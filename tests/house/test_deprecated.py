"""Names of 0.x that are kept: they work, they warn, and they say what to write instead."""

from __future__ import annotations

import ast
import re

import pytest
from pydantic import BaseModel

from kvview import CacheGeometry, ConnectorConfig
from kvview.targets import load_connector, load_target
from kvview.version import __version__
from kvview_reference.connector import MultiConnector
from tests.house.source_tree import modules


class Options(BaseModel):
    size: int = 1


def test_options_are_parsed_under_the_old_name() -> None:
    parse_options = load_target("kvview.config:parse_options")
    with pytest.deprecated_call(match=r"kvview\.options\.parse_options"):
        assert parse_options(Options, {"size": 2}) == Options(size=2)


def test_a_connector_is_found_under_the_old_name() -> None:
    load = load_target("kvview.config:load_connector")
    with pytest.deprecated_call(match=r"kvview\.targets\.load_connector"):
        assert load("kvview_reference.connector:MultiConnector") is MultiConnector


def test_settings_of_0_x_still_name_the_multi_connector() -> None:
    found = load_connector("kvview_reference.multi_connector:MultiConnector")
    config = ConnectorConfig(
        CacheGeometry.single(16),
        {"connectors": [{"connector": "kvview_reference.connector:OffloadConnector"}]},
    )
    with pytest.deprecated_call(match=r"kvview_reference\.connector:MultiConnector"):
        connector = found(config)
    assert list(connector.make_scheduler().take_events()) == []


def deprecations() -> list[tuple[str, str, str]]:
    return [
        (module.path, node.name, str(decorator.args[0].value))
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        and ast.unparse(decorator.func) == "deprecated"
        and isinstance(decorator.args[0], ast.Constant)
    ]


@pytest.mark.parametrize(("path", "name", "message"), deprecations())
def test_a_deprecation_says_what_to_write_and_how_long(path: str, name: str, message: str) -> None:
    said = re.fullmatch(r"(\S+)[.:](\w+) since (\d+)\.\d+; this name goes in (\d+)\.0", message)
    assert said, f"{path}: {name}: {message!r}"
    package, replacement, _, gone_in = said.groups()
    load_target(f"{package}:{replacement}")
    assert int(__version__.split(".")[0]) < int(gone_in), f"{path}: {name} was to go in {gone_in}.0"
