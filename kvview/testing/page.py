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
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em;
  color: #222; background: #fff }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2em }
h1, h2, td { overflow-wrap: anywhere }
table { border-collapse: collapse }
th, td { text-align: left; vertical-align: top; padding: .3em 1.2em .3em 0;
  border-bottom: 1px solid #e3e6ea }
th { font-weight: 600 } td:first-child, .number, .outcome { white-space: nowrap }
.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f4f5f7; padding: 1em; overflow-x: auto; font-size: 13px; line-height: 1.4 }
code { font-size: 13px } .note { color: #5a6169 } .bad { color: #b22222; font-weight: 600 }
.good { color: #2e7d32 } .expected { color: #9a5b00 }
svg { width: 100%; height: auto; margin: .5em 0 } summary { cursor: pointer; color: #5a6169 }
svg text { font: 13px system-ui, sans-serif; fill: #333 }
"""
_CLASSES = {
    Outcome.PASSED: "good",
    Outcome.FAILED: "bad",
    Outcome.SKIPPED: "note",
    Outcome.EXPECTED_FAILURE: "expected",
    Outcome.UNEXPECTED_PASS: "bad",
}


def write_checks_report(path: str | Path, report: Report) -> None:
    """Write a page about the checks of a pool, a manager or a transfer worker.

    Args:
        path: Of the page.
        report: What :func:`~kvview.testing.run_checks` found.

    Raises:
        ConfigError: The file cannot be written.
    """
    write_page(path, f"kvview check: {report.target}", _parts(report))


def write_page(path: str | Path, title: str, parts: Iterable[str]) -> None:
    """Write a page.

    Args:
        path: Of the page.
        title: Its title and first heading, as text.
        parts: What follows, as HTML.

    Raises:
        ConfigError: The file cannot be written.
    """
    # The empty icon keeps a browser from asking a server for one.
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style>'
    )
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
    try:
        # A lone surrogate, which a message may quote, must not cost the report.
        Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"report {str(path)!r}: {error.strerror}") from error


def make_table(names: Sequence[str], rows: Iterable[Sequence[str]], numbers: str = "") -> str:
    """A table as HTML.

    Args:
        names: Of its columns, as text.
        rows: Cells, as HTML.
        numbers: Name of the column that holds numbers.
    """

    def row(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="number"' if name == numbers else "" for name in names]
        filled = zip(kinds, cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in filled) + "</tr>"

    lines = [row("th", [escape(name) for name in names]), *(row("td", cells) for cells in rows)]
    return "<table>" + "\n".join(lines) + "</table>"


def _parts(report: Report) -> list[str]:
    num_failed = len(report.failures)
    failed = f"{num_failed} {'check' if num_failed == 1 else 'checks'} failed"
    verdict = failed if num_failed else "every law that was checked holds"
    if report.is_interrupted:
        verdict = f"interrupted after {len(report.results)} of {report.num_selected} checks"
        verdict += f", {failed}" if num_failed else ""
    counts = ", ".join(f"{times} {outcome}" for outcome, times in report.counts().items())
    seed = "derandomised" if report.seed is None else f"seed {report.seed}"
    seconds = sum(result.seconds for result in report)
    parts = [
        f'<p><b class="{"good" if report.is_clean else "bad"}">{escape(verdict)}</b>. '
        f"Contract {escape(report.contract)}: {escape(counts or 'nothing ran')}; "
        f"profile {escape(report.profile)}, {seed}, {seconds:.1f} s.</p>"
    ]
    if report.failures:
        parts.append("<h2>What failed</h2>")
    parts += [_failure(result) for result in report.failures]
    parts += ["<h2>Checks by law</h2>", _laws(report)]
    expected = [result for result in report if result.outcome is Outcome.EXPECTED_FAILURE]
    if expected:
        parts.append("<h2>Expected failures</h2>")
    parts += [_failure(result) for result in expected]
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
    return make_table(("law", "outcome", "seconds", "check"), rows, numbers="seconds")


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
    if failure.script:
        parts.append(f"<p>To see it again:</p>\n<pre>{escape(failure.script)}</pre>")
    return "\n".join(parts)


def _values(failure: LawBroken) -> str:
    rows = [(name, escape(getattr(failure, name))) for name in ("got", "expected")]
    cells = "".join(
        f"<tr><td>{name}</td><td><code>{value}</code></td></tr>" for name, value in rows
    )
    return f"<table>{cells}</table>"
