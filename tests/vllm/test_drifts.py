"""Drifts planted into the newest release: each is refused by doctor in one line, or works."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

drifts: Any = import_module("drifts")
DRIFTS: Any = drifts.read_drifts()


@pytest.mark.newest
def test_every_drift_fits_the_newest_sources() -> None:
    files = drifts.Sources(drifts.sources(drifts.NEWEST))
    assert len(DRIFTS) >= 55
    for drift in DRIFTS.values():
        for path, text in drift.apply(files).items():
            compile(text, f"{drift.name}: {path}", "exec")


@pytest.mark.newest
def test_a_drift_is_refused_or_works_as_its_row_states() -> None:
    # In a process that has not imported vLLM, because plays are forked off it.
    command = [sys.executable, str(Path(__file__).with_name("drifts.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"0 of {len(DRIFTS)} drifts get through" in done.stdout


def test_a_drift_that_its_row_does_not_expect_gets_through(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "reset_cache is called with a reason"
    for outcome in (drifts.REFUSED, drifts.WORKS, "swallowed"):
        results = [(name, outcome, "")]
        monkeypatch.setattr(drifts, "play", lambda *_, results=results: iter(results))
        assert drifts.main([name]) == (outcome != drifts.REFUSED)
    assert "1 of 1 drifts get through" in capsys.readouterr().out
