"""The commands of ``kvview``, which are entry points and are imported when they are called."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import click

from kvview.cli.echo import echo
from kvview.cli.exit_codes import EXIT_CODES, ExitCode
from kvview.cli.output import VERBOSE, missing_extra, report_error
from kvview.errors import ConfigError, line_of, one_line
from kvview.version import __version__

GROUP = "kvview.commands"
SUMMARIES = {
    "check": "Check an implementation against the laws of its contract.",
    "doctor": "Report which vLLM is installed, and whether kvview fits it.",
    "events": "Receive, record and validate KV events.",
    "new": "Write a complete connector, its test and a CI job.",
    "partition": "Check the keys and the memory layouts of a connector.",
    "replay": "Run a request trace through the reference engine.",
    "size": "Compute the hits of a cache of every size.",
    "tier": "Check the folder of a tier store.",
}
"""Summaries of kvview's own commands, so that the help does not import the commands."""


class EntryPointGroup(click.Group):
    """A group whose commands are the entry points of :data:`GROUP`.

    1. Each command, and each command of a group, has ``--verbose``, lists the exit codes in its
       help, and reports errors in one line.
    2. A command that cannot be imported is listed in the help, and the other commands still work.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names of the commands, sorted."""
        return sorted(self._points())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if no entry point has this name."""
        point = self._points().get(cmd_name)
        if point is None:
            return None
        try:
            command = point.load()
            if not isinstance(command, click.Command):
                raise TypeError(f"{point.value} is not a click command")
        except (Exception, SystemExit) as error:
            command = _unavailable(point, error)
        _complete(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and summaries of commands, importing only those of other packages."""
        rows = []
        for name, point in sorted(self._points().items()):
            text = SUMMARIES.get(name, "") if _is_own(point) else ""
            if not text and (command := self.get_command(ctx, name)) is not None:
                text = command.get_short_help_str(60)
            rows.append((name, text))
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command and turn its exception into its exit code."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            return report_error(error, ctx.meta.get(VERBOSE, False))

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run the command line; always ends in ``SystemExit``."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.Abort:
            echo("kvview: interrupted", err=True)
            code = ExitCode.INTERRUPTED
        except click.ClickException as error:
            _report_usage(error)
            code = ExitCode.COULD_NOT_RUN
        sys.exit(code if isinstance(code, int) else ExitCode.CLEAN)

    def _points(self) -> dict[str, EntryPoint]:
        # kvview's entry points come last, so that no other package replaces a command of kvview.
        points = sorted(entry_points(group=GROUP), key=_is_own)
        return {point.name: point for point in points}


def _report_usage(error: click.ClickException) -> None:
    text = error.format_message()
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    if ctx is not None and text == ctx.get_help():  # the user named a group without a command
        error.show()
        return
    hint = f" See '{ctx.command_path} --help'." if ctx is not None else ""
    echo(f"kvview: {line_of(text)}{hint}", err=True)


def _package(point: EntryPoint) -> str:
    return point.value if point.dist is None else point.dist.name


def _is_own(point: EntryPoint) -> bool:
    return _package(point) == "kvview"


def _complete(command: click.Command) -> None:
    """Add the common option and the exit codes to a command and its subcommands, once."""
    if any(isinstance(option, _Verbose) for option in command.params):
        return
    command.params.append(_Verbose())
    command.epilog = command.epilog or EXIT_CODES
    if isinstance(command, click.Group):
        for below in command.commands.values():
            _complete(below)


class _Verbose(click.Option):
    """The option ``--verbose``, which may come before or after the command."""

    def __init__(self) -> None:
        def note(ctx: click.Context, _: click.Parameter, value: bool) -> None:
            if value:
                ctx.meta[VERBOSE] = True

        text = "Print the traceback of an error."
        names = ["-v", "--verbose"]
        super().__init__(names, is_flag=True, expose_value=False, help=text, callback=note)


def _unavailable(point: EntryPoint, error: BaseException) -> click.Command:
    """Make a command that reports why the real one cannot be imported."""
    why = (
        missing_extra(error)
        or f"{point.value} of {_package(point)} cannot be imported: {one_line(error)}"
    )

    def fail() -> None:
        raise ConfigError(f"{point.name}: {why}") from error

    return click.Command(
        point.name,
        callback=fail,
        params=[click.Argument(["args"], nargs=-1, type=click.UNPROCESSED, expose_value=False)],
        context_settings={"ignore_unknown_options": True},
        help=f"Not available: {why}",
    )


@click.group(
    cls=EntryPointGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)
@click.version_option(__version__, prog_name="kvview")
def cli() -> None:
    """KV-cache connectors: write once, check on a laptop, run in every engine."""


_complete(cli)
