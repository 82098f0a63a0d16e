"""Shards of a check: their reports add up to the report of one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/host_memory.py:HostMemoryConnector"
LEAKS = """
from examples.host_cache import HostCacheConnector, HostCacheScheduler


class Scheduler(HostCacheScheduler):
    def on_transfers_finished(self, results):
        super().on_transfers_finished([one for one in results if one.job_id % 40])


class Leaks(HostCacheConnector):
    def make_scheduler(self):
        return Scheduler(self.config, self.cpu_blocks)
"""


def check(*arguments: str, code: int = 0) -> str:
    line = [sys.executable, "-m", "kvview", "check", *arguments]
    path = os.pathsep.join([str(ROOT), *sys.path])
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def shards_of(target: str, folder: Path, number: int, *arguments: str, code: int = 0) -> list[str]:
    files = [str(folder / f"{one}.json") for one in range(1, number + 1)]
    for one, file in enumerate(files, 1):
        check(target, *arguments, "--shard", f"{one}/{number}", "--json", file, code=code)
    return files


def runs_in(file: Path) -> Any:
    return json.loads(file.read_text())["runs"]


@pytest.mark.slow
def test_shards_add_up_to_one_run(tmp_path: Path) -> None:
    files = shards_of(EXAMPLE, tmp_path, 3, "--seeds", "24")
    check("--merge", *files, "--json", str(tmp_path / "merged.json"))
    check(EXAMPLE, "--seeds", "24", "--json", str(tmp_path / "whole.json"))
    merged, whole = runs_in(tmp_path / "merged.json"), runs_in(tmp_path / "whole.json")
    for name in ("num_seeds", "num_asked", "unrun", "num_statements", "not_exercised", "engine"):
        assert merged[name] == whole[name], name
    assert merged["coverage"].keys() == whole["coverage"].keys()
    assert merged["coverage"]["requests"] == whole["coverage"]["requests"]
    assert "3/3 is missing" in check("--merge", *files[:2], code=2)


@pytest.mark.slow
def test_a_failure_in_one_shard_is_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "leaks.py").write_text(LEAKS)
    target = f"{tmp_path / 'leaks.py'}:Leaks"
    options = ("--option", "cpu_blocks={blocks}", "--seeds", "4")
    files = shards_of(target, tmp_path, 2, *options, code=1)
    report = check("--merge", *files, code=1)
    assert report.startswith("red: CONN-3")
    assert "to reproduce" in report


@pytest.mark.parametrize("shard", ["0/3", "4/3", "3", "a/b"])
def test_a_wrong_shard_is_refused(shard: str) -> None:
    assert "shard" in check(EXAMPLE, "--shard", shard, code=2)


def test_other_files_are_no_shards(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert "cannot be read" in check("--merge", str(path), code=2)
    path.write_text("{}")
    assert "not a report" in check("--merge", str(path), code=2)
