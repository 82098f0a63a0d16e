"""Which versions of the contract this kvview keeps (``docs/compatibility.md``)."""

from __future__ import annotations

from typing import Any

import pytest

from kvview import CONTRACT_VERSION, UnsupportedContractError
from kvview.version import require_contract
from tests.house.source_tree import ROOT

MAJOR, MINOR = map(int, CONTRACT_VERSION.split("."))


@pytest.mark.parametrize("minor", range(MINOR + 1))
def test_an_earlier_minor_of_the_same_major_is_kept(minor: int) -> None:
    require_contract(f"{MAJOR}.{minor}", "mine")


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        (f"{MAJOR}.{MINOR + 1}", "upgrade kvview"),
        (f"{MAJOR + 1}.0", "upgrade kvview"),
        (f"{MAJOR - 1}.9", "CHANGELOG"),
    ],
)
def test_another_version_is_refused_with_a_remedy(version: str, advice: str) -> None:
    with pytest.raises(UnsupportedContractError, match=f"mine was written .*{advice}"):
        require_contract(version, "mine")


@pytest.mark.parametrize("version", ["", "1", "1.0.0", "one.two", None, 1.0])
def test_a_text_that_is_not_a_version_is_refused(version: Any) -> None:
    with pytest.raises(UnsupportedContractError, match="is not a version such as"):
        require_contract(version, "mine")


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"contract {CONTRACT_VERSION}" in text.partition("\n## ")[2].partition("\n## ")[0]
