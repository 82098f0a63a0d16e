"""A stranger's typed connector, against the wheel: ``sample/`` is a project of its own.

It is copied out of the repository and sees kvview only as it is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parent / "sample"

WRONG = """

class WrongScheduler(SchedulerConnector):
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> str:
        return request.no_such_attribute
"""
"""Two errors that a checker sees only if it sees kvview's types."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "sample"))


@pytest.fixture
def run(installed: Path, project: Path, tmp_path: Path) -> Run:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}

    def call(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=project,
            env={**environment, "PYTHONPATH": f"{installed}{os.pathsep}{project}"},
            capture_output=True,
            text=True,
            timeout=600,
        )

    return call


@pytest.fixture
def mypy(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    cache = tmp_path_factory.getbasetemp() / "mypy_of_the_sample"

    def check() -> str:
        done = run(sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), ".")
        assert not done.stderr, done.stderr
        return done.stdout

    return check


@pytest.fixture
def pyright(run: Run) -> Callable[[], str]:
    tool = Path(sys.executable).with_name("pyright")
    found = str(tool) if tool.exists() else shutil.which("pyright")
    if found is None:
        pytest.skip("pyright is not installed")
    if run(found, "--version").returncode:
        pytest.skip("pyright cannot run here: it needs node, or a network to get it")

    def check() -> str:
        return run(found, "--pythonpath", sys.executable).stdout

    return check


def test_mypy_strict_finds_nothing(mypy: Callable[[], str]) -> None:
    assert mypy().startswith("Success: no issues found")


def test_pyright_strict_finds_nothing(pyright: Callable[[], str]) -> None:
    assert "0 errors, 0 warnings" in pyright()


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_checker_sees_the_types(
    checker: str, project: Path, request: pytest.FixtureRequest
) -> None:
    path = project / "kv_shelf/connector.py"
    path.write_text(path.read_text(encoding="utf-8") + WRONG, encoding="utf-8")
    text = request.getfixturevalue(checker)()
    assert "match_prefix" in text
    assert "no_such_attribute" in text


@pytest.mark.slow
def test_its_own_tests_pass(run: Run) -> None:
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "checks")
    assert done.returncode == 0, done.stdout + done.stderr
