"""What a connector raises or wrongly returns ends a command in one line that names it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvview.cli.commands import cli
from kvview.cli.exit_codes import ExitCode
from kvview_reference.connector import OffloadConnector
from kvview_reference.engine import Engine

pytest.importorskip("torch")

SMALL = ("--requests", "60", "--gpu-blocks", "200")

# One connector that does what LazyOffload does, but for one method.
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

    def make_scheduler(self):
        return Scheduler(self.config, self.options)

    def make_worker(self):
        return Worker(self.options)
"""


def write(folder: Path, **bodies: str) -> str:
    lines = {part: bodies.get(part, "pass") for part in ("scheduler", "worker", "connector")}
    path = folder / "mine.py"
    path.write_text(SOURCE.format(**lines))
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


SCHEDULER_HOOKS = [
    "bind_gpu_block_pool_view",
    "on_engine_ready",
    "match_prefix",
    "on_blocks_allocated",
    "plan_step",
    "on_transfers_finished",
    "on_request_finished",
    "has_pending_work",
    "shutdown",
]
WORKER_HOOKS = ["register_kv_caches", "start_plan", "get_finished", "shutdown"]


@pytest.mark.parametrize(
    ("part", "hook"),
    [
        *(("scheduler", hook) for hook in SCHEDULER_HOOKS),
        *(("worker", hook) for hook in WORKER_HOOKS),
        ("connector", "make_scheduler"),
        ("connector", "__init__"),
    ],
)
def test_a_hook_that_raises_is_named_with_its_line(tmp_path: Path, part: str, hook: str) -> None:
    body = f"def {hook}(self, *args):\n        raise RuntimeError('one\\ntwo')"
    target = write(tmp_path, **{part: body})
    if hook == "make_scheduler":
        (tmp_path / "mine.py").write_text(
            (tmp_path / "mine.py").read_text().replace("return Scheduler(", "return Missing(")
        )
    result = run("replay", *SMALL, "--connector", target)
    require_one_line(result, ExitCode.CONNECTOR_RAISED, f"{hook} raised ", f"connector {target}: ")
    line = re.search(r"mine\.py:(\d+): ", result.stderr)
    assert line is not None
    lines = (tmp_path / "mine.py").read_text().splitlines()
    assert "raise" in lines[int(line[1]) - 1] or "Missing" in lines[int(line[1]) - 1]


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("raise Odd", "Odd: <Odd whose text raises ValueError>"),
        ("raise ValueError('\\x1b[31m' + 'x' * 9999)", r"ValueError: \x1b[31mxxx"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise kvview.ConfigError('no')", "ConfigError: no"),
        ("self.view.free_blocks([1])", "POOL-4"),
        ("import json; json.loads('{')", "JSONDecodeError"),
        ("from rich.markup import render; render('[/x]')", "MarkupError"),
        ("raise ExceptionGroup('many', [ValueError('a'), KeyError('b')])", "ExceptionGroup: many"),
    ],
)
def test_whatever_is_raised(tmp_path: Path, raised: str, told: str) -> None:
    body = f"def plan_step(self, step):\n        {raised}"
    bind = "def bind_gpu_block_pool_view(self, view):\n        self.view = view\n    "
    target = write(tmp_path, scheduler=bind + body)
    result = run("replay", *SMALL, "--connector", target)
    require_one_line(result, ExitCode.CONNECTOR_RAISED, told, "plan_step raised", "mine.py:14: ")
    assert len(result.stderr) < 2500


