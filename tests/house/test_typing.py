"""A typed connector under mypy, against the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source_tree import ROOT

EXAMPLE = ROOT / "examples" / "host_cache.py"
WRONG = """

class WrongScheduler(SchedulerConnector):
    view: kvview.GPUBlockPoolView

    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> str:
        if isinstance(self.view, kvview.SupportsFindCachedBlock):
            self.view.find_cached_block(request.block_hashes[0])
        return request.no_such_attribute
"""
"""Errors that a checker finds only with kvview's types."""


@pytest.mark.slow
def test_mypy_strict_finds_only_the_wrong_lines(installed: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"  # it sees kvview only as it is installed
    project.mkdir()
    shutil.copy(EXAMPLE, project)
    source = f"{EXAMPLE.read_text('utf-8')}\nimport kvview\n{WRONG}"
    (project / "wrong_connector.py").write_text(source, "utf-8")
    environment = {k: v for k, v in os.environ.items() if k != "MYPYPATH"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file=",
            f"--cache-dir={tmp_path}/cache",
            ".",
        ],
        cwd=project,
        env={**environment, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert {line.partition(":")[0] for line in errors} == {"wrong_connector.py"}, done.stdout
    assert "in 1 file (checked 2 source files)" in done.stdout
    assert 'incompatible type "BlockHash"; expected "OffloadKey"' in done.stdout
    assert "match_prefix" in done.stdout
    assert "no_such_attribute" in done.stdout
