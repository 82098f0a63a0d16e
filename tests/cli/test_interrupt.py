"""Ctrl-C in ``replay`` and ``size``: the result of the requests so far is reported."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from kvview.cli.commands import cli
from kvview.cli.exit_codes import ExitCode
from kvview_reference.replay import trace_input

pytest.importorskip("torch")


@pytest.mark.parametrize("command", ["replay", "size"])
def test_the_first_ctrl_c_ends_the_trace(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generate: Any = trace_input.generate_trace  # type: ignore[attr-defined]

    def interrupted(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for number, row in enumerate(generate(*args, **kwargs)):
            if number == 20:
                signal.raise_signal(signal.SIGINT)
            yield row

    monkeypatch.setattr(trace_input, "generate_trace", interrupted)
    result = CliRunner().invoke(cli, [command, "--requests", "50"])
    assert result.exit_code == ExitCode.INTERRUPTED, result.output
    assert "interrupted: the result covers only the requests so far" in result.stderr
    assert "21" in result.stdout
