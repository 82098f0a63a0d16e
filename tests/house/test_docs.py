"""Documents: every link inside the repository leads somewhere, every named thing exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvview.targets import load_target
from tests.house.source_tree import FLOORS, ROOT

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")


def anchors(path: Path) -> set[str]:
    """Headings of a page, as they are linked to."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    here = ROOT / document
    broken = []
    for target, anchor in _LINK.findall(here.read_text(encoding="utf-8")):
        path = (here.parent / target).resolve() if target else here
        if not path.exists() or (anchor and anchor[1:] not in anchors(path)):
            broken.append(target + anchor)
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS)
def test_targets_named_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = set(re.findall(rf"\b((?:{'|'.join(FLOORS)})(?:\.\w+)*:[A-Z]\w+)", text))
    for target in targets:
        module, _, name = target.partition(":")
        engine = module.partition(".")[0].removeprefix("kvview_")
        if engine in ("lmcache", "sglang"):  # it imports its engine
            path = FLOORS[f"kvview_{engine}"].parent / f"{module.replace('.', '/')}.py"
            assert re.search(rf"^class {name}\b", path.read_text("utf-8"), re.MULTILINE)
        else:
            load_target(target)


def test_the_layout_of_the_readme_is_that_of_the_tree() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for folder in FLOORS.values():
        assert f"`{folder.relative_to(ROOT).as_posix()}/" in text
