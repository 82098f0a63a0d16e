"""A stranger's typed connectors, under strict type checkers, against the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house.source_tree import ROOT

WRONG = """

class WrongScheduler(SchedulerConnector):
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> str:
        return request.no_such_attribute
"""
"""Two errors that a checker sees only if it sees kvview's types."""
RIGHT_KEY, WRONG_KEY = "make_offload_key(request.block_hashes[0], 0)", "request.block_hashes[0]"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that sees kvview only as it is installed."""
    folder = tmp_path / "project"
    folder.mkdir()
    for source in ("examples/host_cache.py", "tests/house/typed_connector.py"):
        shutil.copy(ROOT / source, folder)
    return folder


@pytest.fixture
def check(
    installed: Path, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    cache = tmp_path_factory.getbasetemp() / "mypy_of_a_stranger"

    def run(checker: str, *options: str) -> str:
        if checker == "mypy":
            options = ("--strict", "--config-file=", f"--cache-dir={cache}", ".")
        done = subprocess.run(
            [sys.executable, "-m", checker, *options],
            cwd=project,
            env={**environment, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done.stdout + done.stderr

    return run


def test_mypy_strict_finds_nothing(check: Callable[..., str]) -> None:
    assert check("mypy").startswith("Success: no issues found in 2 source files")


def test_mypy_sees_the_types(check: Callable[..., str], project: Path) -> None:
    path = project / "typed_connector.py"
    source = path.read_text("utf-8").replace(RIGHT_KEY, WRONG_KEY) + WRONG
    path.write_text(source, "utf-8")
    output = check("mypy")
    assert 'incompatible type "BlockHash"; expected "OffloadKey"' in output
    assert "match_prefix" in output
    assert "no_such_attribute" in output


def test_pyright_strict_finds_nothing(check: Callable[..., str], project: Path) -> None:
    pytest.importorskip("pyright", reason="needs pyright")
    if "pyright 1." not in check("pyright", "--version"):
        pytest.skip("pyright cannot run here: it needs node, or a network to get it")
    settings = '{"include": ["typed_connector.py"], "typeCheckingMode": "strict"}'
    (project / "pyrightconfig.json").write_text(settings)
    assert "0 errors, 0 warnings" in check("pyright", "--pythonpath", sys.executable)
