"""The output of ``kvview check`` for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvview.laws import titled
from kvview.testing.connector_checks import COVERAGE
from kvview.testing.mutants import MutantResult
from kvview.testing.report import CheckResult, Outcome, Report
from kvview.urls import law_url

_STYLES = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.SKIPPED: "dim",
    Outcome.EXPECTED_FAILURE: "yellow",
    Outcome.UNEXPECTED_PASS: "bold red",
    Outcome.NOT_CHECKED: "yellow",
}
_MAX_SEEDS = 20


def show_report(console: Console, report: Report) -> None:
    """Print a report: coverage of the runs, checks by law, failures, verdict."""
    if report.runs is not None and not report.failures:
        _show_coverage(console, report)
    _show_checks(console, report)
    for result in report.failures:
        _show_failure(console, result)
    for result in report.not_checked:
        assert result.failure is not None, "what is not checked says what"
        _tell(console, f"not checked: {result.failure.what}", "yellow")
    if report.not_checked:
        _tell(console, f"what to do: {law_url(COVERAGE)}", "yellow")
    for note in report.runs.notes if report.runs else ():
        _tell(console, note, "yellow")
    _tell(console, report.summary(), "red" if report.failures else "bold")
    if report.runs is not None and report.runs.is_cut_short and not report.is_interrupted:
        _tell(console, "the first failure ends the runs; --keep-going plays all seeds", "")


def _show_coverage(console: Console, report: Report) -> None:
    assert report.runs is not None, "only a connector has runs"
    from kvview.testing.connector.coverage import is_cell, table_of_cells

    table = Table(title="what its runs did", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, times in sorted(report.runs.coverage.items()):
        if not is_cell(name):
            table.add_row(escape(str(name)), f"{times:,}")
    console.print(table)
    head, *rows = table_of_cells(report.runs.coverage)
    title = "loads, by the groups and how they ended"
    # Ten columns fit into 80: one space between them, heads of one word a line.
    cells = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(head):
        words = [name] if not index else name.replace(",", "").split()
        cells.add_column("\n".join(words), justify="right" if index else "left", no_wrap=True)
    for row in rows:
        cells.add_row(*row)
    if rows:
        console.print(cells)


def _show_checks(console: Console, report: Report) -> None:
    title = f"{report.contract} checks of {report.target}"
    table = Table(title=escape(title), title_justify="left", box=None)
    for name in ("law", "outcome", "seconds", "check"):
        table.add_column(name, justify="right" if name == "seconds" else "left", overflow="fold")
    law = ""
    for result in report:
        shown = "" if result.check.law == law else titled(result.check.law)
        law = result.check.law
        outcome = f"[{_STYLES[result.outcome]}]{result.outcome.value}"
        name = result.check.name + (f": {result.reason}" if result.reason else "")
        table.add_row(shown, outcome, f"{result.seconds:.2f}", escape(name))
    console.print(table)


def _show_failure(console: Console, result: CheckResult) -> None:
    failure = result.failure
    console.print()
    if failure is None:
        name = escape(result.check.name)
        console.print(f"[bold red]{name} passed[/], expected: {escape(result.reason)}")
        return
    console.print(f"[bold red]{titled(failure.law)}[/] ({escape(result.check.name)}): ", end="")
    console.print(failure.what, markup=False, highlight=False, soft_wrap=True)
    console.print(f"  got:      {failure.got}", markup=False, highlight=False)
    console.print(f"  expected: {failure.expected}", markup=False, highlight=False)
    console.print(f"  law:      {failure.law_url}", markup=False, highlight=False, soft_wrap=True)
    if failure.seeds:
        shown = ", ".join(map(str, failure.seeds[:_MAX_SEEDS]))
        more = len(failure.seeds) - _MAX_SEEDS
        shown += f" and {more} more" if more > 0 else ""
        console.print(f"  seeds:    {shown}", markup=False, highlight=False)
    if failure.script:
        console.print("  to see it again:\n", style="dim")
        # Never broken: it is to be pasted.
        console.print(failure.script, markup=False, highlight=False, soft_wrap=True)


def _tell(console: Console, line: str, style: str) -> None:
    console.print(line, style=style, markup=False, soft_wrap=True)


def show_mutants(console: Console, results: Sequence[MutantResult]) -> None:
    """Print which planted faults died."""
    table = Table(title="planted faults", title_justify="left", box=None)
    for name in ("law", "mutant", "killed by", "incident"):
        table.add_column(name, overflow="fold")
    for result in results:
        mutant = result.mutant
        end = "[bold red]SURVIVED[/]" if result.broken is None else result.broken.law
        name = escape(f"{mutant.name}\n  {mutant.what}")
        table.add_row(mutant.law, name, end, mutant.incident or "")
    console.print(table)
    killed = sum(result.is_killed for result in results)
    incidents = len({result.mutant.incident for result in results} - {None})
    named = sum(result.is_named for result in results)
    told = f"{killed} of {len(results)} planted faults killed; {incidents} incidents; "
    told += f"{named} for their own law"
    console.print(told, soft_wrap=True)


def show_automatic_mutants(console: Console, automatic: Mapping[str, Any]) -> None:
    """Print how many automatic mutants died, and who lives without a reason."""
    unexplained = automatic["unexplained"]
    num, num_killed = len(automatic["mutants"]), automatic["num_killed"]
    console.print(
        f"{num_killed} of {num} automatic mutants killed, {num_killed / num:.0%}; "
        f"{num - num_killed - len(unexplained)} live with a reason, "
        f"{len(unexplained)} survivors without a reason",
        soft_wrap=True,
    )
    for name in unexplained:
        console.print(f"  {name}", style="red", markup=False, soft_wrap=True)
