"""Ctrl-C ends a replay, with the exit code of an interrupted command and without a result."""

from __future__ import annotations

import signal
from itertools import count

import pytest
from click.testing import CliRunner

from kvview.cli.commands import cli
from kvview.cli.exit_codes import ExitCode
from kvview_reference.engine import Engine

pytest.importorskip("torch")


def test_ctrl_c_ends_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step
    numbers = count()

    def interrupted(engine: Engine) -> None:
        if next(numbers) == 20:
            signal.raise_signal(signal.SIGINT)
        step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = CliRunner().invoke(cli, ["replay", "--requests", "500"])
    assert result.exit_code == ExitCode.INTERRUPTED, result.output
    assert result.stderr.strip() == "kvview: interrupted"
    assert "mismatches" not in result.stdout
    assert next(numbers) == 21
