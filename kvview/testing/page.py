"""One self-contained HTML page about a run of checks: it needs no other file."""

from __future__ import annotations

import re
from html import escape
from itertools import groupby
from pathlib import Path

from kvview.testing.recorder import LawBroken
from kvview.testing.report import BAD, CheckResult, Outcome, Report
from kvview.web_page import make_table, write_page

_CLASSES = {
    Outcome.PASSED: "good",
    Outcome.FAILED: "bad",
    Outcome.SKIPPED: "note",
    Outcome.EXPECTED_FAILURE: "expected",
    Outcome.UNEXPECTED_PASS: "bad",
    Outcome.NOT_CHECKED: "expected",
}


def write_report(path: str | Path, report: Report) -> None:
    """Write a page about a run of checks, whatever their contract.

    Args:
        path: Of the page.
        report: What :func:`~kvview.testing.run_checks` found.

    Raises:
        ConfigError: The file cannot be written.
    """
    write_page("report", path, f"kvview check: {report.target}", _parts(report))


def _parts(report: Report) -> list[str]:
    num_failed = len(report.failures)
    failed = f"{num_failed} {'check' if num_failed == 1 else 'checks'} failed"
    verdict = failed if num_failed else "every law that was checked holds"
    if report.not_checked and not num_failed:
        verdict = "nothing is wrong, and not all was checked that must be"
    if report.is_interrupted:
        verdict = f"interrupted after {len(report.results)} of {report.num_selected} checks"
        verdict += f", {failed}" if num_failed else ""
    counts = ", ".join(f"{times} {outcome}" for outcome, times in report.counts().items())
    parts = [
        f'<p><b class="{"good" if report.is_clean else "bad"}">{escape(verdict)}</b>. '
        f"Contract {escape(report.contract)}: {escape(counts or 'nothing ran')}; "
        f"profile {escape(report.profile)}, {escape(report.effort())}, {report.seconds:.1f} s.</p>"
    ]
    if report.runs is not None:
        parts += [f"<p>{escape(note)}</p>" for note in report.runs.notes]
    if report.failures:
        parts.append("<h2>What failed</h2>")
    parts += [_failure(result) for result in report.failures]
    if report.not_checked:
        parts.append("<h2>What was not exercised</h2>")
    parts += [_failure(result) for result in report.not_checked]
    parts += ["<h2>Checks by law</h2>", _laws(report)]
    expected = [result for result in report if result.outcome is Outcome.EXPECTED_FAILURE]
    if expected:
        parts.append("<h2>Expected failures</h2>")
    parts += [_failure(result) for result in expected]
    if report.runs is not None:
        from kvview.testing.connector.coverage import is_cell, table_of_cells

        coverage = report.runs.coverage
        rows = [
            (escape(n), f"{times:,}") for n, times in sorted(coverage.items()) if not is_cell(n)
        ]
        table = make_table(("what", "times"), rows, ["times"])
        head, *cells = table_of_cells(coverage)
        parts += ["<h2>What the runs did</h2>", table, make_table(head, cells, head[1:])]
    return parts


def _laws(report: Report) -> str:
    rows = []
    for law, results in groupby(report, lambda result: result.check.law):
        for number, result in enumerate(results):
            about = f"<code>{escape(result.check.name)}</code><br>{_prose(result.check.summary)}"
            if result.reason:
                about += f'<br><span class="note">{escape(result.reason)}</span>'
            outcome = (
                f'<span class="outcome {_CLASSES[result.outcome]}">{result.outcome.value}</span>'
            )
            seconds = "" if result.outcome is Outcome.SKIPPED else f"{result.seconds:.2f}"
            rows.append(("" if number else f"<b>{escape(law)}</b>", outcome, seconds, about))
    return make_table(("law", "outcome", "seconds", "check"), rows, ["seconds"])


def _prose(text: str) -> str:
    return re.sub("``(.+?)``", r"<code>\1</code>", escape(text))


def _failure(result: CheckResult) -> str:
    failure = result.failure
    kind = "bad" if result.outcome in BAD else "expected"
    law = failure.law if failure else result.check.law
    parts = [f'<h3><span class="{kind}">{escape(law)}</span> {escape(result.check.name)}</h3>']
    if failure is None:
        parts.append(f"<p>It passed, and was expected to fail: {escape(result.reason)}</p>")
        return "\n".join(parts)
    if result.reason:
        parts.append(f'<p class="note">{escape(result.reason)}</p>')
    parts += [f"<p>{escape(failure.what)}</p>", _values(failure)]
    if failure.timeline:
        parts.append(_picture(failure))
    if failure.script:
        parts.append(f"<p>To see it again:</p>\n<pre>{escape(failure.script)}</pre>")
    return "\n".join(parts)


def _picture(failure: LawBroken) -> str:
    from kvview.testing.connector.timeline import timeline_svg, timeline_table

    table = make_table(*timeline_table(failure.timeline))
    summary = "<summary>The same in numbers</summary>"
    return f"{timeline_svg(failure.timeline)}\n<details>{summary}{table}</details>"


def _values(failure: LawBroken) -> str:
    rows = [(name, escape(getattr(failure, name))) for name in ("got", "expected")]
    if failure.seeds:
        rows.append(("seeds", escape(", ".join(map(str, failure.seeds)))))
    cells = "".join(
        f"<tr><td>{name}</td><td><code>{value}</code></td></tr>" for name, value in rows
    )
    return f"<table>{cells}</table>"
