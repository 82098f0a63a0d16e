"""The scripts of the GitHub Action, run as GitHub runs them, and the container file."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ACTION = ROOT / "action.yml"
CONTAINER = ROOT / "Containerfile"
TARGET = "kvview_reference.harness:ReferencePool"

pytestmark = pytest.mark.skipif(not ACTION.exists(), reason="no action.yml in this checkout")


def scripts() -> dict[str, str]:
    """The scripts of the steps, by name."""
    found = re.findall(
        r"^    - name: (.+)\n(?:      .*\n)*?      run: \|\n((?:(?:        .*)?\n)+)",
        ACTION.read_text(),
        re.MULTILINE,
    )
    return {name: textwrap.dedent(script) for name, script in found}


def run(tmp_path: Path, target: str, args: str) -> tuple[int, dict[str, str], Path]:
    """Run the check of the action; returns exit code, outputs and folder of the report."""
    outputs, report = tmp_path / "outputs", tmp_path / "a report"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "TARGET": target,
        "ARGS": args,
        "REPORT": str(report),
        "GITHUB_OUTPUT": str(outputs),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }
    script = tmp_path / "script.sh"
    script.write_text(scripts()["Check"])
    # The command of GitHub: https://docs.github.com/actions/reference/workflow-syntax-for-github-actions
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = outputs.read_text().splitlines()
    return done.returncode, dict(line.split("=", 1) for line in lines), report


def test_a_clean_check_writes_its_report(tmp_path: Path) -> None:
    code, outputs, report = run(tmp_path, TARGET, "--select test_pool_1_growth_of_holds")
    assert (code, outputs) == (0, {"exit-code": "0"})
    names = {path.name for path in report.iterdir()}
    assert names == {"report.json", "log.txt"}
    assert " passed" in (tmp_path / "summary.md").read_text()


def test_a_check_that_cannot_run_ends_the_job_with_its_error(tmp_path: Path) -> None:
    evil = "nothing:here; touch evil $(touch evil)"
    code, outputs, _ = run(tmp_path, evil, "--select 'a b'")
    assert (code, outputs) == (2, {"exit-code": "2"})
    assert "kvview: " in (tmp_path / "summary.md").read_text()
    assert not (ROOT / "evil").exists()
    assert not Path("evil").exists()


def test_no_input_is_written_into_a_script() -> None:
    assert set(scripts()) == {"Install kvview", "Check"}
    for script in scripts().values():
        assert "${{" not in script, "inputs must be environment variables"


def test_the_container_copies_the_sources_of_the_package() -> None:
    text = CONTAINER.read_text().replace("\\\n", " ")
    copied = [name for line in re.findall(r"^COPY (.+)$", text, re.M) for name in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    packages = ("kvview", "reference", "adapters", "examples", "pyproject.toml", "README.md")
    assert {*packages, "LICENSE", "constraints.txt"} <= set(copied)
    (install,) = re.findall(r"^RUN (.+)$", text, re.M)
    assert shlex.split(install)[-1].startswith(".[cli,reference,testing")
