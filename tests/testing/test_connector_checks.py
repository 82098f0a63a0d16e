"""Connectors are checked like any other contract: by law, under every runner."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvview import Connector, RequestInfo, SchedulerConnector, StepInfo, StepPlan
from kvview.cli.commands import cli
from kvview.cli.exit_codes import ExitCode
from kvview.testing import (
    ExpectedFailure,
    Outcome,
    run_checks,
)

pytest.importorskip("torch")

from kvview.testing.connector import check_connector
from kvview.testing.connector.result import ConnectorFailure
from kvview.testing.effort import Effort
from kvview.testing.runner import plan_checks, run_planned
from kvview_reference.store_connector import StoreConnector
from kvview_reference.store_connector.planning.store_scheduler import StoreScheduler
from tests.connector.halves import WithHalves

ROOT = Path(__file__).parents[2]
STORE = "kvview_reference.store_connector:StoreConnector"
NAMES = ("loads", "stores", "hits")


class ForgetsEvents(WithHalves):
    class scheduler(StoreScheduler):
        def take_events(self) -> Any:
            return [*super().take_events()][1:]


class Loops(WithHalves):
    class scheduler(StoreScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            while True:
                pass


class Waits(WithHalves):
    class scheduler(StoreScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
            raise AssertionError("never")


class Draws(WithHalves):
    class scheduler(StoreScheduler):
        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> Any:
            answer = super().match_prefix(request, num_computed_tokens)
            return answer if random.random() < 0.5 else None  # several draws for each request


class SometimesLeaks(WithHalves):
    class scheduler(StoreScheduler):
        def _release(self, store: Any) -> None:
            if random.random() < 0.5:
                super()._release(store)


class Raises(WithHalves):
    class scheduler(StoreScheduler):
        def plan_step(self, step: StepInfo) -> StepPlan:
            raise ValueError("boom")


BEGINS = """
from pathlib import Path
from kvview.cli import main
from kvview.testing import runner

run_planned = runner.run_planned

def begin(*args):
    Path({started!r}).touch()
    return run_planned(*args)

