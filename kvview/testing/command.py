"""``kvview check``: the conformance kit without pytest."""

from __future__ import annotations

import logging
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

import click

from kvview.cli.console import Console, progress
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import (
    VERBOSE,
    OutputFile,
    Whole,
    json_option,
    naming,
    target_options,
    write_json,
)
from kvview.connector.hooks import TARGET_PREFIX
from kvview.errors import ConfigError
from kvview.testing.checks import EXCEPTIONS
from kvview.testing.watchdog import HOOK_SECONDS
from kvview.urls import DOCS_URL

if TYPE_CHECKING:
    from kvview.testing import Report

_PAGE_WIDTH = 120
_LINK = re.compile(re.escape(DOCS_URL) + r"[\w/.#-]*")

DEFAULT_MUTANTS = 20
SEEDS_OF_A_RELEASE = 100
"""Of each release, unless the user sets a number."""


@click.command()
@click.argument("target", required=False)
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
    help="Lines of 'check_name: reason' or 'coverage: name: reason'; a pass is reported.",
)
@click.option("--seed", type=Whole(), default=0, help="The first seed.  [default: 0]")
@click.option("--steps", type=Whole(), help="Longest sequence of calls; fewest steps of a run.")
@click.option("--seeds", type=Whole(), help="Number of runs.  [default: 100; of a connector, 200]")
@click.option(
    "--engine",
    metavar="NAME",
    help="Engine that runs a connector: reference (default), or vllm, the scheduler of the "
    "installed vLLM, without a GPU.",
)
@target_options("An option for the connector or store; JSON, or else text. Repeatable.")
@click.option(
    "--vllm",
    multiple=True,
    metavar="RELEASE",
    help="Check in this vLLM release (0.33, 0.33.0), or 'all': its sources are fetched, "
    "nothing is installed. Repeatable.",
)
@click.option(
    "--kv-transfer-config",
    "transfer_config",
    metavar="JSON",
    help="Of a connector of vLLM, as vllm serve takes it; --option goes into its extra config.",
)
@click.option(
    "--inference",
    is_flag=True,
    help="Serve a tiny model with the connector in the installed vLLM, and compare the tokens "
    "with those without it (docs/inference.md).",
)
@click.option(
    "--pd",
    is_flag=True,
    help="Check a connector that hands KV from one engine to another, in two engines with a "
    "router and a faulty network between them (docs/handoff.md).",
)
@click.option(
    "--hook-seconds",
    type=float,
    default=HOOK_SECONDS,
    show_default=True,
    help="CPU time of one call of a hook.",
)
@click.option(
    "--keep-going",
    is_flag=True,
    help="Play all seeds of a connector: without it the first that fails ends the run.",
)
@json_option(
    {
        "report": "kvview.testing.schema:ReportModel",
        "self-test": "kvview.testing.schema:SelfTestModel",
        "upgrade": "kvview.testing.schema:UpgradeModel",
    }
)
@click.option(
    "--html",
    "page_file",
    type=OutputFile(may_be_stdout=False),
    metavar="FILE",
    help="Write the printed report to FILE, as a page.",
)
@click.option(
    "--self-test",
    is_flag=True,
    help="Check the checks: planted faults and automatic mutants must die.",
)
@click.option(
    "--mutants",
    "num_mutants",
    type=Whole(0),
    help="Automatic mutants that --self-test plays, drawn with --seed.  "
    f"[default: {DEFAULT_MUTANTS}]",
)
def check(
    target: str | None,
    expected_failures_file: str | None,
    vllm: tuple[str, ...],
    options: tuple[str, ...],
    transfer_config: str | None,
    pd: bool,
    json_file: str | None,
    page_file: str | None,
    self_test: bool,
    num_mutants: int | None,
    **settings: Any,
) -> None:
    """Check an implementation against the laws of its contract.

    TARGET is package.module:name or path/to/file.py:name. It names a factory of
    harnesses over a pool view, a coordinator, an offloading manager or a transfer
    worker; a class of tier stores, which is made with the --options; or a connector
    class, which runs in an engine with injected faults: one of kvview, or with
    --engine vllm any KVConnectorBase_V1 of vLLM, unmodified. In an option, '{tmp}'
    is a fresh folder for each connector and run; '{blocks}' and '{bytes}' are the
    size of the connector's tier in that run.
    """
    click.get_current_context().with_resource(_without_own_warnings())
    console = Console(stderr=json_file == "-", markup=True)  # stdout is the report's alone then
    if self_test:
        _refuse_for_the_self_test(click.get_current_context())
        number = DEFAULT_MUTANTS if num_mutants is None else num_mutants
        _finish(*_self_test(console, number, settings["seed"]), json_file)
    if target is None:
        raise ConfigError("give a TARGET, package.module:factory, or --self-test")
    if num_mutants is not None:
        raise ConfigError("--mutants is for --self-test")
    if vllm and settings["inference"]:
        raise ConfigError("--inference runs in the installed vLLM: leave out --vllm")
    if vllm:
        _finish(*_check_in_releases(console, target, "vllm", vllm), json_file)
    from kvview.options import read_options
    from kvview.testing import load_target, read_expected_failures, run_checks
    from kvview.testing.terminal import show_report

    path = expected_failures_file
    given = read_options(options)
    if transfer_config is not None:
        given |= read_options([f"kv_transfer_config={transfer_config}"])
    if pd and settings["inference"]:
        if json_file is not None or page_file is not None:
            raise ConfigError("--pd --inference prints its report; drop --json and --html")
        sys.exit(_check_real_handoffs(console, target, given))
    with _ended_in_order(), naming(target), progress(f"checking {target}") as on_progress:
        found = load_target(target)
        if pd:
            from kvview.testing.handoff import pd_factory

            found = pd_factory(found, settings["engine"], given)
            settings["engine"], given = None, {}
        report = run_checks(
            found,
            expected_failures={} if path is None else read_expected_failures(path),
            options=given,
            target=target,
            on_result=lambda result: on_progress(result.check.name),
            on_seed=_seeds_in_words(on_progress),
            on_step=on_progress,
            **settings,
        )
    show_report(console, report)
    if page_file is not None:
        _write_page(page_file, report)
    _finish(_verdict(report), report.to_dict(), json_file)