@pytest.mark.parametrize(
    ("part", "body", "told"),
    [
        ("scheduler", "def match_prefix(self, r, n): return 'x'", "match_prefix returned 'x'"),
        ("scheduler", "def match_prefix(self, r, n): return 1.0", "a number of tokens or None"),
        ("scheduler", "def plan_step(self, step): return None", "returned None: expected a StepP"),
        ("scheduler", "def plan_step(self, step): return kvview.StepPlan([3])", "of TransferJob"),
        (
            "scheduler",
            "def plan_step(self, step): return kvview.StepPlan(stores=iter(()))",
            "lists of TransferJob",
        ),
        (
            "scheduler",
            "def plan_step(self, step): return kvview.StepPlan([kvview.TransferJob([], 1, 2)])",
            "an int as job_id",
        ),
        ("worker", "def get_finished(self): return None", "get_finished returned None"),
        ("worker", "def get_finished(self): return [7]", "expected a list of TransferResult"),
        (
            "connector",
            "def __new__(cls, config): return 7",
            "__init__ returned 7: expected a Connector",
        ),
    ],
)
def test_what_a_hook_returns_wrongly(tmp_path: Path, part: str, body: str, told: str) -> None:
    result = run("replay", *SMALL, "--connector", write(tmp_path, **{part: body}))
    require_one_line(result, ExitCode.CONNECTOR_RAISED, told, "mine.py:")


@pytest.mark.parametrize("wrong", ["make_scheduler", "make_worker"])
def test_a_half_that_is_none(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "mine.py"
    body = f"    def {wrong}(self): return None\n"
    path.write_text(f"import kvview\nclass Mine(kvview.Connector):\n{body}")
    result = run("replay", *SMALL, "--connector", f"{path}:Mine")
    expected = f"mine.py:3: {wrong} returned None: expected a "
    require_one_line(result, ExitCode.CONNECTOR_RAISED, expected)
    result = run("check", "--seeds", "1", f"{path}:Mine")
    assert result.exit_code == ExitCode.CONNECTOR_RAISED
    assert f"{wrong} returned None" in result.output


def test_what_is_assigned_to_the_object_is_watched_too(tmp_path: Path) -> None:
    body = (
        "def __init__(self, *args):\n"
        "        super().__init__(*args)\n"
        "        self.match_prefix = lambda request: 0"
    )
    result = run("replay", *SMALL, "--connector", write(tmp_path, scheduler=body))
    require_one_line(result, ExitCode.CONNECTOR_RAISED, "mine.py:13: match_prefix raised TypeError")


def test_an_async_answer_is_no_answer(tmp_path: Path) -> None:
    body = (
        "def on_request_finished(self, *args):\n"
        "        class Later:\n"
        "            def __await__(self): ...\n"
        "        return Later()"
    )
    result = run("replay", *SMALL, "--connector", write(tmp_path, scheduler=body))
    require_one_line(result, ExitCode.CONNECTOR_RAISED, "not something to await")


def test_verbose_shows_the_traceback(tmp_path: Path) -> None:
    target = write(tmp_path, scheduler="def plan_step(self, step): return 1 / 0")
    result = run("replay", *SMALL, "--verbose", "--connector", target)
    assert result.exit_code == ExitCode.CONNECTOR_RAISED
    assert "Traceback" in result.stderr
    assert "return 1 / 0" in result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"kvview: connector {target}: ")


def test_a_child_of_several_is_named(tmp_path: Path) -> None:
    child = write(tmp_path, scheduler="def plan_step(self, step): return {}['key']")
    result = run(
        *("replay", *SMALL, "--connector", "kvview_reference.connector:MultiConnector"),
        *("--option", f'connectors=[{{"connector": "{child}"}}]'),
    )
    require_one_line(result, ExitCode.CONNECTOR_RAISED, "mine.py:11: plan_step raised KeyError")


def test_what_a_connector_of_kvviews_own_raises_has_a_line_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make_worker(self: object) -> Any:
        raise OSError("no memory")

    monkeypatch.setattr(OffloadConnector, "make_worker", make_worker)
    result = run("replay", *SMALL)
    require_one_line(result, ExitCode.CONNECTOR_RAISED, "make_worker raised OSError: no memory")


