"""A strict third party's file, written from the docs alone, under strict type checkers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAMPLE = Path(__file__).with_name("strict_typing.py")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_mypy_strict_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="needs mypy")
    options = ["--strict", "--config-file=", f"--cache-dir={tmp_path}"]
    done = run(sys.executable, "-m", "mypy", *options, SAMPLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("Success"), done.stdout


def test_mypy_knows_a_block_hash_from_a_key(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="needs mypy")
    wrong = tmp_path / "wrong.py"
    right = "make_offload_key(request.block_hashes[0], 0)"
    wrong.write_text(SAMPLE.read_text().replace(right, "request.block_hashes[0]"))
    options = ["--strict", "--config-file=", f"--cache-dir={tmp_path}"]
    done = run(sys.executable, "-m", "mypy", *options, wrong)
    assert 'incompatible type "BlockHash"; expected "OffloadKey"' in done.stdout


def test_pyright_strict_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("pyright", reason="needs pyright")
    try:
        version = run(sys.executable, "-m", "pyright", "--version")
    except subprocess.TimeoutExpired:
        pytest.skip("pyright finds no node here")
    if version.returncode != 0 or "pyright 1." not in version.stdout:
        pytest.skip("pyright finds no node here")
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(
        f'{{"include": ["{SAMPLE}"], "extraPaths": ["{ROOT}"], "typeCheckingMode": "strict"}}'
    )
    done = run(sys.executable, "-m", "pyright", "-p", settings)
    assert done.returncode == 0, done.stdout + done.stderr
