"""The output of ``kvview check`` on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from kvview.laws import titled
from kvview.testing.results.law_broken import COVERAGE, NotExercised
from kvview.testing.results.report import CheckResult, Outcome, Report
from kvview.urls import law_url

if TYPE_CHECKING:
    from kvview.testing.connector import ConnectorRuns

_MAX_SEEDS = 20
_MAX_GAPS = 12
_MAX_LOG = 20


def show_report(console: Console, report: Report) -> None:
    """Print a report: the verdict in one line, its reasons, and the checks that did not pass."""
    style = "green" if report.is_clean else "bold red" if report.failures else "yellow"
    print_line(console, report.verdict(), style)
    print_line(console, report.summary(), "")
    if report.runs is not None and report.runs.is_cut_short and not report.is_interrupted:
        print_line(console, "the first failure ends the runs; --keep-going plays all seeds", "")
    for note in () if report.runs is None else report.runs.notes:
        print_line(console, note, "yellow")
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
        print_line(console, f"  {gap}", "")
    if len(gaps) > _MAX_GAPS:
        more = len(gaps) - _MAX_GAPS
        print_line(console, f"  and {more} more, listed by --json", "")
    print_line(console, f"what to do: {law_url(COVERAGE)}", "yellow")


def _show_runs(console: Console, runs: ConnectorRuns) -> None:
    """Print the parts that were not simulated, and the share of the author's code that ran."""
    if runs.left_out:
        print_line(console, f"not simulated: {'; '.join(runs.left_out)}", "dim")
    if runs.num_statements:
        unrun = sum(one.num_statements for one in runs.unrun)
        text = f"code: {runs.num_statements - unrun} of {runs.num_statements} statements ran"
        others = (one for one in runs.unrun if not one.is_judged)
        if listed := [one.place for one in others]:
            text += f"; places that never ran (errors, GPU, logs or no caller): {', '.join(listed)}"
        print_line(console, text, "dim")


def _show_checks(console: Console, report: Report) -> None:
    """Print the checks that neither passed nor failed; skipped checks are grouped by reason."""
    skipped: dict[str, int] = {}
    for result in report:
        if result.outcome is Outcome.SKIPPED:
            skipped[result.reason] = skipped.get(result.reason, 0) + 1
        elif result.outcome is Outcome.EXPECTED_FAILURE:
            text = f"{result.outcome}: {result.full_name}: {result.reason} {result.link}".rstrip()
            print_line(console, text, "yellow")
    for reason, number in skipped.items():
        print_line(console, f"skipped: {number} checks: {reason}", "dim")


def _show_failure(console: Console, result: CheckResult, *, is_in_the_verdict: bool) -> None:
    failure = result.failure
    console.print()
    if failure is None:
        text = f"{result.full_name} passed, but is expected to fail: {result.reason}"
        print_line(console, text, "bold red")
        return
    text = f"{titled(failure.law)} ({result.full_name})"
    print_line(console, text if is_in_the_verdict else f"{text}: {failure.what}", "bold red")
    rows = [("got", failure.got), ("expected", failure.expected), ("law", failure.law_url)]
    rows.append(("try", failure.hint))
    if failure.seeds:
        shown = ", ".join(map(str, failure.seeds[:_MAX_SEEDS]))
        more = len(failure.seeds) - _MAX_SEEDS
        rows.append(("seeds", shown + (f" and {more} more" if more > 0 else "")))
    for name, value in rows:
        if value:
            print_line(console, f"  {name + ':':<9} {value}", "")
    if failure.script:
        print_line(console, "  to reproduce:\n", "dim")
        print_line(console, failure.script, "")
    if failure.log:
        print_line(console, "  the end of that run:\n", "dim")
        print_line(console, "\n".join(failure.log[-_MAX_LOG:]) + "\n", "")


def print_line(console: Console, line: str, style: str) -> None:
    """Print a text without wrapping it, because scripts and paths are copied."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