def test_the_constructor_under_check(tmp_path: Path) -> None:
    body = "def __init__(self, config):\n        raise LookupError('no such host')"
    result = run("check", "--seeds", "2", write(tmp_path, connector=body))
    told = "mine.py:18: __init__ raised LookupError: no such host"
    require_one_line(result, ExitCode.CONNECTOR_RAISED, told)


@pytest.mark.parametrize("raised", ["raise SystemExit(0)", "raise Odd", "raise GeneratorExit"])
def test_hooks_under_the_simulation_cannot_end_it(tmp_path: Path, raised: str) -> None:
    target = write(tmp_path, scheduler=f"def plan_step(self, step): {raised}")
    result = run("check", "--seeds", "2", "--keep-going", target)
    assert result.exit_code == ExitCode.CONNECTOR_RAISED, result.output
    assert "plan_step raised" in result.output
    assert "no exception, and values that an engine can use" in result.output
    assert "2 of 2 seeds break it" in result.output


@pytest.mark.parametrize("hook", ["start_plan", "get_finished", "register_kv_caches"])
def test_a_worker_half_that_raises_under_check(tmp_path: Path, hook: str) -> None:
    target = write(tmp_path, worker=f"def {hook}(self, *args): raise RuntimeError('boom')")
    result = run("check", "--seeds", "6", target)
    assert result.exit_code == ExitCode.CONNECTOR_RAISED, result.output
    assert "RuntimeError boom at" in result.output


def test_a_frozen_plan_names_the_line_of_the_author(tmp_path: Path) -> None:
    body = (
        "def plan_step(self, step):\n"
        "        import dataclasses\n"
        "        @dataclasses.dataclass(frozen=True)\n"
        "        class Plan(kvview.StepPlan): ...\n"
        "        Plan().loads = []"
    )
    result = run("check", "--seeds", "2", write(tmp_path, scheduler=body))
    assert result.exit_code == ExitCode.CONNECTOR_RAISED
    assert "mine.py:15" in result.output
    assert "<string>" not in result.output


def test_a_law_that_a_hook_names_is_broken(tmp_path: Path) -> None:
    bind = "def bind_gpu_block_pool_view(self, view):\n        self.view = view\n    "
    body = "def plan_step(self, step): self.view.free_blocks([1])"
    result = run("check", "--seeds", "2", write(tmp_path, scheduler=bind + body))
    assert result.exit_code == ExitCode.WRONG
    assert "POOL-4" in result.output


# --- what is not the connector's ---

MISSING = [
    ("import no_such_library", "no_such_library"),
    ("from no_such_library.deep import x", "no_such_library"),
    ("raise RuntimeError('NIXL is not available')", "NIXL"),
    ("raise ValueError('cannot go on: FlexKV is not installed, see')", "FlexKV"),
    (
        "try:\n            import no_such_library\n        except ImportError as error:\n"
        "            raise RuntimeError('install it') from error",
        "no_such_library",
    ),
]


@pytest.mark.parametrize(("body", "library"), MISSING)
@pytest.mark.parametrize(
    ("part", "hook"),
    [("connector", "__init__"), ("connector", "make_worker"), ("worker", "register_kv_caches")],
)
def test_a_library_that_is_missing(
    tmp_path: Path, part: str, hook: str, body: str, library: str
) -> None:
    target = write(tmp_path, **{part: f"def {hook}(self, *args):\n        {body}"})
    if hook == "make_worker":
        text = (tmp_path / "mine.py").read_text().replace("return Worker", f"{body}\n#")
        (tmp_path / "mine.py").write_text(text)
    for command in (["replay", *SMALL, "--connector"], ["check", "--seeds", "3"]):
        result = run(*command, target)
        require_one_line(result, ExitCode.COULD_NOT_RUN, f"needs {library},", "mine.py:")


def test_a_library_that_is_missing_later_is_an_error_of_the_hook(tmp_path: Path) -> None:
    target = write(tmp_path, scheduler="def plan_step(self, step): import no_such_library")
    result = run("replay", *SMALL, "--connector", target)
    require_one_line(result, ExitCode.CONNECTOR_RAISED, "No module named 'no_such_library'")


