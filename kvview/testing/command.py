"""``kvview check``: the conformance kit without pytest."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import click

from kvview.cli.console import Console, progress
from kvview.cli.echo import echo
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import (
    VERBOSE,
    OutputFile,
    Whole,
    arguments_of,
    given_parameters,
    json_option,
    naming,
    target_options,
    write_json,
)
from kvview.cli.result_file import (
    RESULT_OPTION,
    Colour,
    Profile,
    ResultFinding,
    make_profile,
    or_could_not_run,
    write_result,
)
from kvview.errors import ConfigError, line_of
from kvview.targets import is_engine_connector
from kvview.testing.checks import EXCEPTIONS
from kvview.testing.supervision.watchdog import HOOK_SECONDS, end_soon

if TYPE_CHECKING:
    from kvview.testing import Report
    from kvview.testing.repetition import Replay

SEEDS_OF_A_RELEASE = 100
"""Default number of seeds for each release."""


@click.command()
@click.argument("target", nargs=-1, required=True, metavar="TARGET")
@click.option(
    "--select",
    multiple=True,
    metavar="NAME",
    help="Run only this check or law ('check_pool_7_*', 'POOL-7'). Repeatable.",
)
@click.option(
    "--expected",
    "expected_path",
    metavar="FILE",
    help=(
        "File in TOML with a table [[expected]] for each expected failure: law, reason and link to "
        "the thread. An expected failure that no longer occurs is reported."
    ),
)
@click.option("--seed", type=Whole(), default=0, help="The first seed.  [default: 0]")
@click.option(
    "--steps",
    type=Whole(),
    help=(
        "Maximum number of calls in one sequence; for a connector, minimum number of steps in "
        "one run."
    ),
)
@click.option("--seeds", type=Whole(), help="Number of runs. [default: 100; for a connector 200]")
@click.option(
    "--engine",
    metavar="NAME",
    help="Engine that runs a connector: reference (default), or vllm, the scheduler of the "
    "installed vLLM, without a GPU.",
)
@target_options("Option of the connector or store, as JSON or text. Repeatable.")
@click.option(
    "--vllm",
    multiple=True,
    metavar="RELEASE",
    help=(
        "Check in this vLLM release (0.33, 0.33.0), or in 'all' releases. The sources of the "
        "release are fetched, but not installed. Repeatable."
    ),
)
@click.option(
    "--kv-transfer-config",
    "transfer_config",
    metavar="JSON",
    help=(
        "Configuration of a vLLM connector in the form that vllm serve accepts; --option sets "
        "entries of its kv_connector_extra_config."
    ),
)
@click.option(
    "--inference",
    is_flag=True,
    help="Serve a tiny model with the connector in the installed vLLM, and compare its tokens with "
    "those of a run without the connector (docs/inference.md).",
)
@click.option(
    "--pd",
    is_flag=True,
    help=(
        "Check a connector that passes KV from one engine to another, in two engines with a "
        "router and a faulty network between them (docs/handoff.md)."
    ),
)
@click.option(
    "--from",
    "incident",
    metavar="FILE",
    help="Play an incident that the recorder in a server wrote, and report whether its fault "
    "repeats (docs/canary.md).",
)
@click.option(
    "--hook-seconds",
    type=float,
    default=HOOK_SECONDS,
    show_default=True,
    help="CPU seconds that one call of a hook may take.",
)
@click.option(
    "--keep-going",
    is_flag=True,
    help="Run all seeds of a connector; by default the first failing seed ends the run.",
)
@click.option(
    "--shard",
    metavar="K/N",
    help="Run only the K-th of N parts of a connector's seeds; --merge adds up their reports.",
)
@click.option(
    "--merge",
    is_flag=True,
    help="Make one verdict of the reports (--json) of all shards, which are the arguments.",
)
@click.option(
    "--timeline",
    "timeline_file",
    type=OutputFile(),
    metavar="FILE.html",
    help="Draw the last steps of a connector's first failure: requests, jobs and held blocks.",
)
@json_option(
    {
        "report": "kvview.testing.results.schema:ReportModel",
        "upgrade": "kvview.testing.results.schema:UpgradeModel",
    }
)
@RESULT_OPTION
def check(
    target: tuple[str, ...],
    merge: bool,
    shard: str | None,
    expected_path: str | None,
    vllm: tuple[str, ...],
    options: tuple[str, ...],
    transfer_config: str | None,
    pd: bool,
    incident: str | None,
    json_file: str | None,
    result_file: str | None,
    timeline_file: str | None,
    **settings: Any,
) -> None:
    """Check an implementation against the laws of its contract.

    TARGET is package.module:name or path/to/file.py:name. TARGET is a factory of harnesses for a
    pool view, a coordinator, an offloading manager or a transfer worker; a class of tier stores,
    which is built with the given --option values; or a connector class, which runs in an engine
    with injected faults. With --engine vllm, the connector may be any unmodified KVConnectorBase_V1
    of vLLM. In an option, '{tmp}' is a new folder for each connector and run; '{blocks}' and
    '{bytes}' are the size of the connector's tier in the run.
    """
    _drop_own_warnings(click.get_current_context())
    if not faulthandler.is_enabled():  # so that a crash shows the author's line
        faulthandler.enable(sys.__stderr__ or sys.stderr)
    console = Console(markup=True)
    if shard is not None:
        settings["shard"] = _read_shard(shard)
    if merge:
        from kvview.testing.results.merge import read_shards

        name, settings["merged"] = read_shards(target)
    elif len(target) == 1:
        name = target[0]
    else:
        raise click.UsageError(f"check takes one TARGET, got {len(target)}; --merge takes reports")
    if vllm and settings["inference"]:
        raise ConfigError(
            "--inference runs in the installed vLLM and cannot be combined with --vllm; drop one "
            "of them"
        )
    if vllm:
        _finish(*_check_in_releases(console, name, "vllm", vllm), json_file)
    from kvview.options import read_options
    from kvview.testing import load_target, read_expected, run_checks
    from kvview.testing.results.terminal import print_line, show_report
    from kvview.testing.supervision.scratch import scratch_folder

    given = read_options(options)
    if transfer_config is not None:
        given |= read_options([f"kv_transfer_config={transfer_config}"])
    replay = None if incident is None else _read_incident(console, incident, settings)
    if pd and settings["inference"]:
        if (json_file, result_file) != (None, None):
            raise ConfigError(
                "--pd --inference only prints its report; drop --json and --report-json"
            )
        sys.exit(_check_real_handoffs(console, name, given))
    profile = "inference" if settings["inference"] else "handoff" if pd else "connector"
    with (
        scratch_folder(),
        _ended_in_order(),
        naming(name),
        or_could_not_run(result_file, name, profile),
        progress(f"checking {name}") as on_progress,
    ):
        found = load_target(name)
        if replay is not None and is_engine_connector(found):
            from kvview.testing.token_runs import ENGINE

            settings["engine"] = settings["engine"] or ENGINE
        if pd:
            from kvview.testing.handoff import pd_factory

            found = pd_factory(found, settings["engine"], given)
            settings["engine"], given = None, {}
        report = run_checks(
            found,
            expected=() if expected_path is None else read_expected(expected_path),
            options=given,
            target=name,
            on_progress=on_progress,
            **settings,
        )
    show_report(console, report)
    if replay is not None and report.runs is not None:
        from kvview.testing.repetition import verdict_on

        print_line(console, verdict_on(replay, report.runs), "bold")
    _draw_timeline(report, timeline_file)
    replaced = getattr(found, "replaced", ()) if report.runs is None else report.runs.replaced
    if report.runs is None and replaced:
        from kvview.testing.connector.exercised.coverage import REPLACED, notes_on

        for note in notes_on(dict.fromkeys((f"{REPLACED}{part}" for part in replaced), 1)):
            console.print(note, style="yellow", markup=False, highlight=False)
    profile = "inference" if settings["inference"] else report.contract
    write_result(
        result_file,
        name,
        [_profile(report, profile)],
        report.versions,
        replaced,
        report.engine,
    )
    _finish(_verdict(report), report.to_dict(), json_file)


def _draw_timeline(report: Report, path: str | None) -> None:
    """Draw the first failure of a connector into a file, if the file is given."""
    if path is None:
        return
    from kvview.testing.results.timeline import write_timeline

    failures = [result.failure for result in report.results if result.failure is not None]
    if drawn := next((failure for failure in failures if failure.log), None):
        write_timeline(drawn, path)
    else:
        echo(
            f"kvview: --timeline: no run of a connector failed, so {path} is not written", err=True
        )


def _read_shard(text: str) -> tuple[int, int]:
    """Read a shard and the number of shards, as ``3/8``."""
    number, slash, of = text.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal()):
        raise ConfigError(f"--shard takes a shard and the number of shards, as 3/8, got {text!r}")
    return int(number), int(of)


def _profile(report: Report, name: str) -> Profile:
    """Make the verdict of a result file, with one result for each check."""
    results = []
    for result in report.results:
        failure = result.failure
        evidence = line_of(failure.what) if failure is not None else result.reason
        if result.outcome == "expected failure":
            evidence = f"{result.reason} {result.link}".rstrip()
        law = result.law if failure is None else failure.law
        results.append(ResultFinding(law, result.outcome, evidence))
    colours: dict[str, Colour] = {
        "failed": "red",
        "unexpected pass": "red",
        "expected failure": "",
        "not checked": "not checked",
    }
    return make_profile(name, colours, results)


def _check_in_releases(
    console: Console, target: str, engine: str, names: tuple[str, ...]
) -> tuple[int, dict[str, Any]]:
    from kvview.testing.results.terminal import print_line

    point = next(iter(entry_points(group="kvview.releases", name=engine)), None)
    if point is None:
        raise ConfigError(
            f"--{engine} needs kvview's adapter to {engine}; install kvview[{engine}]"
        )
    upgrade = point.load()
    verdicts = upgrade.Verdict
    styles = {verdicts.GREEN: "green", verdicts.FAILED: "bold red", verdicts.BUG: "bold red"}

    def show(result: Any) -> None:
        line = f"{engine} {result}"
        if result.verdict is verdicts.COULD_NOT_RUN:
            echo(f"kvview: {line}", err=True)
        else:
            print_line(console, line, styles.get(result.verdict, "yellow"))

    options = _options_of_each(click.get_current_context(), engine)
    releases = upgrade.VLLMReleases()
    wanted = releases.resolve(names)
    with _ended_in_order(), progress(f"checking {target}") as on_progress:
        report = upgrade.check_releases(
            target, engine, releases, wanted, options, on_progress=on_progress, on_result=show
        )
    print_line(console, report.summary(), "bold" if report.is_clean else "red")
    return report.exit_code, report.to_dict()


def _options_of_each(context: click.Context, engine: str) -> list[str]:
    """Return the user's arguments for one release, without options that concern all releases."""
    if context.params["engine"] not in (None, engine):
        raise ConfigError(
            f"--{engine} runs the engine {engine}, not {context.params['engine']!r}; drop "
            f"--engine or --{engine}"
        )
    if context.params["result_file"] is not None:
        raise ConfigError(
            f"--report-json is about one release and cannot be combined with --{engine}; drop one "
            "of them"
        )
    ignored = ("target", "vllm", "engine", "json_file")
    options = arguments_of(context, ignored)
    if context.params["seeds"] is None:
        options.append(f"--seeds={SEEDS_OF_A_RELEASE}")
    return options


