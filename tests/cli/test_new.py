"""``kvview new``: its files pass unchanged, and no file is overwritten."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvview.cli.new import new
from kvview.errors import ConfigError

ROOT = Path(__file__).parents[2]


def run(folder: Path, *command: str) -> str:
    paths = [folder, ROOT, ROOT / "reference"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refusal(folder: Path, *arguments: str) -> str:
    """The error of a call that writes nothing."""
    before = sorted(folder.rglob("*"))
    result = CliRunner().invoke(new, arguments)
    assert isinstance(result.exception, ConfigError)
    assert sorted(folder.rglob("*")) == before
    return str(result.exception)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "option"), [([], ["--option", "store_blocks={blocks}"]), (["--hooks"], [])]
)
def test_the_files_pass_unchanged(kind: list[str], option: list[str], tmp_path: Path) -> None:
    *_, replay, check, test = run(tmp_path, "kvview", "new", "warm_store.py", *kind).splitlines()
    assert test.split() == ["python", "-m", "pytest", "test_warm_store.py"]
    target = "warm_store.py:WarmStoreConnector"
    assert check.split() == ["kvview", "check", target, *option]  # as the test file does
    run(tmp_path, *replay.split(), "--json", "replay.json")
    assert json.loads((tmp_path / "replay.json").read_text())["cpu_hit_rate"] > 0.05
    run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "test_warm_store.py")
    run(tmp_path, "mypy", "--strict", "warm_store.py", "test_warm_store.py")


@pytest.mark.parametrize("options", [[], ["--hooks"], ["--raw"]])
def test_the_files_have_the_given_name(tmp_path: Path, options: list[str]) -> None:
    # tests/vllm/test_raw.py runs the raw connector.
    result = CliRunner().invoke(new, [str(tmp_path / "warm_store.py"), *options])
    assert result.exit_code == 0, result.output
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    workflow = tmp_path / ".github" / "workflows" / "kvview-warm_store.yml"
    connector, test = tmp_path / "warm_store.py", tmp_path / "test_warm_store.py"
    assert sorted(files) == sorted([connector, test, workflow])
    for path in files:
        assert not re.search("host_?(cache|memory)", path.read_text(), re.IGNORECASE)
    compile(connector.read_text(), "warm_store.py", "exec")
    is_raw = options == ["--raw"]
    engine = " --engine vllm" if is_raw else ""
    assert f"kvview check warm_store.py:WarmStoreConnector{engine}" in workflow.read_text()
    assert ("kvview replay" in workflow.read_text()) == (not is_raw)
    assert ('engine="vllm"' in test.read_text()) == is_raw
    if is_raw:
        assert '"kv_connector_module_path": "warm_store"' in connector.read_text()
        assert "import kvview" not in connector.read_text()
    assert CliRunner().invoke(new, [str(tmp_path / "other.py"), *options]).exit_code == 0


def test_a_connector_that_exists_gets_a_test_and_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    test = tmp_path / "tests" / "test_kv.py"
    target = "my_package.connector:MyConnector"
    result = CliRunner().invoke(new, [str(test), "--for", target])
    assert result.exit_code == 0, result.output
    command = f"kvview check {target} --engine vllm --option host_blocks={{blocks}}"
    assert f"{command}\n" in result.output
    workflow = tmp_path / ".github" / "workflows" / "kvview.yml"
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {test, workflow}
    compile(test.read_text(), test.name, "exec")
    assert "from my_package.connector import MyConnector\n" in test.read_text()
    assert 'MyConnector, seeds=50, engine="vllm")' in test.read_text()
    assert re.search(r"pip install vllm\S* -e \.\n", workflow.read_text())
    assert f"{command} --json" in workflow.read_text()
    assert "these files already exist" in refusal(tmp_path, str(test), "--for", target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--for", "mine.py:Mine"], "expected package.module:Class"),
        (["--for", "package:Mine", "--raw"], "--for writes no connector"),
    ],
)
def test_a_wrong_connector_that_exists_is_refused(
    tmp_path: Path, options: list[str], message: str
) -> None:
    assert message in refusal(tmp_path, str(tmp_path / "test_kv.py"), *options)


@pytest.mark.parametrize(
    "existing", ["mine.py", "test_mine.py", ".github/workflows/kvview-mine.yml"]
)
def test_no_file_is_overwritten(tmp_path: Path, existing: str) -> None:
    kept = tmp_path / existing
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("kept")
    assert "these files already exist: " in refusal(tmp_path, str(tmp_path / "mine.py"))
    assert kept.read_text() == "kept"


@pytest.mark.parametrize("existing", ["mine.py", "test_mine.py", ".github", ".github/workflows"])
def test_no_file_is_written_through_a_dangling_link(tmp_path: Path, existing: str) -> None:
    link = tmp_path / "project" / existing
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    assert "nothing was written" in refusal(tmp_path, str(tmp_path / "project" / "mine.py"))