def _seeds_in_words(on_progress: Callable[[str], None]) -> Callable[[int, int, int], None]:
    """Report the seeds so far, with the time that the others will take."""
    start = time.monotonic()

    def on_seed(done: int, number: int, failed: int) -> None:
        left = (time.monotonic() - start) / done * (number - done)
        on_progress(f"{done} of {number} seeds, {failed} failed, about {left:.0f} s left")

    return on_seed


def _write_page(path: str, report: Report) -> None:
    """Write the printed report as a page that needs no other file, with links."""
    from kvview.testing.terminal import show_report
    from kvview.web_page import made_by, write_page

    printed = StringIO()
    show_report(Console(file=printed, width=_PAGE_WIDTH), report)
    text = _LINK.sub(r'<a href="\g<0>">\g<0></a>', escape(printed.getvalue()))
    parts = [f"<pre>{text}</pre>", *made_by(report.versions)]
    write_page("--html", path, f"kvview check: {report.target}", parts)


def _check_in_releases(
    console: Console, target: str, engine: str, names: tuple[str, ...]
) -> tuple[int, dict[str, Any]]:
    from kvview.testing.terminal import show_releases
    from kvview.testing.upgrade import ReleaseResult, check_releases, load_releases

    def show(result: ReleaseResult) -> None:
        line = f"{engine} {result.release}: {result.verdict}, {result.seconds:.0f} s"
        console.print(line, markup=False, highlight=False)

    options = _options_of_each(click.get_current_context(), engine)
    releases = load_releases(engine)
    wanted = releases.resolve(names)
    with _ended_in_order(), progress(f"checking {target}") as on_progress:
        report = check_releases(
            target, engine, releases, wanted, options, on_progress=on_progress, on_result=show
        )
    show_releases(console, report)
    return report.exit_code, report.to_dict()


def _options_of_each(context: click.Context, engine: str) -> list[str]:
    """Return the user's arguments for each process, without those about all releases."""
    if context.params["engine"] not in (None, engine):
        raise ConfigError(f"--{engine} runs that engine, and not {context.params['engine']!r}")
    if context.params["page_file"] is not None:
        raise ConfigError(f"--html is for one release: leave out --{engine}, or --html")
    options = []
    for option in _given_options(context):
        name, value = option.name or "", context.params[option.name or ""]
        if name in ("target", "vllm", "engine", "json_file"):
            continue
        if isinstance(option, click.Option) and option.is_flag:
            options += option.opts
        else:
            several = value if isinstance(value, tuple) else (value,)
            options += [f"{option.opts[0]}={each}" for each in several]
    if context.params["seeds"] is None:
        options.append(f"--seeds={SEEDS_OF_A_RELEASE}")
    return options


