"""``kvview check TARGET --vllm RELEASE ...``: the part of the command that is about releases."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import click
from rich.control import Control
from rich.markup import escape
from rich.segment import ControlType
from rich.table import Table

from kvview.cli.console import Console
from kvview.cli.exit_codes import ExitCode
from kvview.errors import ConfigError, KVViewError
from kvview.testing.upgrade import (
    ReleaseResult,
    Releases,
    UpgradeReport,
    Verdict,
    check_releases,
    load_releases,
)

SEEDS = 100
"""Of a release, unless the user says otherwise: all minors of vLLM then take a coffee break."""

_WIDTH = 120
_OVER_THE_STATUS = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
_OURS = ("target", "vllm", "against", "engine", "json_file")
_STYLES = {Verdict.GREEN: "green", Verdict.FAILED: "bold red", Verdict.BUG: "bold red"}
_CODES = {
    Verdict.FAILED: ExitCode.WRONG,
    Verdict.BUG: ExitCode.BUG,
    Verdict.INTERRUPTED: ExitCode.INTERRUPTED,
    Verdict.COULD_NOT_RUN: ExitCode.COULD_NOT_RUN,
    Verdict.NOT_CHECKED: ExitCode.NOT_CHECKED,
}
"""Of all releases the first of these that occurs."""


def check_in_releases(
    target: str,
    engine: str,
    names: Sequence[str],
    against: str | None,
    console: Console,
    on_progress: Callable[[str], None],
) -> UpgradeReport:
    """Check a target in several releases; report the changes and the outcome of each.

    Args:
        target: As for ``kvview check``.
        engine: Whose releases.
        names: Of the releases, as the user named them.
        against: A release to compare with, if given.
        console: Where to print.
        on_progress: Called with the progress.

    Raises:
        ConfigError: An option is not for many releases.
        KVViewError: No such release, or no source to compare.
    """
    start = time.monotonic()
    options = _options_of_each(click.get_current_context(), engine)
    releases = load_releases(engine)
    wanted = releases.resolve(names)
    report = UpgradeReport(target, engine)
    if against is not None:
        if len(named := releases.resolve([against])) != 1:
            raise ConfigError(f"--against takes one release, not {against!r}")
        report.against = named[0]
        _compare(report, releases, wanted, on_progress)
        _show_changes(console, report)
    num_done = 0

    def tell(result: ReleaseResult) -> None:
        nonlocal num_done
        num_done += 1
        line = f"{engine} {result.release}: {result.verdict}, {result.seconds:.0f} s"
        console.control(_OVER_THE_STATUS)
        console.print(f"{line} ({num_done} of {len(wanted)})", markup=False, highlight=False)

    report.results = check_releases(
        target,
        engine,
        releases,
        wanted,
        options,
        on_progress=lambda release, text: on_progress(f"{engine} {release}: {text}"),
        on_result=tell,
    )
    report.seconds = time.monotonic() - start
    return report


def exit_code(report: UpgradeReport) -> ExitCode:
    """0 if all are green; otherwise the worst exit code."""
    found = {result.verdict for result in report.results}
    return next((code for verdict, code in _CODES.items() if verdict in found), ExitCode.CLEAN)


def _options_of_each(context: click.Context, engine: str) -> list[str]:
    """Return the user's arguments for each process, without those about all releases."""
    if context.params["engine"] not in (None, engine):
        raise ConfigError(f"--{engine} runs that engine, and not {context.params['engine']!r}")
    if context.params["page_file"] is not None:
        raise ConfigError(f"--html is for one release: leave out --{engine}, or --html")
    options = []
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        if name in _OURS or name not in context.params:
            continue
        if source in (click.core.ParameterSource.DEFAULT, None):
            continue
        value = context.params[name]
        if isinstance(option, click.Option) and option.is_flag:
            options += option.opts[:1] if value else option.secondary_opts[:1]
        else:
            several = value if isinstance(value, tuple) else (value,)
            options += [f"{option.opts[0]}={each}" for each in several]
    if context.params["seeds"] is None and context.params["profile"] == "ci":
        options.append(f"--seeds={SEEDS}")
    return options


def _compare(
    report: UpgradeReport,
    releases: Releases,
    wanted: Sequence[str],
    on_progress: Callable[[str], None],
) -> None:
    assert report.against is not None, "there is something to compare with"
    old = releases.fetch(report.against, on_progress)
    for release in wanted:
        if release == report.against:
            continue
        try:
            new = releases.fetch(release, on_progress)
        except KVViewError:  # its row reports it
            continue
        report.changes[release] = releases.changes(report.target, old, new)


def _show_changes(console: Console, report: UpgradeReport) -> None:
    console.control(_OVER_THE_STATUS)
    for release, changes in report.changes.items():
        title = f"changed from {report.against} to {release}, of what {report.target} uses"
        if not changes:
            console.print(f"{title}: nothing", markup=False, soft_wrap=True)
            continue
        table = Table(title=escape(title), title_justify="left", box=None)
        for name in ("", "what", "change", "where"):
            table.add_column(name, overflow="fold")
        for change in sorted(changes, key=lambda change: not change.breaks):
            table.add_row(
                "[bold red]breaks[/]" if change.breaks else "look",
                escape(f"{change.owner}.{change.name}"),
                escape(change.told),
                escape(change.where),
            )
        _print(console, table)


def _print(console: Console, table: Table) -> None:
    """Return a console; without a terminal (a file or CI) wide enough for a sentence per row."""
    if not console.is_terminal and console.width < _WIDTH:
        console = Console(file=console.file, width=_WIDTH, markup=True)
    console.print(table)


def show_results(console: Console, report: UpgradeReport) -> None:
    """A row a release, and one line at the end."""
    title = escape(f"{report.target} in {report.engine}")
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("release", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name in ("seeds", "left out", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("first reason", overflow="fold")
    for result in report.results:
        runs = (result.report or {}).get("runs") or {}
        table.add_row(
            result.release,
            f"[{_STYLES.get(result.verdict, 'yellow')}]{result.verdict}[/]",
            str(runs.get("num_seeds", "")),
            str(len(result.left_out) or "") if runs else "",
            f"{result.seconds:.0f}",
            escape(result.reason),
        )
    _print(console, table)
    style = "bold" if report.is_clean else "red"
    console.print(report.summary(), style=style, markup=False, soft_wrap=True)
