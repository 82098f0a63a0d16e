"""The conformance kit itself: its runners, its messages, and its reaction to bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvview import BlockNotHeldError, ConfigError
from kvview.cli.commands import cli
from kvview.testing import (
    Effort,
    ExpectedFailure,
    LawBroken,
    Outcome,
    PoolConformance,
    all_checks,
    inspect_target,
    read_expected,
    run_checks,
)
from kvview.testing.checks import checks_for
from kvview.testing.runner import plan_checks
from kvview.testing.suites.capability import capabilities_of
from kvview_reference.harness import (
    ReferenceEnginePool,
    ReferenceManager,
    ReferencePool,
    ReferenceTransfer,
)
from kvview_reference.pool import BlockPoolView

ROOT = Path(__file__).parents[2]


class ReleasesForeignBlocks(ReferenceEnginePool):
    """Wrong on purpose: the view releases blocks that it does not hold."""

    def make_view(self) -> Any:
        class View(BlockPoolView):
            def free_blocks(self, block_ids: Sequence[int], /) -> None:
                try:
                    super().free_blocks(block_ids)
                except BlockNotHeldError:
                    self._open_pool().free_blocks(block_ids)

        return View(self.pool, "wrong")


class DropsEngineReferences(ReferencePool):
    engine_class = ReleasesForeignBlocks


class MinimalPool:
    """The least that a pool with its engine must be."""

    null_block_id = 0

    def __init__(self, num_blocks: int) -> None:
        inner = ReferenceEnginePool(num_blocks)
        self.view: Any = inner.view
        self.allocate: Any = inner.allocate
        self.release: Any = inner.release


ALL = frozenset(capabilities_of("pool"))


class Minimal(PoolConformance):
    lacks = ALL

    def make(self, num_blocks: int) -> Any:
        return MinimalPool(num_blocks)


WRONG_CHECK = "check_pool_4"
LINK = "https://example.com/issues/7"
QUICK_CHECK = "test_pool_1_growth_of_holds"  # without a machine, whose runs take seconds


# --- the list of checks ---


def test_checks_are_named_for_their_law_and_documented() -> None:
    names = [check.name for check in all_checks()]
    assert len(names) == len(set(names))
    for check in all_checks():
        prefix = check.law.lower().replace("-", "_").replace("*", "any")
        assert re.match(rf"(check|test)_(\w+_)?{prefix}(_|$)", check.name), check
        assert check.summary.endswith("."), check.name
        assert set(check.requires) <= set(capabilities_of(check.contract))


# --- the runner ---


def test_undeclared_capabilities_are_skipped_with_a_reason() -> None:
    report = run_checks(Minimal, steps=5)
    assert report.is_clean
    skipped = {r.check.name: r.reason for r in report if r.outcome is Outcome.SKIPPED}
    assert skipped["check_pool_9"] == "the implementation lacks reset"
    passed = {r.check.name for r in report if r.outcome is Outcome.PASSED}
    assert "check_pool_2" in passed
    assert len(report.results) == len(checks_for("pool")) == report.num_selected


def test_expected_failures_and_unexpected_passes() -> None:
    expected = [ExpectedFailure(name, "known", LINK) for name in (WRONG_CHECK, QUICK_CHECK)]
    select = [WRONG_CHECK, QUICK_CHECK]
    report = run_checks(DropsEngineReferences, expected=expected, select=select, seeds=50)
    outcomes = {r.check.name: r.outcome for r in report}
    assert outcomes[WRONG_CHECK] is Outcome.EXPECTED_FAILURE
    assert outcomes[QUICK_CHECK] is Outcome.UNEXPECTED_PASS
    assert not report.is_clean
    assert report.verdict().startswith(f"red: {QUICK_CHECK} passed, but is expected to fail")


@pytest.mark.parametrize("message", ["", "another message"])
def test_another_failure_of_an_expected_law_is_red(message: str) -> None:
    expected = [ExpectedFailure(WRONG_CHECK, "known", LINK, message)]
    report = run_checks(DropsEngineReferences, expected=expected, select=[WRONG_CHECK], seeds=50)
    assert report.is_clean == (not message)


def test_a_failure_can_be_pasted() -> None:
    report = run_checks(DropsEngineReferences, select=[WRONG_CHECK], seeds=50)
    (result,) = report.failures
    failure = result.failure
    assert failure is not None
    assert failure.law == "POOL-4"
    assert (failure.got, failure.expected) == ("no error, None", "BlockNotHeldError")
    with pytest.raises(AssertionError, match=r"\w+\(.*\) must raise BlockNotHeldError"):
        exec(failure.script, {})


def test_a_failing_run_is_shrunk_to_a_few_lines() -> None:
    class Evicting(ReferenceEnginePool):
        def evict(self, block_ids: Sequence[int]) -> None:
            super().evict(block_ids)
            if len(block_ids) > 1:
                self.pool.allocate_blocks(1)

    class LosesEvictedBlocks(ReferencePool):
        engine_class = Evicting

    failure = run_checks(LosesEvictedBlocks, select=["POOL-1"]).failures[0].failure
    assert failure is not None
    calls = [line for line in failure.script.splitlines() if line.startswith("state.")]
    assert len(calls) <= 8, failure.script


def test_an_exception_of_the_target_is_a_failure_with_its_call() -> None:
    class Asserts(ReferenceManager):
        def with_threshold(self, capacity: int, num_offers: int) -> Any:
            manager: Any = super().with_threshold(capacity, num_offers)

            def prepare_store(*args: Any) -> None:
                raise AssertionError("no page")

            manager.prepare_store = prepare_store
            return manager

    report = run_checks(Asserts, select=["check_off_*"])
    failure = report.failures[0].failure
    assert failure is not None
    assert failure.got == "AssertionError: no page"
    assert "prepare_store" in failure.what


# --- bad targets ---


def _suite(*has: str, lacks: Sequence[str] = (), **values: Any) -> type[PoolConformance]:
    """Return a suite of a minimal pool, with other attributes; None removes an attribute."""

    class Suite(PoolConformance):
        def make(self, num_blocks: int) -> Any:
            made = MinimalPool(num_blocks)
            for name, value in values.items():
                delattr(made, name) if value is None else setattr(made, name, value)
            return made

    Suite.lacks = (ALL - set(has)) | set(lacks)
    return Suite


class _OldView:
    def touch_blocks(self) -> None: ...

    def iter_free_block_ids_with_hash(self) -> None: ...


def _function() -> None: ...


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (_function, "_function is not a class of connectors, stores or cache policies"),
        (list, "list is not a class of connectors"),
        (3, "3 is not a class of connectors"),
        (_suite(release=None), "MinimalPool lacks release"),
        (_suite("reset"), "MinimalPool lacks reset; define them, or declare their absence"),
        (_suite(lacks=["resets"]), "lacks names resets; the capabilities of a pool are"),
        (_suite(lacks=["walks"]), "lacks names walks; the capabilities of a pool are"),
        (PoolConformance, "cannot make its object: define PoolConformance.make(num_blocks)"),
        (_suite(view=_OldView()), "_OldView lacks free_blocks"),
    ],
)
def test_bad_target_is_one_message_before_any_check(factory: Any, message: str) -> None:
    ran: list[str] = []
    with pytest.raises(ConfigError) as caught:
        run_checks(factory, on_progress=ran.append)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not ran


def test_every_fault_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        inspect_target(_suite("evict", view=_OldView()))
    message = str(caught.value)
    for part in ("lacks free_blocks", "lacks evict", "lacks = {'evict'}"):
        assert part in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reason": " "}, "POOL-4 needs a reason"),
        ({"link": ""}, "POOL-4 needs a link to its thread"),
        ({"link": "issue 7"}, "POOL-4 needs a link to its thread"),
        ({"reason": 34}, "reason of 'POOL-4' is not a text"),
        ({"law": "POOL-6"}, "POOL-6 has several checks: check_pool_6, test_pool_6"),
        ({"law": "POOL_4"}, "'POOL_4' matches no check of this contract; did you mean POOL-4"),
        ({"law": "coverage: loads"}, "'coverage: loads' matches no check"),
        ({"laws": "POOL-4"}, "unexpected keyword argument 'laws'"),
    ],
)
def test_an_expected_failure_has_a_law_a_reason_and_a_link(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    entry = {"law": "POOL-4", "reason": "known", "link": LINK} | values
    path = tmp_path / "expected.toml"
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in entry.items())
    path.write_text(f"[[expected]]\n{lines}")
    with pytest.raises(ConfigError, match=message):
        plan_checks(Minimal, Effort(), expected=read_expected(path))


@pytest.mark.parametrize(
    "text", ["", "law = 'POOL-4'", "[[expected]]\n[other]", "?", "expected = 1"]
)
def test_a_file_of_expected_failures_has_only_these(tmp_path: Path, text: str) -> None:
    path = tmp_path / "expected.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"expected\.toml.*: "):
        read_expected(path)


# --- pytest ---


def test_a_clean_report_raises_nothing() -> None:
    run_checks(Minimal, select=[QUICK_CHECK, "check_pool_9*"], steps=5).require_clean()


def test_a_report_raises_its_first_failure_unless_it_is_expected() -> None:
    with pytest.raises(LawBroken, match="POOL-4"):
        run_checks(DropsEngineReferences, select=[WRONG_CHECK], seeds=50).require_clean()
    expected = [ExpectedFailure("POOL-4", "wrong on purpose", LINK)]
    found = run_checks(DropsEngineReferences, expected=expected, select=[WRONG_CHECK], seeds=50)
    found.require_clean()
    unexpected = run_checks(Minimal, expected=expected, select=[WRONG_CHECK], seeds=1)
    with pytest.raises(AssertionError, match="is expected to fail"):
        unexpected.require_clean()


# --- the command ---


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["check", *map(str, args)])


def test_the_command_reports_by_law(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = run(
        "kvview_reference.harness:ReferencePool",
        "--select=POOL-4",
        "--steps=5",
        "--seeds=20",
        "--json",
        path,
    )
    assert result.exit_code == 0, result.output
    assert result.output.startswith("green: every law that was checked holds\n")
    report = json.loads(path.read_text())
    assert report["is_clean"] is True
    assert report["counts"] == {"passed": len(report["checks"])}
    assert {check["law"] for check in report["checks"]} == {"POOL-4"}


def test_the_command_shows_failures_and_exits_1(tmp_path: Path) -> None:
    expected = tmp_path / "expected.toml"
    target = f"{__file__}:DropsEngineReferences"
    result = run(target, "--select", WRONG_CHECK, "--seeds", "50")
    assert result.exit_code == 1
    verdict, summary, *_ = result.output.splitlines()
    assert verdict.startswith("red: POOL-4 No foreign frees: ")
    assert verdict.endswith("must raise BlockNotHeldError")
    assert f"{target}: 1 failed" in summary
    assert "expected: BlockNotHeldError" in result.output
    expected.write_text(f"[[expected]]\nlaw = 'POOL-4'\nreason = 'on purpose'\nlink = '{LINK}'\n")
    path = tmp_path / "report.json"
    arguments = ("--seeds=50", "--expected", expected, "--report-json", tmp_path / "result.json")
    result = run(target, "--select", WRONG_CHECK, *arguments, "--json", path)
    assert result.exit_code == 0
    assert result.output.startswith("green, 1 expected failure: every other law checked holds\n")
    assert f"expected failure: {WRONG_CHECK}: on purpose {LINK}" in result.output
    (reported,) = json.loads(path.read_text())["checks"]
    assert (reported["reason"], reported["link"]) == ("on purpose", LINK)
    (profile,) = json.loads((tmp_path / "result.json").read_text())["profiles"]
    assert profile["verdict"] == "green"
    assert [finding["evidence"] for finding in profile["findings"]] == [f"on purpose {LINK}"]


class NeverComesBack(ReferenceTransfer):
    """Waits for a report that never comes."""

    def make(self, *sizes: Any) -> Any:
        worker: Any = super().make(*sizes)
        worker.wait = lambda job_ids: threading.Event().wait()
        return worker


def test_a_call_that_does_not_return_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvview.testing.suites.conformance._CALL_SECONDS", 0.2)
    suite: Any = NeverComesBack()
    with pytest.raises(LawBroken, match=r"wait\(\[\d+\]\) must return") as broken:
        suite.test_xfer_5_race_of_wait_and_report()
    assert "did not return: it waited for" in broken.value.got
    assert "test_runner.py:" in broken.value.got


WARNS = """
import logging
from kvview_reference.harness import ReferencePool

class Noisy(ReferencePool):
    def make(self, num_blocks):
        logging.getLogger(__name__).warning("of the author")
        logging.getLogger("kvview.guard").warning("of kvview")
        return super().make(num_blocks)
"""


@pytest.mark.slow
def test_a_green_check_prints_no_warnings_of_injected_faults(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(WARNS)
    target = f"{tmp_path}/noisy.py:Noisy"
    for more in ([], ["--verbose"]):
        args = [target, "--steps", "3", "--select", QUICK_CHECK, *more]
        command = [sys.executable, "-m", "kvview", "check", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout
        assert more or "Traceback" not in done.stderr
        assert ("of kvview" in done.stderr) == bool(more)
        assert "of the author" in done.stderr