def _given_options(context: click.Context) -> Iterator[click.Parameter]:
    """Yield the options that the user set."""
    for option in context.command.params:
        name = option.name or ""
        default = click.core.ParameterSource.DEFAULT
        if name in context.params and context.get_parameter_source(name) not in (default, None):
            yield option


def _check_real_handoffs(console: Console, target: str, options: dict[str, Any]) -> ExitCode:
    from kvview.testing import load_target
    from kvview.testing.handoff.tokens import real_handoffs

    num_wrong = 0
    with _ended_in_order(), naming(target), progress(f"checking {target}") as on_progress:
        for case in real_handoffs(load_target(target), options, on_progress):
            num_wrong += not case.is_right
            verdict = "ok" if case.is_right else "WRONG"
            line = f"{verdict:6}{case.law:9}{case.name}: {case.outcome}"
            console.print(line, markup=False, soft_wrap=True)
    console.print(f"{num_wrong} wrong")
    return ExitCode.WRONG if num_wrong else ExitCode.CLEAN


def _verdict(report: Report) -> ExitCode:
    if report.failures:
        has_raised = any(result.check.law == EXCEPTIONS for result in report.failures)
        return ExitCode.CONNECTOR_RAISED if has_raised else ExitCode.WRONG
    if report.is_interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.CLEAN if report.is_clean else ExitCode.NOT_CHECKED


def _finish(code: int, report: dict[str, Any], json_file: str | None) -> None:
    write_json(json_file, report)
    sys.exit(code)


@contextmanager
def _without_own_warnings() -> Iterator[None]:
    """Drop warnings of kvview's packages: the checks cause them, by faults that they inject.

    Warnings of the target, and those that a logging configuration selects, are printed.
    """

    def is_wanted(record: logging.LogRecord) -> bool:
        package = record.name.partition(".")[0]
        return not package.startswith("kvview") or package.startswith(TARGET_PREFIX)

    handler = logging.lastResort
    if handler is None or click.get_current_context().meta.get(VERBOSE):
        yield
        return
    handler.addFilter(is_wanted)
    try:
        yield
    finally:
        handler.removeFilter(is_wanted)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does: with its summary and its report."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _refuse_for_the_self_test(context: click.Context) -> None:
    if context.params["target"] is not None:
        raise ConfigError(
            "--self-test takes no TARGET, because it checks its own injected faults; drop TARGET"
        )
    for option in _given_options(context):
        if option.name not in ("self_test", "num_mutants", "seed", "json_file"):
            raise ConfigError(f"{option.opts[0]} is for a TARGET: --self-test has none")


def _self_test(console: Console, num_mutants: int, seed: int) -> tuple[ExitCode, dict[str, Any]]:
    from kvview.testing.mutants import load_mutants, run_automatic_mutants, run_mutants
    from kvview.testing.schema import MutantModel, SelfTestModel
    from kvview.testing.terminal import show_automatic_mutants, show_mutants

    mutants = load_mutants()
    automatic: dict[str, Any] = {"mutants": [], "num_killed": 0, "unexplained": []}
    if num_mutants:  # before anything starts a thread: they are forked
        with progress(f"running {num_mutants} automatic mutants") as on_progress:
            automatic = run_automatic_mutants(num_mutants, seed, on_progress)
    with progress(f"running {len(mutants)} planted faults") as on_progress:
        results = run_mutants(mutants, lambda result: on_progress(result.mutant.name))
    show_mutants(console, results)
    rows = [
        MutantModel(
            mutant=result.mutant.name,
            what=result.mutant.what,
            law=result.mutant.law,
            incident=result.mutant.incident,
            killed_by=None if result.broken is None else result.broken.law,
            is_killed=result.is_killed,
            is_killed_by_its_law=result.is_named,
        )
        for result in results
    ]
    if num_mutants:
        show_automatic_mutants(console, automatic)
    num_survivors = sum(not result.is_killed for result in results)
    told = SelfTestModel(mutants=rows, num_survivors=num_survivors, automatic=automatic)
    is_clean = not num_survivors and not automatic["unexplained"]
    return ExitCode.CLEAN if is_clean else ExitCode.WRONG, told.model_dump(mode="json")