def _check_real_handoffs(console: Console, target: str, options: dict[str, Any]) -> ExitCode:
    from kvview.targets import is_engine_connector
    from kvview.testing import load_target
    from kvview.testing.connector.run.engine import load_factory_class
    from kvview.testing.handoff.suite import require_handoff_connector

    num_wrong, engines = 0, load_factory_class("vllm")
    with _ended_in_order(), naming(target), progress(f"checking {target}") as on_progress:
        connector: Any = load_target(target)
        if not is_engine_connector(connector):
            require_handoff_connector(connector, options)
        for case in engines.play_handoffs(connector, options, on_progress):  # type: ignore[attr-defined]
            num_wrong += not case.is_right
            verdict = "ok" if case.is_right else "WRONG"
            line = f"{verdict:6}{case.law:9}{case.name}: {case.outcome}"
            console.print(line, markup=False, soft_wrap=True)
    console.print(f"{num_wrong} wrong")
    return ExitCode.WRONG if num_wrong else ExitCode.CLEAN


def _read_incident(console: Console, path: str, settings: dict[str, Any]) -> Replay:
    """Read an incident, print its law and its notes, and set what the checks play of it."""
    from kvview.testing.repetition import read_replay

    allowed = {"target", "options", "transfer_config", "incident", "engine", "hook_seconds"}
    for parameter in given_parameters(click.get_current_context()):
        if parameter.name not in allowed | {"json_file"}:
            raise ConfigError(f"--from cannot be combined with {parameter.opts[0]}; drop it")
    replay = read_replay(path)
    lines = [f"incident: {replay.law or 'requested by a signal'}", *replay.notes]
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    settings["scenarios"], settings["keep_going"] = replay.scenarios, True
    settings["select"] = ("check_*_in_simulated_runs",)  # all laws, without the coverage
    return replay


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


def _drop_own_warnings(context: click.Context) -> None:
    """Drop warnings of kvview and its engines, because the injected faults of checks cause them.

    Warnings of the target are still printed, and so are warnings for which the user's logging
    configuration has a handler.

    Args:
        context: The run of the command, at whose end the warnings are printed again.
    """
    if context.meta.get(VERBOSE):
        return
    handler = logging.NullHandler()
    engines = {point.module.partition(".")[0] for point in entry_points(group="kvview.engines")}
    for package in ("kvview", *engines):
        logger = logging.getLogger(package)
        logger.addHandler(handler)
        context.call_on_close(partial(logger.removeHandler, handler))


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """End the run on SIGTERM as on Ctrl-C, with its summary and its report."""

    def end(*_: object) -> None:
        end_soon()
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
