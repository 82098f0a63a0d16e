"""``kvview new``: what it writes passes as it stands, and it overwrites nothing."""

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


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    paths = [folder, ROOT, ROOT / "reference"]
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("kind", "option"), [([], ["--option", "store_blocks={blocks}"]), (["--hooks"], [])]
)
def test_the_written_connector_passes_unchanged(
    kind: list[str], option: list[str], tmp_path: Path
) -> None:
    made = run(tmp_path, "-m", "kvview", "new", "warm_store.py", *kind)
    assert (made.returncode, made.stderr) == (0, "")
    *_, replay, check, test = made.stdout.splitlines()
    assert test.split() == ["python", "-m", "pytest", "test_warm_store.py"]
    target = "warm_store.py:WarmStoreConnector"
    assert check.split() == ["kvview", "check", target, *option]  # as the test file does
    program, *rest = replay.split()
    done = run(tmp_path, "-m", program, *rest, "--json", "replay.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "replay.json").read_text())["cpu_hit_rate"] > 0.05
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_warm_store.py")
    assert done.returncode == 0, done.stdout
    typed = run(tmp_path, "-m", "mypy", "--strict", "warm_store.py", "test_warm_store.py")
    assert typed.returncode == 0, typed.stdout
    workflow = (tmp_path / ".github" / "workflows" / "kvview-warm_store.yml").read_text()
    assert "kvview check warm_store.py:WarmStoreConnector" in workflow
    assert not re.search("Host(Cache|Memory)", (tmp_path / "warm_store.py").read_text())


def test_one_of_vllm_s_own_kind_is_written_too(tmp_path: Path) -> None:
    # That it passes, tests/vllm/test_raw.py says, where vLLM is.
    result = CliRunner().invoke(new, [str(tmp_path / "warm_store.py"), "--raw"])
    assert result.exit_code == 0, result.output
    told = result.output.splitlines()[2:]  # after what is written, and what it needs
    assert [line.split()[:2] for line in told] == [["kvview", "check"], ["python", "-m"]]
    text = (tmp_path / "warm_store.py").read_text()
    compile(text, "warm_store.py", "exec")
    assert '"kv_connector_module_path": "warm_store"' in text
    assert "class WarmStoreConnector(KVConnectorBase_V1):\n" in text
    assert not re.search("host_?cache|import kvview|from kvview", text, re.IGNORECASE)
    test = (tmp_path / "test_warm_store.py").read_text()
    assert 'engine="vllm"' in test
    workflow = (tmp_path / ".github" / "workflows" / "kvview-warm_store.yml").read_text()
    assert "warm_store.py:WarmStoreConnector --engine vllm" in workflow
    assert "replay" not in workflow


def test_two_connectors_in_one_folder(tmp_path: Path) -> None:
    for name in ("one.py", "two.py"):
        assert CliRunner().invoke(new, [str(tmp_path / name)]).exit_code == 0
    assert len(list(tmp_path.glob(".github/workflows/*.yml"))) == 2


@pytest.mark.parametrize("there", ["mine.py", "test_mine.py", ".github/workflows/kvview-mine.yml"])
def test_nothing_is_overwritten(tmp_path: Path, there: str) -> None:
    kept = tmp_path / there
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("kept")
    result = CliRunner().invoke(new, [str(tmp_path / "mine.py")])
    assert isinstance(result.exception, ConfigError)
    assert "already there; nothing was written" in str(result.exception)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept]
    assert kept.read_text() == "kept"


@pytest.mark.parametrize("there", ["mine.py", "test_mine.py", ".github", ".github/workflows"])
def test_nothing_is_written_through_a_link_to_nowhere(tmp_path: Path, there: str) -> None:
    link = tmp_path / "project" / there
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(new, [str(tmp_path / "project" / "mine.py")])
    assert isinstance(result.exception, ConfigError)
    assert "nothing was written" in str(result.exception)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my-connector.py"], "not a Python module's name"),
        (["class.py"], "not a Python module's name"),
        (["connector.txt"], "not a Python module's name"),
        (["mine.py", "--name", "a b"], "no class can have it"),
        (["mine.py", "--name", ""], "no class can have it"),
        (["connector.py"], "no class can have it"),  # Connector, of all names
        (["worker.py", "--hooks"], "no class can have it"),
        (["store.py"], "no class can have it"),
        (["mine.py", "--hooks", "--raw"], "are two kinds of connector"),
        (["kvview.py"], "'kvview' is the name of the module at "),
        (["torch.py"], "'torch' is the name of the module at "),
        (["json.py"], "'json' is the name of a module of Python's"),
        (["sys.py"], "'sys' is the name of a module of Python's"),
        (["sub/queue.py"], "'queue' is the name of a module of Python's"),
        (["conftest.py"], "'conftest' is the name of a file that pytest looks for"),
        (["__init__.py"], "'__init__' is the name of a file that Python looks for"),
    ],
)
def test_what_is_no_name_is_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(new, arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert not any(tmp_path.iterdir())
