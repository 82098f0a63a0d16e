"""One self-contained HTML page about a run of checks: it needs no other file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from kvview.errors import ConfigError
from kvview.testing.recorder import LawBroken
from kvview.testing.report import BAD, CheckResult, Outcome, Report

_STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --rule: #e3e6ea; --code: #f4f5f7;
  --note: #5a6169; --bad: #b22222; --good: #2e7d32; --expected: #9a5b00; --axis: #333;
  --engine: #4e79a7; --held: #f28e2b; --free: #d7dde3; --hatch: #7a4300 }
@media (prefers-color-scheme: dark) { :root { --text: #e4e6e8; --page: #17191c; --rule: #3a3f45;
  --code: #22262b; --note: #a3abb3; --bad: #ff8a80; --good: #81c784; --expected: #ffb74d;
  --axis: #c3c8cd; --engine: #7ea6d0; --held: #c8741c; --free: #454c54; --hatch: #ffdcb3 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em;
  color: var(--text); background: var(--page) }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2em }
h1, h2, td { overflow-wrap: anywhere }
table { border-collapse: collapse }
th, td { text-align: left; vertical-align: top; padding: .3em 1.2em .3em 0;
  border-bottom: 1px solid var(--rule) }
th { font-weight: 600 } td:first-child, .number, .outcome { white-space: nowrap }
.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: var(--code); padding: 1em; overflow-x: auto; font-size: 13px; line-height: 1.4 }
code { font-size: 13px } .note { color: var(--note) } .good { color: var(--good) }
.bad { color: var(--bad); font-weight: 600 } .expected { color: var(--expected) }
svg { width: 100%; height: auto; margin: .5em 0 } summary { cursor: pointer; color: var(--note) }
svg text { font: 13px system-ui, sans-serif; fill: var(--axis) }
svg .told { fill: var(--bad) } .axis { fill: none; stroke: var(--axis) }
.engine { fill: var(--engine) } .held { fill: var(--held) } .free { fill: var(--free) }
.hatch { fill: none; stroke: var(--hatch); stroke-width: 1.2 }
.halo { fill: none; stroke: var(--page); stroke-width: 5 }
.jobs { fill: none; stroke: var(--bad); stroke-width: 2.5 }
.broken { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 4 3 }
"""
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
    title = f"kvview check: {report.target}"
    # The empty icon keeps a browser from asking a server for one.
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style>'
    )
    body = "\n".join([f"<h1>{escape(title)}</h1>", *_parts(report)])
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
    try:
        # A lone surrogate, which a message may quote, must not cost the report.
        Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"report {str(path)!r}: {error.strerror}") from error


def _make_table(
    names: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()
) -> str:
    """A table as HTML.

    Args:
        names: Of its columns, as text.
        rows: Cells, as HTML.
        numbers: Names of the columns that hold numbers.
    """

    def row(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="number"' if name in numbers else "" for name in names]
        filled = zip(kinds, cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in filled) + "</tr>"

    lines = [row("th", [escape(name) for name in names]), *(row("td", cells) for cells in rows)]
    return "<table>" + "\n".join(lines) + "</table>"


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
        table = _make_table(("what", "times"), rows, ["times"])
        head, *cells = table_of_cells(coverage)
        parts += ["<h2>What the runs did</h2>", table, _make_table(head, cells, head[1:])]
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
    return _make_table(("law", "outcome", "seconds", "check"), rows, ["seconds"])


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

    table = _make_table(*timeline_table(failure.timeline))
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
