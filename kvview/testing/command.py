"""``kvview check``: the conformance kit without pytest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import naming, require_writable, write_json
from kvview.connector import Connector
from kvview.errors import ConfigError
from kvview.targets import is_connector, load_connector

if TYPE_CHECKING:
    from kvview.testing import CheckResult, MutantResult, Report
    from kvview.testing.connector import ConnectorReport

DEFAULT_SEEDS = 200
DEFAULT_MUTANTS = 40
_STYLES = {
    "passed": "green",
    "failed": "bold red",
    "skipped": "dim",
    "expected failure": "yellow",
    "unexpected pass": "bold red",
}


@click.command()
@click.argument("target", required=False)
@click.option(
    "--profile",
    default="ci",
    show_default=True,
    help="ci: the same every time, under a minute. soak: random, much longer.",
)
@click.option(
    "--select",
    multiple=True,
    metavar="NAME",
    help="Only this check or law ('check_pool_7_*', 'POOL-7'). Repeatable.",
)
@click.option(
    "--expected-failures",
    "expected_failures_file",
    metavar="FILE",
    help="Lines of 'check_name: reason'; one that passes is reported.",
)
@click.option("--seed", type=int, help="Of everything random; of a connector, the first.")
@click.option(
    "--seeds",
    type=int,
    default=DEFAULT_SEEDS,
    show_default=True,
    help="Simulated runs of a connector.",
)
@click.option(
    "--engine",
    metavar="NAME",
    default="reference",
    show_default=True,
    help="What runs a connector: vllm is the installed vLLM's own scheduler, without a GPU.",
)
@click.option(
    "--json", "json_file", metavar="FILE", help="Write the report there ('-' for stdout)."
)
@click.option("--report", "page_file", metavar="FILE.html", help="Write a page for people there.")
@click.option(
    "--self-test",
    is_flag=True,
    help="Check the checks: planted faults and automatic mutants must die.",
)
@click.option(
    "--mutants",
    "num_mutants",
    default=DEFAULT_MUTANTS,
    show_default=True,
    help="Automatic mutants that --self-test plays, drawn with --seed.",
)
def check(
    target: str | None,
    profile: str,
    select: tuple[str, ...],
    expected_failures_file: str | None,
    seed: int | None,
    seeds: int,
    engine: str,
    json_file: str | None,
    page_file: str | None,
    self_test: bool,
    num_mutants: int,
) -> None:
    """Check an implementation against the laws of its contract.

    TARGET is package.module:factory or path/to/file.py:factory, where the factory
    makes a harness over a pool view, a coordinator, an offloading manager or a
    transfer worker; or a connector class, which is run in an engine under faults.
    """
    console = Console(stderr=json_file == "-")  # stdout is the report's alone then
    require_writable("--json", json_file)
    require_writable("--report", page_file)
    if self_test:
        if page_file is not None:
            raise ConfigError("--report is for a TARGET: --self-test has no page")
        if target is not None:
            raise ConfigError("--self-test takes no TARGET: it brings its own")
        _finish(*_self_test(console, num_mutants, seed or 0), json_file)
    if target is None:
        raise ConfigError("give a TARGET, package.module:factory, or --self-test")
    from kvview.testing import load_target, read_expected_failures, run_checks

    subject = load_target(target)
    if is_connector(subject):
        connector = load_connector(target)
        found = _check_connector(console, connector, target, seed or 0, seeds, engine, page_file)
        _finish(*found, json_file)
    if engine != "reference":
        raise ConfigError(f"--engine is for a connector, and target {target!r} is none")
    expected = (
        {} if expected_failures_file is None else read_expected_failures(expected_failures_file)
    )
    with _status(f"checking {target}") as on_progress:
        report = run_checks(
            subject,
            expected_failures=expected,
            profile=profile,
            select=select,
            seed=seed,
            target=target,
            on_result=lambda result: on_progress(result.check.name),
        )
    _show(console, report)
    if page_file is not None:
        from kvview.testing.page import write_checks_report

        write_checks_report(page_file, report)
    _finish(_verdict(bool(report.failures), report.is_interrupted), report.to_dict(), json_file)


def _verdict(has_failures: bool, is_interrupted: bool) -> ExitCode:
    if has_failures:
        return ExitCode.WRONG
    return ExitCode.INTERRUPTED if is_interrupted else ExitCode.CLEAN


def _finish(code: ExitCode, report: dict[str, Any], json_file: str | None) -> None:
    write_json(json_file, report)
    sys.exit(code)


@contextmanager
def _status(title: str) -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True)
    if not console.is_terminal:  # it would write empty lines
        yield lambda text: None
        return
    with console.status(title) as status:
        yield lambda text: status.update(f"{title}: {text}")


def _check_connector(
    console: Console,
    connector_class: type[Connector],
    target: str,
    first_seed: int,
    seeds: int,
    engine: str,
    page_file: str | None,
) -> tuple[ExitCode, dict[str, Any]]:
    try:
        from kvview.testing.connector import check_connector, load_engines
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"target {target!r} is a connector, and checking one needs {error.name}: "
            "it is not installed"
        ) from error
    if seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, got {seeds}")
    engines = load_engines(engine)
    with naming(target), _status(f"simulating {target}") as on_progress:
        report = check_connector(
            connector_class,
            seeds=seeds,
            first_seed=first_seed,
            on_progress=lambda done, failed: on_progress(f"{done} seeds, {failed} failed"),
            engines=engines,
        )
    _show_connector(console, report, target)
    if page_file is not None:
        from kvview.testing.connector.page import write_report

        write_report(page_file, report)
    failures = [
        {"seed": one.seed, "law": one.law, "message": one.message, "script": one.script}
        for one in report.failures
    ]
    told = {
        "target": target,
        "contract": "connector",
        "engine": engines.name,
        "is_clean": report.is_clean,
        "is_interrupted": report.is_interrupted,
        "not_exercised": list(report.not_exercised),
        "first_seed": report.first_seed,
        "num_seeds": report.num_seeds,
        "seconds": round(report.seconds, 3),
        "coverage": dict(report.coverage),
        "failures": failures,
    }
    code = _verdict(bool(failures), report.is_interrupted)
    if code is ExitCode.CLEAN and report.not_exercised:
        code = ExitCode.NOT_CHECKED
    return code, told


# --- what a person sees ---


def _show(console: Console, report: Report) -> None:
    title = f"{report.contract} checks of {report.target}"
    table = Table(title=title, title_justify="left", box=None)
    for name in ("law", "outcome", "seconds", "check"):
        table.add_column(name, justify="right" if name == "seconds" else "left", overflow="fold")
    law = ""
    for result in report:
        shown = "" if result.check.law == law else result.check.law
        law = result.check.law
        outcome = f"[{_STYLES[result.outcome.value]}]{result.outcome.value}"
        name = result.check.name + (f": {result.reason}" if result.reason else "")
        table.add_row(shown, outcome, f"{result.seconds:.2f}", escape(name))
    console.print(table)
    for result in report.failures:
        _show_failure(console, result)
    style = "red" if report.failures else "bold"
    console.print(report.summary(), style=style, markup=False, soft_wrap=True)


def _show_failure(console: Console, result: CheckResult) -> None:
    failure = result.failure
    console.print()
    if failure is None:
        console.print(f"[bold red]{result.check.name} passed[/], expected: {escape(result.reason)}")
        return
    console.print(f"[bold red]{failure.law}[/] {result.check.name}: {escape(failure.what)}")
    console.print(f"  got:      {failure.got}", markup=False, highlight=False)
    console.print(f"  expected: {failure.expected}", markup=False, highlight=False)
    if failure.script:
        console.print("  to see it again:\n", style="dim")
        _paste(console, failure.script)


def _show_connector(console: Console, report: ConnectorReport, target: str) -> None:
    table = Table(title=f"simulated runs of {target}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, times in sorted(report.coverage.items()):
        table.add_row(escape(str(name)), f"{times:,}")
    console.print(table)
    for failure in report.failures:
        console.print(f"[bold red]{escape(failure.law)}[/] seed {failure.seed}: ", end="")
        console.print(failure.message, markup=False, highlight=False)
    if report.failures:
        console.print("\nto see the first again:\n", style="dim")
        _paste(console, report.failures[0].script)
    for line in report.not_exercised:
        console.print(f"not checked: {line}", style="yellow", markup=False, soft_wrap=True)
    last = report.first_seed + report.num_seeds - 1
    console.print(
        f"{target}: {report.num_seeds} seeds ({report.first_seed} to {last}), "
        f"{len(report.failures)} failed, {report.seconds:.1f} s"
        + ("; interrupted" if report.is_interrupted else ""),
        markup=False,
        soft_wrap=True,
        style="red" if report.failures else "bold",
    )


def _paste(console: Console, script: str) -> None:
    console.print(script, markup=False, highlight=False, soft_wrap=True)  # never broken


def _self_test(console: Console, num_mutants: int, seed: int) -> tuple[ExitCode, dict[str, Any]]:
    from kvview.testing.mutants import load_mutants, run_automatic_mutants, run_mutants

    mutants = load_mutants()
    automatic: dict[str, Any] = {"mutants": [], "num_killed": 0, "unexplained": []}
    if num_mutants:  # before anything starts a thread: they are forked
        with _status(f"running {num_mutants} automatic mutants") as on_progress:
            automatic = run_automatic_mutants(num_mutants, seed, on_progress)
    with _status(f"running {len(mutants)} planted faults") as on_progress:
        results = run_mutants(mutants, lambda result: on_progress(result.mutant.name))
    _show_mutants(console, results)
    rows = [
        {
            "mutant": result.mutant.name,
            "what": result.mutant.what,
            "law": result.mutant.law,
            "incident": result.mutant.incident,
            "check": result.mutant.killed_by,
            "is_killed": result.is_killed,
            "is_killed_by_its_law": result.is_named,
        }
        for result in results
    ]
    survivors = [result for result in results if not result.is_killed]
    unexplained = automatic["unexplained"]
    if num_mutants:
        console.print(
            f"{automatic['num_killed']} of {len(automatic['mutants'])} automatic mutants killed, "
            f"{len(unexplained)} survivors without a reason",
            soft_wrap=True,
        )
        for name in unexplained:
            console.print(f"  {name}", style="red", markup=False, soft_wrap=True)
    report = {"mutants": rows, "num_survivors": len(survivors), "automatic": automatic}
    return _verdict(bool(survivors or unexplained), False), report


def _show_mutants(console: Console, results: Sequence[MutantResult]) -> None:
    table = Table(title="planted faults", title_justify="left", box=None)
    for name in ("law", "mutant", "killed by", "incident"):
        table.add_column(name, overflow="fold")
    for result in results:
        mutant = result.mutant
        end = mutant.killed_by if result.is_killed else "[bold red]SURVIVED[/] " + mutant.killed_by
        name = escape(f"{mutant.name}\n  {mutant.what}")
        table.add_row(mutant.law, name, end, mutant.incident or "")
    console.print(table)
    killed = sum(result.is_killed for result in results)
    incidents = len({result.mutant.incident for result in results} - {None})
    named = sum(result.is_named for result in results)
    told = f"{killed} of {len(results)} planted faults killed; {incidents} incidents; "
    told += f"{named} for their own law"
    console.print(told, soft_wrap=True)
