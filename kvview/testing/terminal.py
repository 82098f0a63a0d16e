"""The output of ``kvview check`` on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvview.laws import titled
from kvview.testing.connector_checks import COVERAGE, NotExercised
from kvview.testing.report import CheckResult, Outcome, Report
from kvview.urls import law_url

if TYPE_CHECKING:
    from kvview.testing.connector import ConnectorRuns
    from kvview.testing.upgrade import UpgradeReport

_MAX_SEEDS = 20
_MAX_GAPS = 12
_MAX_LOG = 20
_WIDTH = 120


def show_report(console: Console, report: Report) -> None:
    """Print a report: the verdict in one line, its reasons, and the checks that did not pass."""
    style = "green" if report.is_clean else "bold red" if report.failures else "yellow"
    _print(console, report.verdict(), style)
    _print(console, report.summary(), "")
    if report.runs is not None and report.runs.is_cut_short and not report.is_interrupted:
        _print(console, "the first failure ends the runs; --keep-going plays all seeds", "")
    for number, result in enumerate(report.failures):
        _show_failure(console, result, is_in_the_verdict=number == 0)
    for result in report.not_checked:
        _show_gaps(console, result)
    if report.runs is not None:
        _show_runs(console, report.runs)
    _show_checks(console, report)


def _show_gaps(console: Console, result: CheckResult) -> None:
    """Print the items that no run exercised, and a link to their explanation."""
    gaps = result.failure.gaps if isinstance(result.failure, NotExercised) else ()
    console.print()
    for gap in gaps[:_MAX_GAPS]:
        _print(console, f"  {gap}", "")
    if len(gaps) > _MAX_GAPS:
        more = len(gaps) - _MAX_GAPS
        _print(console, f"  and {more} more, listed by --json", "")
    _print(console, f"what to do: {law_url(COVERAGE)}", "yellow")


def _show_runs(console: Console, runs: ConnectorRuns) -> None:
    """Print the notes of simulated runs, and the share of the author's code that ran."""
    for note in runs.notes:
        _print(console, note, "yellow")
    if runs.left_out:
        _print(console, f"not simulated: {'; '.join(runs.left_out)}", "dim")
    if runs.num_statements:
        unrun = sum(one.num_statements for one in runs.unrun)
        text = f"code: {runs.num_statements - unrun} of {runs.num_statements} statements ran"
        others = (one for one in runs.unrun if one.num_statements and not one.is_judged)
        if listed := [one.place for one in others]:
            text += f"; places that never ran (errors, GPU, logs or no caller): {', '.join(listed)}"
        _print(console, text, "dim")


def _show_checks(console: Console, report: Report) -> None:
    """Print the checks that neither passed nor failed; skipped checks are grouped by reason."""
    skipped: dict[str, int] = {}
    for result in report:
        if result.outcome is Outcome.SKIPPED:
            skipped[result.reason] = skipped.get(result.reason, 0) + 1
        elif result.outcome is Outcome.EXPECTED_FAILURE:
            _print(console, f"{result.outcome}: {result.check.name}: {result.reason}", "yellow")
    for reason, number in skipped.items():
        _print(console, f"skipped: {number} checks: {reason}", "dim")


def _show_failure(console: Console, result: CheckResult, *, is_in_the_verdict: bool) -> None:
    failure = result.failure
    console.print()
    if failure is None:
        text = f"{result.check.name} passed, but is expected to fail: {result.reason}"
        _print(console, text, "bold red")
        return
    text = f"{titled(failure.law)} ({result.check.name})"
    _print(console, text if is_in_the_verdict else f"{text}: {failure.what}", "bold red")
    rows = [("got", failure.got), ("expected", failure.expected), ("law", failure.law_url)]
    rows.append(("try", failure.hint))
    if failure.seeds:
        shown = ", ".join(map(str, failure.seeds[:_MAX_SEEDS]))
        more = len(failure.seeds) - _MAX_SEEDS
        rows.append(("seeds", shown + (f" and {more} more" if more > 0 else "")))
    for name, value in rows:
        if value:
            _print(console, f"  {name + ':':<9} {value}", "")
    if failure.script:
        _print(console, "  to reproduce:\n", "dim")
        _print(console, failure.script, "")
    if failure.log:
        _print(console, "  the end of that run:\n", "dim")
        _print(console, "\n".join(failure.log[-_MAX_LOG:]) + "\n", "")


def _print(console: Console, line: str, style: str) -> None:
    """Print a text without wrapping it, because scripts and paths are copied."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def show_releases(console: Console, report: UpgradeReport) -> None:
    """Print a row for each release, and a summary in one line."""
    title = escape(f"{report.target} in {report.engine}")
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("release", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name in ("seeds", "left out", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("first reason", overflow="fold")
    for result in report.results:
        runs = (result.report or {}).get("runs") or {}
        style = {"green": "green", "failed": "bold red", "a bug of kvview": "bold red"}
        table.add_row(
            result.release,
            f"[{style.get(result.verdict, 'yellow')}]{result.verdict}[/]",
            str(runs.get("num_seeds", "")),
            str(len(result.left_out) or "") if runs else "",
            f"{result.seconds:.0f}",
            escape(result.reason),
        )
    # Without a terminal (a file or CI), rows are wide enough for a sentence.
    console.print(table, width=None if console.is_terminal else max(console.width, _WIDTH))
    _print(console, report.summary(), "bold" if report.is_clean else "red")
