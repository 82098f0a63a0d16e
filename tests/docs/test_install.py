"""The install commands of the pages, and the installation as a new user does it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvview.urls import PROJECT_URL, REVISION, requirement

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
INSTALL = re.compile(r"(?<!: )pip\s+install\s+'(kvview\[([\w,]+)\][^']*)'")


def commands() -> list[tuple[str, str, str]]:
    """The page, the requirement and the extras of each command that installs kvview.

    Messages such as "this needs torch: pip install ..." are read where kvview is installed.
    """
    texts = [(page.name, page.read_text("utf-8")) for page in PAGES]
    return [(name, *found) for name, text in texts for found in INSTALL.findall(text)]


def test_pages_install_from_the_repository_until_there_is_a_release() -> None:
    assert len(commands()) >= 6
    for page, wanted, extras in commands():
        assert wanted == requirement(extras), page
    action = (ROOT / "docs/report.md").read_text("utf-8")
    assert f"uses: kvview/kvview@{REVISION}" in action


def test_a_release_is_installed_from_the_package_index() -> None:
    assert requirement("cli", "v1.0.0rc1") == "kvview[cli]==1.0.0rc1"
    assert requirement("cli", "main") == f"kvview[cli] @ git+{PROJECT_URL}@main"


@pytest.mark.slow
def test_the_install_command_of_the_first_page_runs(tmp_path: Path) -> None:
    """Run the page's command word for word; git takes the repository from this checkout."""
    if "git+" not in requirement("cli"):
        pytest.skip("a release is installed from an index, which RELEASING.md rehearses")
    repository, venv = tmp_path / "kvview.git", tmp_path / "venv"
    subprocess.run(["git", "clone", "-q", "--bare", ROOT, repository], check=True)
    subprocess.run(
        ["git", "-C", repository, "update-ref", f"refs/heads/{REVISION}", "HEAD"], check=True
    )
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    env = os.environ | {
        "PATH": f"{venv}/bin:{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{repository}.insteadOf",
        "GIT_CONFIG_VALUE_0": PROJECT_URL,
    }
    env.pop("PYTHONPATH", None)

    def run(command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (first,) = (wanted for page, wanted, _ in commands() if page == "first-connector.md")
    run(f"pip install '{first}'")
    run("kvview new mine.py")
    commit = run(f"git -C {repository} rev-parse HEAD").strip()
    assert f"{PROJECT_URL}@{commit}'" in run("cat .github/workflows/kvview-mine.yml")
    checked = run("kvview check mine.py:MineConnector --option store_blocks='{blocks}' --seeds 3")
    assert "3 seeds" in checked
