"""Ctrl-C in ``replay``: the result of the requests so far is reported."""

from __future__ import annotations

import signal
from itertools import count

import pytest
from click.testing import CliRunner

from kvview.cli.commands import cli
from kvview.cli.exit_codes import ExitCode
from kvview_reference.engine import Engine

pytest.importorskip("torch")


def test_the_first_ctrl_c_ends_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step
    numbers = count()

    def interrupted(engine: Engine) -> None:
        if next(numbers) == 20:
            signal.raise_signal(signal.SIGINT)
        step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = CliRunner().invoke(cli, ["replay", "--requests", "500"])
    assert result.exit_code == ExitCode.INTERRUPTED, result.output
    assert "interrupted: the result covers only the requests so far" in result.stderr
    assert "mismatches" in result.stdout
    assert next(numbers) < 200
