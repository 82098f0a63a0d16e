"""The page of ``kvview check --html``, parsed."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvview.cli.commands import cli
from kvview.cli.exit_codes import ExitCode
from kvview.urls import DOCS_URL

pytest.importorskip("torch")

VOID = {"meta", "link", "br", "img", "input", "hr"}

POOLS = """
from kvview_reference.harness import ReferencePool
from kvview import BlockNotHeldError
from kvview_reference.pool import BlockPoolView


class Wrong(ReferencePool):
    capabilities = ReferencePool.capabilities - {"evict"}

    def make_view(self):
        class View(BlockPoolView):
            def free_blocks(self, block_ids, /):
                try:
                    super().free_blocks(block_ids)
                except BlockNotHeldError:
                    self._open_pool().free_blocks(block_ids)

        return View(self.pool, "<b>wrong</b>")
"""
CONNECTORS = """
from tests.mutants.connector import load_named
Leaks = load_named("NeverFreesAfterFailure")
"""
RAISES = """

class Raises(Leaks):
    def make_scheduler(self):
        made = super().make_scheduler()

        def plan_step(step):
            raise ValueError(evil)

        made.plan_step = plan_step
        return made
"""
INTERRUPTED = """
import itertools
from kvview_reference.connector import LazyOffloadConnector

made = itertools.count(1)


class Interrupted(LazyOffloadConnector):
    def make_scheduler(self):
        if next(made) == 4:
            raise KeyboardInterrupt
        return super().make_scheduler()
"""


class Page(HTMLParser):
    """The text of a page, and whether every element of it is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def require_self_contained(self) -> None:
        for tag, attributes in self.tags:
            assert tag not in ("script", "img", "iframe", "object", "use", "base"), tag
            assert "src" not in attributes
            href = attributes.get("href")
            assert href in (None, "data:,") or (tag == "a" and href.startswith(DOCS_URL))
            assert not any(name.startswith("on") for name in attributes)
        assert "url(" not in self.html
        assert "@import" not in self.html
        assert self.html.count("://") == self.html.count(DOCS_URL)


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["check", *map(str, args)])


def make_page(folder: Path, source: str, target: str, *args: str) -> Path:
    (folder / "target.py").write_text(source)
    page = folder / "report.html"
    result = run(f"{folder / 'target.py'}:{target}", *args, "--html", page)
    assert result.exit_code == 1, result.output
    return page


# --- what is on it ---


def test_page_of_a_pool(tmp_path: Path) -> None:
    select = [arg for law in ("POOL-4", "POOL-6", "GUARD-1") for arg in ("--select", law)]
    page = Page(make_page(tmp_path, POOLS, "Wrong", *select, "--seeds=20").read_text())
    page.require_self_contained()
    assert "red: POOL-4" in page.text
    assert "the harness does not declare leases" in page.text
    assert "must raise BlockNotHeldError" in page.text
    assert "h = factory()\nview = h.view\n" in page.text
    assert f'href="{DOCS_URL}laws/#pool-4"' in page.html


def test_page_when_nothing_fails_or_a_failure_is_expected(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    target = "kvview_reference.harness:pool"
    assert run(target, "--select", "POOL-1", "--seeds", "5", "--html", file).exit_code == 0
    assert "green: every law that was checked holds" in Page(file.read_text()).text
    expected = tmp_path / "expected"
    expected.write_text("check_pool_4: <known>\n")
    (tmp_path / "target.py").write_text(POOLS)
    select = ("--select", "check_pool_4", "--seeds", "10")
    wrong = f"{tmp_path / 'target.py'}:Wrong"
    result = run(wrong, *select, "--expected-failures", expected, "--html", file)
    assert result.exit_code == 0, result.output
    page = Page(file.read_text())
    assert "expected failure: check_pool_4: <known>" in page.text
    assert "<known>" not in page.html


@pytest.mark.slow
def test_page_of_a_connector(tmp_path: Path) -> None:
    page = Page(make_page(tmp_path, CONNECTORS, "Leaks", "--seeds", "6").read_text())
    page.require_self_contained()
    assert "red: CONN-4 Every touch is freed" in page.text
    assert "6 seeds from 0" in page.text
    script = (
        "failure = simulate(NeverFreesAfterFailure, scenario, engines=ReferenceEngines()).failure"
    )
    assert script in page.text
    assert "torch" in page.texts


def test_what_comes_from_outside_is_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"
    source = f"evil = {evil!r}\n{CONNECTORS}{RAISES}"
    name = "<script>alert(3)<b>&\"'.py"
    (tmp_path / name).write_text(source)
    file = tmp_path / "report.html"
    result = run(f"{tmp_path / name}:Raises", "--seeds", "2", "--html", file)
    assert result.exit_code == ExitCode.CONNECTOR_RAISED, result.output
    page = Page(file.read_text())
    page.require_self_contained()
    assert "raised ValueError " + evil in page.text
    assert f"{tmp_path / name}:Raises" in page.text


def test_interrupted_run_of_a_connector_is_not_clean(tmp_path: Path) -> None:
    (tmp_path / "target.py").write_text(INTERRUPTED)
    file, told = tmp_path / "report.html", tmp_path / "report.json"
    target = f"{tmp_path / 'target.py'}:Interrupted"
    result = run(target, "--seeds", "9", "--html", file, "--json", told)
    assert result.exit_code == ExitCode.INTERRUPTED, result.output
    report = json.loads(told.read_text())
    assert (report["is_clean"], report["is_interrupted"]) == (False, True)
    assert (report["runs"]["num_asked"], report["checks"]) == (9, [])
    num_seeds = report["runs"]["num_seeds"]
    assert num_seeds < 9
    page = Page(file.read_text())
    assert f"{num_seeds} of 9 seeds, 0 failed, interrupted" in page.text
