"""One self-contained HTML page about a run of checks: it needs no other file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from kvview.laws import titled
from kvview.testing.recorder import LawBroken
from kvview.testing.report import BAD, CheckResult, Outcome, Report
from kvview.urls import law_url
from kvview.web_page import facts, made_by, make_table, share_bar, wide, write_page

if TYPE_CHECKING:
    from kvview.testing.connector import ConnectorRuns, Snapshot

_MARKS = {  # a class of the style, and a sign: not by colour alone
    Outcome.PASSED: ("good", "✓"),
    Outcome.FAILED: ("bad", "✗"),
    Outcome.SKIPPED: ("note", "–"),
    Outcome.EXPECTED_FAILURE: ("expected", "≈"),
    Outcome.UNEXPECTED_PASS: ("bad", "✗"),
    Outcome.NOT_CHECKED: ("expected", "?"),
}
_MAX_SEEDS = 40


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
    expected = [one for one in report if one.outcome is Outcome.EXPECTED_FAILURE]
    parts = _head(report)
    if report.failures:
        parts += ["<h2>What failed</h2>", *_by_law(report.failures)]
    not_exercised = [*_by_law(report.not_checked), *_skips(report)]
    nothing = "<p>Nothing: all that must happen did.</p>" if report.results else "<p>Anything.</p>"
    parts += ["<h2>What was not exercised</h2>", *(not_exercised or [nothing])]
    if report.runs is not None:
        parts += _runs(report.runs, is_clean=not report.failures)
    if expected:
        parts += ["<h2>Expected failures</h2>", *_by_law(expected)]
    parts += ["<h2>Checks by law</h2>", _laws(report)]
    return parts + made_by(report.versions)


def _head(report: Report) -> list[str]:
    num_failed = len(report.failures)
    failed = f"{num_failed} {'check' if num_failed == 1 else 'checks'} failed"
    verdict = failed if num_failed else "every law that was checked holds"
    if not num_failed and not report.is_clean:
        verdict = "nothing is wrong, and not all was checked that must be"
    if report.is_interrupted:
        verdict = report.interruption()
        verdict += f", {failed}" if num_failed else ""
    kind, mark = ("good", "✓") if report.is_clean else ("bad", "✗")
    parts = [
        f'<p><b class="{kind}">{mark} {escape(verdict)}</b>. '
        f"Contract {escape(report.contract)}: {escape(report.outcome())}; "
        f"profile {escape(report.profile)}, {escape(report.effort())}, {report.seconds:.1f} s.</p>",
    ]
    if report.runs is not None:
        if report.runs.is_cut_short:
            parts.append(f"<p>{report.runs.progress()}.</p>")
        parts += [f"<p>{escape(note)}</p>" for note in report.runs.notes]
    return parts


# --- the checks ---


def _laws(report: Report) -> str:
    rows = []
    for law, results in groupby(report, lambda result: result.check.law):
        for number, result in enumerate(results):
            about = f"<code>{escape(result.check.name)}</code><br>{_prose(result.check.summary)}"
            if result.reason:
                about += f'<br><span class="note">{escape(result.reason)}</span>'
            kind, mark = _MARKS[result.outcome]
            outcome = f'<span class="outcome {kind}">{mark} {result.outcome.value}</span>'
            seconds = "" if result.outcome is Outcome.SKIPPED else f"{result.seconds:.2f}"
            shown = "" if number else f'<b class="law">{_link(law)}</b>'
            rows.append((shown, outcome, seconds, about))
    return wide(make_table(("law", "outcome", "seconds", "check"), rows, ["seconds"]))


def _link(law: str) -> str:
    url = law_url(law)
    return f'<a href="{escape(url)}">{escape(titled(law))}</a>' if url else escape(law)


def _prose(text: str) -> str:
    return re.sub("``(.+?)``", r"<code>\1</code>", escape(text))


def _skips(report: Report) -> list[str]:
    skipped = [one for one in report if one.outcome is Outcome.SKIPPED]
    by_reason: dict[str, list[str]] = {}
    for result in skipped:
        by_reason.setdefault(result.reason, []).append(result.check.law)
    rows = [
        (escape(reason), str(len(laws)), escape(", ".join(dict.fromkeys(laws))))
        for reason, laws in by_reason.items()
    ]
    parts = [wide(make_table(("why", "checks", "laws"), rows, ["checks"]))] if rows else []
    left_out = [] if report.runs is None else report.runs.left_out
    if left_out:
        items = "".join(f"<li>{escape(what)}</li>" for what in left_out)
        parts.append(f"<p>The engine cannot play, and left out:</p><ul>{items}</ul>")
    return parts


# --- broken laws ---


def _law_of(result: CheckResult) -> str:
    return result.failure.law if result.failure else result.check.law


def _by_law(results: Iterable[CheckResult]) -> list[str]:
    """A section a law: the first of its checks in full, the others to be opened."""
    laws: dict[str, list[CheckResult]] = {}
    for result in results:
        laws.setdefault(_law_of(result), []).append(result)
    return [_section(law, broken) for law, broken in laws.items()]


def _section(law: str, results: Sequence[CheckResult]) -> str:
    first, *others = results
    kind, mark = _MARKS[first.outcome]
    name = f"<code>{escape(first.check.name)}</code>"
    parts = [f'<h3><span class="{kind}">{mark} {_link(law)}</span> {name}</h3>', *_told(first)]
    for result in others:
        parts.append(f"<details><summary>also {escape(result.check.name)}</summary>")
        parts += [*_told(result), "</details>"]
    style = "" if first.outcome in BAD else ' class="expected"'
    return f"<section{style}>" + "\n".join(parts) + "</section>"


def _told(result: CheckResult) -> list[str]:
    failure = result.failure
    if failure is None:
        return [f"<p>It passed, and was expected to fail: {escape(result.reason)}</p>"]
    parts = [f'<p class="note">{escape(result.reason)}</p>'] if result.reason else []
    parts += [f"<p>{escape(failure.what)}</p>", _values(failure)]
    if failure.timeline:
        parts.append(_picture(failure.timeline, "a law is broken here"))
    if failure.script:
        parts.append(f"<p>To see it again:</p>\n<pre>{escape(failure.script)}</pre>")
    return parts


def _picture(timeline: Sequence[Snapshot], told_at_the_end: str = "") -> str:
    from kvview.testing.connector.timeline import timeline_svg, timeline_table

    table = wide(make_table(*timeline_table(timeline)))
    summary = "<summary>The same in numbers</summary>"
    return f"{timeline_svg(timeline, told_at_the_end)}\n<details>{summary}{table}</details>"


def _values(failure: LawBroken) -> str:
    rows = [("got", failure.got), ("expected", failure.expected)]
    if failure.seeds:
        more = len(failure.seeds) - _MAX_SEEDS
        seeds = ", ".join(map(str, failure.seeds[:_MAX_SEEDS]))
        rows.append(("seeds", seeds + (f" and {more} more" if more > 0 else "")))
    return facts(rows)


# --- simulated runs ---


def _runs(runs: ConnectorRuns, is_clean: bool) -> list[str]:
    from kvview.testing.connector.coverage import is_cell, rates_of, table_of_cells

    parts = []
    if runs.typical and is_clean:
        parts += ["<h2>A typical run</h2>", _picture(runs.typical)]
    if rates := rates_of(runs.coverage):
        rows = [(escape(name), share_bar(share)) for name, share in rates]
        parts += ["<h2>Hit rates</h2>", wide(make_table(("of what", "share"), rows))]
    head, *cells = table_of_cells(runs.coverage)
    if cells:
        parts += [
            "<h2>Coverage: how loads ended</h2>",
            "<p>By the KV-cache groups. Hatched: it never happened.</p>",
            wide(make_table(head, [_cells(row) for row in cells], head[1:])),
        ]
    if runs.num_statements:
        parts += _code(runs)
    rows = [
        (escape(n), f"{times:,}") for n, times in sorted(runs.coverage.items()) if not is_cell(n)
    ]
    table = make_table(("what", "times"), rows, ["times"])
    return [*parts, "<h2>What the runs did</h2>", wide(table)]


def _code(runs: ConnectorRuns) -> list[str]:
    num_unrun = sum(one.num_statements for one in runs.unrun)
    ran = f"{runs.num_statements - num_unrun} of {runs.num_statements} statements ran"
    rows = [
        (
            f"<code>{escape(one.place)}</code>",
            f"<code>{escape(one.source)}</code><br>in {escape(one.function)}",
            "yes" if one.is_judged else "no: a branch, or for errors, a GPU, logs or no caller",
        )
        for one in runs.unrun
    ]
    table = [wide(make_table(("never ran", "statement", "must run"), rows))] if rows else []
    return ["<h2>Code of the connector</h2>", f"<p>{ran}.</p>", *table]


def _cells(row: Sequence[str]) -> list[str]:
    name, *numbers = map(escape, row)
    name = f'<span class="law">{name}</span>'
    return [name, *(f'<span class="never">{n}</span>' if n == "0" else n for n in numbers)]
