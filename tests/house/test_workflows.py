"""The scripts and actions that the GitHub workflows call exist."""

from __future__ import annotations

import re

import pytest

from tests.house.source_tree import ROOT

FOLDER = ROOT / ".github" / "workflows"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yml")), ids=lambda path: path.name)
def test_the_scripts_that_are_called_are_there(path: object) -> None:
    text = (FOLDER / str(path)).read_text(encoding="utf-8")
    names = set(re.findall(r"\.ci/([a-z-]+)", text))
    names |= set(re.findall(r"[a-z-]+-lane", text))
    assert names
    assert all((ROOT / ".ci" / name).is_file() for name in names)
    assert "permissions: {contents: read}" in text  # no more than that, but where it is needed


def test_only_main_is_published() -> None:
    text = (FOLDER / "site.yml").read_text(encoding="utf-8")
    publish = text[text.index("\n  publish:") :]
    assert "github.ref == 'refs/heads/main'" in publish
    assert "needs: build" in publish