def test_a_refused_option_is_no_fault_of_the_connector(tmp_path: Path) -> None:
    for part, hook in (("connector", "__init__"), ("worker", "register_kv_caches")):
        body = f"def {hook}(self, *args): raise kvview.ConfigError('too large')"
        result = run("replay", *SMALL, "--connector", write(tmp_path, **{part: body}))
        require_one_line(result, ExitCode.COULD_NOT_RUN, "kvview: too large")


def test_a_bug_of_the_engine_is_not_blamed_on_the_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: object, *args: object) -> None:
        raise AssertionError("planted in the engine")

    monkeypatch.setattr(Engine, "_schedule_running", broken)
    result = run("replay", *SMALL)
    assert result.exit_code == ExitCode.BUG
    assert "planted in the engine" in result.stderr
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1] == (
        "kvview: a bug of kvview or of the command, and no verdict: please report the above"
    )
    assert "raised" not in result.stderr.splitlines()[-1]


def test_a_broken_law_is_something_wrong(tmp_path: Path) -> None:
    target = write(tmp_path, scheduler="def match_prefix(self, request, n): return 7")
    result = run("replay", *SMALL, "--connector", target)
    require_one_line(result, ExitCode.WRONG, f"connector {target}: CONN-2: match_prefix promised 7")


def test_what_came_first_is_told(tmp_path: Path) -> None:
    body = (
        "def plan_step(self, step): raise ValueError('first')\n"
        "    def shutdown(self): raise ValueError('second')"
    )
    result = run("replay", *SMALL, "--connector", write(tmp_path, scheduler=body))
    require_one_line(result, ExitCode.CONNECTOR_RAISED, "plan_step raised ValueError: first")


@pytest.mark.parametrize(
    "version", ["'1.0'", "'2.0'", "'1.99'", "'1'", "'1.0.0'", "b'1.0'", "1.0", "'-1.0'", "None"]
)
def test_another_contract_is_refused(tmp_path: Path, version: str) -> None:
    body = f"contract_version = {version}"
    target = write(tmp_path, connector=body)
    for command in (("replay", *SMALL, "--connector"), ("check", "--seeds", "1")):
        result = run(*command, target)
        if version == "'1.0'":
            assert result.exit_code in (ExitCode.CLEAN, ExitCode.NOT_CHECKED)  # of one seed
        else:
            require_one_line(result, ExitCode.COULD_NOT_RUN, "Mine", "contract")


# --- a real process ---


def kvview(*args: object, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvview", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, **kwargs
    )


def test_a_hook_that_exits_with_0_is_not_clean(tmp_path: Path) -> None:
    target = write(tmp_path, scheduler="def plan_step(self, step): raise SystemExit(0)")
    done = kvview("replay", *SMALL, "--connector", target)
    assert done.returncode == ExitCode.CONNECTOR_RAISED
    assert done.stderr.count("\n") == 1


def test_a_target_that_exits_could_not_run(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(7)\n")
    for command in (("replay", "--connector"), ("check",)):
        done = kvview(*command, "exits.py:Mine", cwd=tmp_path)
        assert done.returncode == ExitCode.COULD_NOT_RUN
        assert done.stderr.count("\n") == 1
        assert "exits.py:2: SystemExit: 7" in done.stderr


def test_ctrl_c(tmp_path: Path) -> None:
    body = (
        "def plan_step(self, step):\n"
        f"        open({str(tmp_path / 'begun')!r}, 'w').close()\n"
        "        import time; time.sleep(60)"
    )
    target = write(tmp_path, scheduler=body)
    command = [sys.executable, "-m", "kvview", "replay", *SMALL, "--connector", target]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "begun").exists() and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "Traceback" not in told
    assert told.strip().endswith("kvview: interrupted")
