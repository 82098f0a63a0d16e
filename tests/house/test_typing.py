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
"""Errors that a checker finds only with kvview's types."""
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
def check(installed: Path, project: Path, tmp_path: Path) -> Callable[..., str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    cache = tmp_path / "cache"

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


@pytest.mark.slow
def test_mypy_strict_finds_only_the_wrong_lines(check: Callable[..., str], project: Path) -> None:
    source = (project / "typed_connector.py").read_text("utf-8").replace(RIGHT_KEY, WRONG_KEY)
    (project / "wrong_connector.py").write_text(source + WRONG, "utf-8")
    output = check("mypy")
    places = {line.partition(":")[0] for line in output.splitlines() if ": error:" in line}
    assert places == {"wrong_connector.py"}, output
    assert "in 1 file (checked 3 source files)" in output
    assert 'incompatible type "BlockHash"; expected "OffloadKey"' in output
    assert "match_prefix" in output
    assert "no_such_attribute" in output


@pytest.mark.slow
def test_pyright_strict_finds_nothing(check: Callable[..., str], project: Path) -> None:
    pytest.importorskip("pyright", reason="needs pyright")
    if "pyright 1." not in check("pyright", "--version"):
        pytest.skip("pyright cannot run here: it needs node, or a network to get it")
    settings = '{"include": ["typed_connector.py"], "typeCheckingMode": "strict"}'
    (project / "pyrightconfig.json").write_text(settings)
    assert "0 errors, 0 warnings" in check("pyright", "--pythonpath", sys.executable)
