"""The commands of ``kvview``, found among the entry points and imported when called."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import click

from kvview.cli.exit_codes import EXIT_CODES, ExitCode
from kvview.cli.output import missing_extra, tell_error
from kvview.errors import ConfigError, line_of, one_line
from kvview.version import __version__

GROUP = "kvview.commands"
_VERBOSE = "kvview.verbose"


class EntryPointGroup(click.Group):
    """A group whose commands are the entry points :data:`GROUP`.

    1. Each gets ``--verbose``, the exit codes in its help, and errors in one line.
    2. One that does not import is named and takes no other down.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, sorted."""
        return sorted(self._points())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None when there is none of this name."""
        point = self._points().get(cmd_name)
        if point is None:
            return None
        try:
            command = point.load()
            if not isinstance(command, click.Command):
                raise TypeError(f"{point.value} is no click command")
        except (Exception, SystemExit) as error:
            command = _unavailable(point, error)
        _complete(command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what it raises becomes its exit code."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            return tell_error(error, ctx.meta.get(_VERBOSE, False))

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run the command line; always ends in ``SystemExit``."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.Abort:
            click.echo("kvview: interrupted", err=True)
            code = ExitCode.INTERRUPTED
        except click.ClickException as error:
            _tell_usage(error)
            code = ExitCode.COULD_NOT_RUN
        sys.exit(code if isinstance(code, int) else ExitCode.CLEAN)

    def _points(self) -> dict[str, EntryPoint]:
        # Own ones last: nobody takes the place of a command of kvview's.
        points = sorted(entry_points(group=GROUP), key=lambda point: _package(point) == "kvview")
        return {point.name: point for point in points}


def _tell_usage(error: click.ClickException) -> None:
    text = error.format_message()
    if "\n" in text:  # the help, for a group without a command
        error.show()
        return
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    hint = f" See '{ctx.command_path} --help'." if ctx is not None else ""
    click.echo(f"kvview: {line_of(text)}{hint}", err=True)


def _package(point: EntryPoint) -> str:
    return point.value if point.dist is None else point.dist.name


def _complete(command: click.Command) -> None:
    """Give a command what all have, once."""
    if not any("--verbose" in option.opts for option in command.params):
        command.params.append(
            click.Option(
                ["--verbose"],
                is_flag=True,
                expose_value=False,
                help="Show the traceback of an error.",
                callback=lambda ctx, _, value: ctx.meta.update({_VERBOSE: value}),
            )
        )
    command.epilog = command.epilog or EXIT_CODES


def _unavailable(point: EntryPoint, error: BaseException) -> click.Command:
    """Stands in for a command that does not import."""
    why = (
        missing_extra(error)
        or f"{point.value} of {_package(point)} does not import: {one_line(error)}"
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
    """KV-cache connectors: write once, prove on a laptop, run in every engine."""