runner.run_planned = begin
main()
"""


# Python drops the exceptions of this callback.
IN_FORK = """
import os, signal
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
"""


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["check", *map(str, args)])


# --- one registry, three runners ---


def test_under_pytest() -> None:
    run_checks(StoreConnector, seeds=2, select=["exceptions", "CONN-4"]).require_clean()


@pytest.mark.slow
def test_failures_are_grouped_by_law_with_a_script_each() -> None:
    report = run_checks(ForgetsEvents, seeds=12, keep_going=True)
    assert report.contract == "connector"
    assert len(report.failures) >= 2
    for result in report.failures:
        assert result.failure is not None
        assert result.failure.law == result.check.law
        assert result.failure.seeds
        with pytest.raises(AssertionError):
            exec(result.failure.script, {})
    assert report.runs is not None
    seeds = [seed for r in report.failures if r.failure for seed in r.failure.seeds]
    assert len(seeds) == len(set(seeds)) == len(report.runs.failures)


def test_the_runs_are_shared() -> None:
    seen: list[str] = []
    report = run_checks(StoreConnector, seeds=2, on_progress=seen.append)
    assert [text for text in seen if " of 2 seeds" in text] == [
        "1 of 2 seeds, 0 failed",
        "2 of 2 seeds, 0 failed",
    ]
    assert len(report.results) > 20


def test_select_and_expected_failures_are_honoured(tmp_path: Path) -> None:
    report = run_checks(Connector_that_does_nothing, seeds=2, select=["coverage"])
    assert [result.outcome for result in report] == [Outcome.NOT_CHECKED]
    expected = [ExpectedFailure(f"coverage: {name}", "it does nothing") for name in NAMES]
    report = run_checks(Connector_that_does_nothing, seeds=2, expected=expected)
    assert report.is_clean
    assert report.counts["expected failure"] == len(NAMES)
    report = run_checks(StoreConnector, seeds=2, expected=expected, select=["coverage"])
    assert [r.outcome for r in report.failures] == [Outcome.UNEXPECTED_PASS] * len(NAMES)
    lines = tmp_path / "expected.toml"
    entry = "[[expected]]\nlaw = 'coverage: {}'\nreason = 'it does nothing'\n"
    lines.write_text("".join(map(entry.format, NAMES)))
    target = f"{__file__}:Connector_that_does_nothing"
    assert run(target, "--seeds", "2").exit_code == ExitCode.NOT_CHECKED
    assert run(target, "--seeds", "2", "--expected", lines).exit_code == ExitCode.CLEAN


def test_another_failure_of_an_expected_law_of_connectors_is_red() -> None:
    def failure(seed: int, message: str) -> ConnectorFailure:
        return ConnectorFailure(seed, "CONN-4", message, "", "CONN-4")

    runs = replace(
        check_connector(Connector_that_does_nothing, seeds=1),
        failures=[failure(0, "a known leak"), failure(1, "an unknown leak")],
    )
    for message, outcome in (
        ("leak", Outcome.EXPECTED_FAILURE),
        ("a known leak", Outcome.FAILED),
    ):
        expected = [ExpectedFailure("CONN-4", "known", "https://a.b/c", message)]
        (check,) = plan_checks(
            Connector_that_does_nothing, Effort(), expected=expected, select=["CONN-4"]
        )[1]
        shared: dict[object, Any] = {Connector_that_does_nothing: runs}
        result = run_planned(check, Effort(shared=shared))
        assert result.outcome is outcome
        assert result.failure is not None
        assert ("unknown" in result.failure.what) == (outcome is Outcome.FAILED)


class Connector_that_does_nothing(Connector):
    def make_scheduler(self) -> SchedulerConnector:
        return SchedulerConnector()


# --- said so, by name ---


@pytest.mark.parametrize("connector", [Loops, pytest.param(Waits, marks=pytest.mark.slow)])
def test_a_hook_that_does_not_return_is_named(connector: type[Connector]) -> None:
    runs = check_connector(connector, seeds=9, keep_going=True, hook_seconds=0.5)
    assert runs.num_seeds == 2, "each of them costs what a hook may take"
    message = runs.failures[0].message
    assert re.match(
        r"plan_step did not return.*: it is at \S+test_connector_checks.py:\d+", message
    )
    assert any("hooks do not return" in note for note in runs.notes)


@pytest.mark.slow
def test_runs_that_are_not_deterministic_are_named() -> None:
    few: dict[str, Any] = {"seeds": 20, "first_seed": 10}  # no long one, and one is run twice
    runs = check_connector(Draws, **few)
    assert not runs.failures
    assert any("not deterministic: seed" in note for note in runs.notes)
    failures = check_connector(SometimesLeaks, seeds=6, keep_going=True, max_shrink_runs=0).failures
    told = [failure for failure in failures if "not deterministic" in failure.message]
    assert told
    assert "in range(50)" in told[0].script
    first = check_connector(SometimesLeaks, seeds=6).failures[0]
    assert "not deterministic" in first.message, "a small run may repeat by chance"
    assert not check_connector(StoreConnector, **few).notes


@pytest.mark.parametrize(
    ("target", "is_in_fork"), [(STORE, True), ("kvview_reference.harness:ReferencePool", False)]
)
def test_sigterm_leaves_the_summary(tmp_path: Path, target: str, is_in_fork: bool) -> None:
    file = tmp_path / "report.json"
    args = [target, "--seeds", "2000", "--steps", "1000", "--json", str(file)]
    started = tmp_path / "started"
    code = (IN_FORK if is_in_fork else "") + BEGINS.format(started=str(started))
    process = subprocess.Popen(
        [sys.executable, "-c", code, "check", *args], stdout=subprocess.PIPE, text=True
    )
    while not started.exists() and process.poll() is None:
        time.sleep(0.05)
    if not is_in_fork:
        os.kill(process.pid, signal.SIGTERM)
    stdout, _ = process.communicate(timeout=120)
    assert process.returncode == ExitCode.INTERRUPTED, stdout
    report = json.loads(file.read_text())
    assert (report["is_clean"], report["is_interrupted"]) == (False, True)
    if target != STORE:
        assert "interrupted after" in stdout
        return
    assert (report["runs"]["num_asked"], report["checks"]) == (2000, [])
    num_seeds = report["runs"]["num_seeds"]
    assert num_seeds < 2000
    assert f"{num_seeds} of 2000 seeds, 0 failed, interrupted" in stdout
