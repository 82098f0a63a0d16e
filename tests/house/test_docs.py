"""Documents: every link inside the repository and every named object exists."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import kvview
from docs import make_results, make_support_matrix
from kvview import BlockNotHeldError, ConfigError
from kvview.laws import laws as laws_of_the_contract
from kvview.targets import load_target
from kvview.urls import DOCS_URL, PROJECT_URL, law_url
from tests.house.source_tree import FLOORS, ROOT, modules

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
)
_WITH_FIGURES = ("trust", "handoff", "sizing", "results", "partition")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")


def anchors(path: Path) -> set[str]:
    """The targets of links to a page: headings, anchors, and modules that the site describes."""
    text = path.read_text(encoding="utf-8")
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = re.findall(r'<a id="(.*?)">|^::: (\S+)$', text, re.MULTILINE)
    return {
        *(re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads),
        *(anchor or module for anchor, module in named),
    }


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    here = ROOT / document
    broken = []
    for target, anchor in _LINK.findall(here.read_text(encoding="utf-8")):
        path = (here.parent / target).resolve() if target else here
        if not path.exists() or (anchor and anchor[1:] not in anchors(path)):
            broken.append(target + anchor)
    assert not broken


def test_no_document_has_the_mark_of_a_conflict() -> None:
    texts = {document: (ROOT / document).read_text(encoding="utf-8") for document in DOCUMENTS}
    assert not [name for name, text in texts.items() if re.search("^[<>]{7} ", text, re.MULTILINE)]


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name.startswith("docs/api/")])
def test_a_page_of_the_api_links_to_its_sources(document: str) -> None:
    """A code host shows no docstrings in the page."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for module in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
        path = "/".join(module.split("."))
        roots = ("../..", "../../reference")
        links = [f"({root}/{path}{end})" for root in roots for end in (".py", "/__init__.py")]
        assert any(link in text for link in links), module


@pytest.mark.parametrize("maker", [make_results, make_support_matrix])
def test_a_page_that_is_made_from_the_sources_is_up_to_date(maker: Any) -> None:
    assert maker.PAGE.read_text(encoding="utf-8") == maker.page(), f"python {maker.__file__}"


def test_the_page_of_hooks_lists_every_hook() -> None:
    listed = re.findall(
        r"^\| `(\w+)` \|", (ROOT / "docs/hooks.md").read_text("utf-8"), re.MULTILINE
    )
    halves = (kvview.SchedulerConnector, kvview.WorkerConnector, kvview.Connector)
    hooks = [name for half in halves for name in vars(half) if callable(getattr(half, name))]
    assert listed == [name for name in hooks if not name.startswith("_")]


@pytest.mark.parametrize("law", [*laws_of_the_contract(), "POOL-*", "ENGINE", "coverage"])
def test_links_of_errors_and_reports_exist(law: str) -> None:
    page, _, anchor = law_url(law).removeprefix(DOCS_URL).partition("/#")
    path = ROOT / "docs" / f"{page.rstrip('/')}.md"
    assert anchor in anchors(path) or (not anchor and path.exists())


def test_the_site_is_where_links_lead() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").splitlines()
    assert f"site_url: {DOCS_URL}" in settings
    assert f"repo_url: {PROJECT_URL}" in settings


def test_an_error_of_a_law_links_to_the_law() -> None:
    error = pickle.loads(pickle.dumps(BlockNotHeldError("POOL-4: block 7 is not held")))
    assert str(error) == "POOL-4: block 7 is not held"
    assert error.__notes__ == [f"POOL-4 No foreign frees: {law_url('POOL-4')}"]
    assert not hasattr(ConfigError("no law"), "__notes__")
    assert law_url("*") == law_url("HOOK") == law_url("FAULT-2") == ""


def test_no_docstring_has_a_heading() -> None:
    """A line that starts with the number of an issue would become a heading on the site."""
    found = [
        f"{module.path}: {line.strip()}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for line in (ast.get_docstring(node) or "").splitlines()
        if line.lstrip().startswith("#")
    ]
    assert not found


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


def test_figures_on_two_pages_are_equal() -> None:
    readme, trust, handoff, sizing, results, partition = (
        " ".join((ROOT / path).read_text(encoding="utf-8").split())
        for path in ("README.md", *(f"docs/{name}.md" for name in _WITH_FIGURES))
    )

    def figures(pattern: str, text: str = trust) -> list[str]:
        found = re.search(pattern, text)
        assert found is not None, pattern
        return [*found.groups()]

    red, wrong, served = figures(r"(\d+) of (\d+) wrong connectors .*?: \d+ of the (\d+)")
    others, found = figures(r"checks wrote (\d+) wrong connectors: (\d+) were red")
    drawn, by_check, by_tests = figures(r"\| all \| (\d+) \| (\d+) \| (\d+)")
    listed, detected = figures(r"(\d+) faulty connectors were listed.*?; (\d+) are red", handoff)
    claims = [f"finds {red} of {wrong}", f"finds {served} of {wrong}"]
    claims += [f"Reviewers who had not seen the checks wrote {others}: {found} were red"]
    claims += [f"Of {drawn} random one-line", f"tests kill {int(by_check) + int(by_tests)}."]
    claims += [f"Of {listed} faulty connectors for", f"the check finds {detected}."]
    for blocks, hits in re.findall(r"([\d,]+) blocks hits? ([\d.]+) %", readme):
        figures(rf" {blocks} [\d,.]+ {hits}%", sizing)
    assert not [claim for claim in claims if claim not in readme]
    (layouts,) = figures(r"\[OffloadingConnector\][^\[]*✘ (\d+ of \d+)", results)
    assert f"transfers wrong bytes in {layouts} memory layouts" in results
    assert f"`OffloadingConnector` with {layouts.split()[0]} wrong combinations" in partition


def test_the_layout_in_the_architecture_is_that_of_the_tree() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    for folder in FLOORS.values():
        assert f"`{folder.relative_to(ROOT).as_posix()}/" in text
