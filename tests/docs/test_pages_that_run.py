"""Pages that are run, done as a reader does it: each file, each edit, each command.

A command must print the lines that are shown below it; ``...`` stands for any lines."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvview import BlockNotHeldError

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_EXIT_CODE = re.compile(r"[Ee]xit code (\d)")
_INSTALLS = ("python3 -m venv", "pip install")  # the README's commands are run by CI


def pieces(page: str) -> Iterator[tuple[str, str, str, str]]:
    """Kind, title and text of each code block, and the prose up to the next one."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = list(_BLOCK.finditer(text))
    ends = [block.start() for block in found[1:]] + [len(text)]
    for block, end in zip(found, ends, strict=True):
        yield block[1], block[2] or "", block[3], text[block.end() : end]


def edited(source: str, edit: str) -> str:
    """A file after an edit: methods replace those of their name, or are added to their class."""
    for changed in [node for node in ast.parse(edit).body if isinstance(node, ast.ClassDef)]:
        for method in [node for node in changed.body if isinstance(node, ast.FunctionDef)]:
            lines = source.splitlines()
            (there,) = (
                node
                for node in ast.parse(source).body
                if isinstance(node, ast.ClassDef) and node.name == changed.name
            )
            old = [node for node in there.body if getattr(node, "name", "") == method.name]
            first, last = (old[0].lineno - 1, old[0].end_lineno) if old else (there.end_lineno,) * 2
            new = edit.splitlines()[method.lineno - 1 : method.end_lineno]
            lines[first:last] = new if old else ["", *new]
            source = "\n".join(lines) + "\n"
    return source


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program, _, rest = command.partition(" ")
    arguments = (["-m", "kvview"] if program == "kvview" else []) + rest.split()
    paths = [folder, ROOT, ROOT / "reference", ROOT / "adapters"]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def missing(shown: str, printed: str) -> str:
    """The first line of a page that the command did not print, after those before it."""
    lines = iter(printed.splitlines())
    for line in shown.splitlines():
        begin = line.removesuffix("...").rstrip()
        if begin and not any(other.startswith(begin) for other in lines):
            return line
    return ""


@pytest.mark.parametrize(
    ("page", "wanted"),
    [
        pytest.param("first-connector.md", 3, marks=pytest.mark.slow),
        pytest.param("first-hooks.md", 6, marks=pytest.mark.slow),
        pytest.param("kit.md", 2, marks=pytest.mark.slow),
    ],
)
def test_the_commands_of_the_page_run(page: str, wanted: int, tmp_path: Path) -> None:
    done: subprocess.CompletedProcess[str] | None = None
    num_commands = 0
    for kind, title, text, prose in pieces(f"docs/{page}"):
        if kind == "python" and title:
            path = tmp_path / title
            path.write_text(edited(path.read_text(), text) if "    ...\n" in text else text)
        elif kind == "sh" and not text.startswith(_INSTALLS):
            (command,) = text.splitlines()
            done = run(command, tmp_path)
            num_commands += 1
        elif kind == "text":
            assert done is not None
            line = missing(text, done.stdout)
            assert not line, f"{page} shows {line!r}, which was not printed:\n{done.stdout}"
            code = _EXIT_CODE.search(prose)
            assert done.returncode == (int(code[1]) if code else 0), done.stderr
    assert num_commands == wanted


def _without_numbers(report: str) -> str:
    """A report in one line, without the numbers of its requests, which each new draw changes."""
    return " ".join(re.sub(r"'r\d+'", "'r'", report).split())


@pytest.mark.slow
def test_the_readme_shows_a_real_report(tmp_path: Path) -> None:
    """The report has the text of the README in its order, with other line breaks."""
    texts = {title or kind: text for kind, title, text, _ in [*pieces("README.md")][1::-1]}
    (tmp_path / "leaky.py").write_text(texts["leaky.py"])
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    done = run("kvview check leaky.py:LeakyConnector --timeline t.html", tmp_path)
    rest = _without_numbers(done.stdout)
    for part in re.split(r"\.\.\.\n", texts["text"]):
        text = _without_numbers(part)
        assert text in rest, f"{part}\nis not in\n{done.stdout}"
        rest = rest[rest.index(text) + len(text) :]
    assert done.returncode == 1
    assert "does not end" in (tmp_path / "t.html").read_text("utf-8")


def test_the_parts_alone_run() -> None:
    parts = (ROOT / "docs/kit.md").read_text("utf-8").partition("\n## The parts alone\n")[2]
    pool, manager = (text for kind, _, text in _BLOCK.findall(parts) if kind == "python")
    with pytest.raises(BlockNotHeldError, match="POOL-4"):
        exec(pool, {})
    exec(manager, {})


@pytest.mark.parametrize(
    ("shown", "is_there"),
    [("one\n", True), ("...\ntwo\nthree\n", True), ("o...\nthree\n", True), ("two\none\n", False)],
)
def test_a_line_that_is_not_printed_is_seen(shown: str, is_there: bool) -> None:
    assert (not missing(shown, "one\ntwo\nthree\n")) is is_there
