"""A hook that raises or returns a wrong value ends a command in one line that names the hook."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvview.cli.commands import cli
from kvview.cli.exit_codes import ExitCode
from kvview_reference.connector import OffloadConnector
from kvview_reference.engine import Engine

pytest.importorskip("torch")

REPLAY = ("replay", "--requests", "20", "--gpu-blocks", "200", "--connector")
CHECK = ("check", "--seeds", "2")

# A LazyOffloadConnector with one method replaced.
SOURCE = """
import kvview
from kvview_reference.connector import LazyOffloadConnector, OffloadWorker
from kvview_reference.connector.lazy_offload import LazyOffloadScheduler

class Odd(Exception):
    def __str__(self):
        raise ValueError

class Scheduler(LazyOffloadScheduler):
    {scheduler}

class Worker(OffloadWorker):
    {worker}

class Mine(LazyOffloadConnector):
    {connector}
    if "make_scheduler" not in vars():
        def make_scheduler(self):
            return Scheduler(self.config, self.options)
    if "make_worker" not in vars():
        def make_worker(self):
            return Worker(self.options)
"""
BIND = "def bind_gpu_block_pool_view(self, view): self.view = view\n    "


def write(folder: Path, part: str, body: str) -> str:
    """A connector with a method of its ``scheduler`` half, ``worker`` half or ``connector``."""
    path = folder / "mine.py"
    parts = dict.fromkeys(("scheduler", "worker", "connector"), "pass") | {part: body}
    path.write_text(SOURCE.format(**parts))
    return f"{path}:Mine"


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def require_one_line(result: Result, code: ExitCode, *parts: str) -> None:
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("kvview: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.output
    for part in parts:
        assert part in result.stderr


HOOKS = {
    "scheduler": [
        *("bind_gpu_block_pool_view", "on_engine_ready", "match_prefix", "on_blocks_allocated"),
        *("plan_step", "on_transfers_finished", "on_request_finished", "has_pending_work"),
        "shutdown",
    ],
    "worker": ["register_kv_caches", "start_plan", "get_finished", "shutdown"],
    "connector": ["make_scheduler", "__init__"],
}


@pytest.mark.parametrize(
    ("part", "hook"), [(p, hook) for p, hooks in HOOKS.items() for hook in hooks]
)
def test_a_hook_that_raises_is_named_with_its_line(tmp_path: Path, part: str, hook: str) -> None:
    target = write(tmp_path, part, f"def {hook}(self, *args):\n        raise KeyError('a\\nb')")
    result = run(*REPLAY, target)
    require_one_line(result, ExitCode.CONNECTOR_RAISED, f"{hook} raised ", f"connector {target}: ")
    line = re.search(r"mine\.py:(\d+): ", result.stderr)
    assert line is not None
    assert "raise KeyError" in (tmp_path / "mine.py").read_text().splitlines()[int(line[1]) - 1]


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise Odd", "Odd: <Odd whose text raises ValueError>"),
        ("raise ValueError('\\x1b[31m' + 'x' * 9999)", r"ValueError: \x1b[31mxxx"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise kvview.ConfigError('no')", "ConfigError: no"),
        ("self.view.free_blocks([1])", "POOL-4"),
        ("import json; json.loads('{')", "JSONDecodeError"),
        ("import no_such_library", "No module named 'no_such_library'"),
        ("raise ExceptionGroup('many', [ValueError('a'), KeyError('b')])", "ExceptionGroup: many"),
    ],
)
def test_every_exception(tmp_path: Path, raised: str, shown: str) -> None:
    target = write(tmp_path, "scheduler", f"{BIND}def plan_step(self, step): {raised}")
    result = run(*REPLAY, target)
    require_one_line(result, ExitCode.CONNECTOR_RAISED, shown, "plan_step raised", "mine.py:12: ")
    assert len(result.stderr) < 2500


@pytest.mark.parametrize(
    ("part", "body", "shown"),
    [
        ("scheduler", "def match_prefix(self, r, n): return 'x'", "match_prefix returned 'x'"),
        ("scheduler", "def match_prefix(self, r, n): return 1.0", "match_prefix returned 1.0"),
        ("scheduler", "def plan_step(self, step): return None", "plan_step returned None"),
        ("scheduler", "def plan_step(self, step): return kvview.StepPlan([3])", "TransferJob"),
        (
            "scheduler",
            "def plan_step(self, step): return kvview.StepPlan(stores=iter(()))",
            "TransferJob",
        ),
        (
            "scheduler",
            "def plan_step(self, step): return kvview.StepPlan([kvview.TransferJob([], 1, 2)])",
            "job_id",
        ),
        (
            "scheduler",
            "def on_request_finished(self, *args):\n"
            "        return type('Later', (), {'__await__': lambda self: iter(())})()",
            "await",
        ),
        (
            "scheduler",
            "def __init__(self, *args):\n"
            "        super().__init__(*args)\n"
            "        self.match_prefix = lambda request: 0",
            "match_prefix raised TypeError",
        ),
        ("worker", "def get_finished(self): return None", "get_finished returned None"),
        ("worker", "def get_finished(self): return [7]", "TransferResult"),
        ("connector", "def __new__(cls, config): return 7", "__init__ returned 7"),
        ("connector", "def make_scheduler(self): return None", "make_scheduler returned None"),
        ("connector", "def make_worker(self): return None", "make_worker returned None"),
    ],
)
def test_wrong_return_values(tmp_path: Path, part: str, body: str, shown: str) -> None:
    target = write(tmp_path, part, body)
    require_one_line(run(*REPLAY, target), ExitCode.CONNECTOR_RAISED, shown, "mine.py:")


@pytest.mark.parametrize(
    ("part", "body", "code", "shown"),
    [
        ("scheduler", "def plan_step(self, step): raise Odd", 3, "plan_step raised"),
        ("scheduler", "def plan_step(self, step): raise SystemExit(0)", 3, "plan_step raised"),
        (
            "worker",
            "def start_plan(self, plan): raise RuntimeError('boom')",
            3,
            "RuntimeError boom",
        ),
        ("worker", "def get_finished(self): raise RuntimeError('boom')", 3, "RuntimeError boom"),
        ("connector", "def __init__(self, config): raise LookupError('no')", 3, "LookupError: no"),
        ("connector", "def make_worker(self): return None", 3, "make_worker returned None"),
        ("scheduler", f"{BIND}def plan_step(self, step): self.view.free_blocks([1])", 1, "POOL-4"),
        (
            "scheduler",
            "def plan_step(self, step): kvview.StepPlan().loads = []",
            3,
            "mine.py:11",
        ),
    ],
)
def test_a_wrong_hook_under_check(
    tmp_path: Path, part: str, body: str, code: int, shown: str
) -> None:
    result = run(*CHECK, write(tmp_path, part, body))
    assert result.exit_code == code, result.output
    assert shown in result.output
    assert "<string>" not in result.output


def test_verbose_shows_the_traceback(tmp_path: Path) -> None:
    target = write(tmp_path, "scheduler", "def plan_step(self, step): return 1 / 0")
    result = run("--verbose", *REPLAY, target)
    assert result.exit_code == ExitCode.CONNECTOR_RAISED
    assert "Traceback" in result.stderr
    assert "return 1 / 0" in result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"kvview: connector {target}: ")


def test_a_child_of_several_is_named(tmp_path: Path) -> None:
    child = write(tmp_path, "scheduler", "def plan_step(self, step): return {}['key']")
    option = f'connectors=[{{"connector": "{child}"}}]'
    result = run(*REPLAY, "kvview_reference.connector:MultiConnector", "--option", option)
    require_one_line(result, ExitCode.CONNECTOR_RAISED, "mine.py:11: plan_step raised KeyError")


# --- errors that are not the connector's ---


@pytest.mark.parametrize(
    ("body", "library"),
    [
        ("import no_such_library", "no_such_library"),
        ("raise RuntimeError('NIXL is not available')", "NIXL"),
        (
            "try:\n            import no_such_library\n        except ImportError as error:\n"
            "            raise RuntimeError('install it') from error",
            "no_such_library",
        ),
    ],
)
@pytest.mark.parametrize(
    ("part", "hook"),
    [("connector", "__init__"), ("connector", "make_worker"), ("worker", "register_kv_caches")],
)
def test_a_missing_library(tmp_path: Path, part: str, hook: str, body: str, library: str) -> None:
    target = write(tmp_path, part, f"def {hook}(self, *args):\n        {body}")
    for command in (REPLAY, CHECK):
        result = run(*command, target)
        require_one_line(result, ExitCode.COULD_NOT_RUN, f"needs {library},", "mine.py:")


@pytest.mark.parametrize(
    ("part", "hook"), [("connector", "__init__"), ("worker", "register_kv_caches")]
)
def test_a_refused_option(tmp_path: Path, part: str, hook: str) -> None:
    body = f"def {hook}(self, *args): raise kvview.ConfigError('too large')"
    result = run(*REPLAY, write(tmp_path, part, body))
    require_one_line(result, ExitCode.COULD_NOT_RUN, "kvview: too large")


def test_an_error_of_the_engine_is_a_bug_of_kvview(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, *args: object) -> None:
        raise AssertionError("injected into the engine")

    monkeypatch.setattr(Engine, "_schedule_running", broken)
    result = run(*REPLAY[:-1])
    assert result.exit_code == ExitCode.BUG
    assert "injected into the engine" in result.stderr
    assert "Traceback" in result.stderr
    assert "raised" not in result.stderr.splitlines()[-1]


def test_an_error_of_a_connector_of_kvview_has_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_worker(self: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(OffloadConnector, "make_worker", make_worker)
    require_one_line(run(*REPLAY[:-1]), ExitCode.CONNECTOR_RAISED, "make_worker raised OSError")


def test_a_broken_law(tmp_path: Path) -> None:
    target = write(tmp_path, "scheduler", "def match_prefix(self, request, n): return 7")
    require_one_line(run(*REPLAY, target), ExitCode.WRONG, f"connector {target}: CONN-2: ")


def test_the_first_error_is_reported(tmp_path: Path) -> None:
    body = (
        "def plan_step(self, step): raise ValueError('first')\n"
        "    def shutdown(self): raise ValueError('second')"
    )
    result = run(*REPLAY, write(tmp_path, "scheduler", body))
    require_one_line(result, ExitCode.CONNECTOR_RAISED, "plan_step raised ValueError: first")


@pytest.mark.parametrize(
    "version", ["'2.0'", "'1.99'", "'1'", "'1.0.0'", "b'1.0'", "1.0", "'-1.0'", "None"]
)
def test_another_contract_is_refused(tmp_path: Path, version: str) -> None:
    target = write(tmp_path, "connector", f"contract_version = {version}")
    for command in (REPLAY, CHECK):
        require_one_line(run(*command, target), ExitCode.COULD_NOT_RUN, "Mine", "contract")


# --- in a process of its own ---


def test_ctrl_c(tmp_path: Path) -> None:
    started = tmp_path / "started"
    body = f"def plan_step(self, step): open({str(started)!r}, 'w'); import time; time.sleep(60)"
    target = write(tmp_path, "scheduler", body)
    command = [sys.executable, "-W", "ignore", "-m", "kvview", *REPLAY, target]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not started.exists() and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "Traceback" not in stderr
    assert stderr.strip().endswith("kvview: interrupted")
