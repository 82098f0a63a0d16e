"""A hook that raises or returns a wrong value ends a command in one line that names the hook."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvview.cli.commands import cli
from kvview.cli.exit_codes import ExitCode
from kvview_reference.engine import Engine
from tests.cases import read_cases

pytest.importorskip("torch")

HERE = Path(__file__).parent
REPLAY = ("replay", "--requests", "20", "--gpu-blocks", "200", "--connector")
CHECK = ("check", "--seeds", "2")

# A StoreConnector with one method replaced.
SOURCE = """
import kvview
from tests.connector.halves import HostWorker, StoreScheduler, WithHalves

class Odd(Exception):
    def __str__(self):
        raise ValueError

class Scheduler(StoreScheduler):
    {scheduler}

class Worker(HostWorker):
    {worker}

class Mine(WithHalves):
    {connector}
    scheduler, worker = Scheduler, Worker
"""


def write(folder: Path, part: str, body: str) -> str:
    """A connector with a method of its ``scheduler`` half, ``worker`` half or ``connector``."""
    path = folder / "mine.py"
    parts = dict.fromkeys(("scheduler", "worker", "connector"), "pass") | {part: body}
    path.write_text(SOURCE.format(**parts))
    return f"{path}:Mine"


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def require_one_line(result: Result, code: int, *parts: str) -> None:
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("kvview: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.output
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize(("section", "body", "shown"), read_cases(HERE / "hooks.txt"))
def test_a_wrong_hook(tmp_path: Path, section: str, body: str, shown: str) -> None:
    commands, part, code = section.split()
    target = write(tmp_path, part, body.replace("\\n", "\n"))
    for command in commands.split(","):
        result = run(*(REPLAY if command == "replay" else CHECK), target)
        assert result.exit_code == int(code), result.output
        assert all(text in result.output for text in shown.split(" & ")), result.output
        assert "<string>" not in result.output
        if command == "replay" or result.exit_code == ExitCode.COULD_NOT_RUN:
            require_one_line(result, int(code))
            assert len(result.stderr) < 2500


def test_verbose_shows_the_traceback(tmp_path: Path) -> None:
    target = write(tmp_path, "scheduler", "def plan_step(self, step): return 1 / 0")
    result = run("--verbose", *REPLAY, target)
    assert result.exit_code == ExitCode.CONNECTOR_RAISED
    assert "Traceback" in result.stderr
    assert "return 1 / 0" in result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"kvview: connector {target}: ")


# --- errors that are not the connector's ---


def test_an_error_of_the_engine_is_a_bug_of_kvview(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, *args: object) -> None:
        raise AssertionError("injected into the engine")

    monkeypatch.setattr(Engine, "_schedule_running", broken)
    result = run(*REPLAY[:-1])
    assert result.exit_code == ExitCode.BUG
    assert "injected into the engine" in result.stderr
    assert "Traceback" in result.stderr
    assert "raised" not in result.stderr.splitlines()[-1]


def test_ctrl_c_in_a_hook(tmp_path: Path) -> None:
    body = "def plan_step(self, step): import signal; signal.raise_signal(signal.SIGINT)"
    result = run(*REPLAY, write(tmp_path, "scheduler", body))
    assert result.exit_code == ExitCode.INTERRUPTED
    assert result.stderr.strip() == "kvview: interrupted"
