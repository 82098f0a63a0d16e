"""The commands of ``kvview``, found among the entry points and imported when called."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from functools import wraps
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any, NoReturn

import click

from kvview.cli.echo import echo
from kvview.cli.exit_codes import EXIT_CODES, ExitCode
from kvview.cli.output import VERBOSE, missing_extra, silence, tell_error
from kvview.errors import ConfigError, line_of, one_line
from kvview.version import CONTRACT_VERSION, __version__

GROUP = "kvview.commands"
SUMMARIES = {
    "check": "Check an implementation against the laws of its contract.",
    "completion": "Print what makes SHELL complete commands and options.",
    "doctor": "Say which vLLM is installed, and whether kvview fits it.",
    "events": "Hear, record, validate and play again KV events.",
    "new": "Write a connector to begin from, its test and a CI job.",
    "partition": "Check that only requests with the same KV share it.",
    "replay": "Run a request trace through the reference engine.",
    "size": "Say what a host tier of every size would be worth for a trace.",
    "tier": "Look after tiers below the host.",
}
"""Of kvview's own commands, for the help, which imports none of them for it."""

_SUMMARY = 66  # characters: with the longest name, a line of 80
_QUIET = "kvview.quiet"
_FOR_ALL = (
    (_QUIET, "-q", "--quiet", "Print nothing but errors, and what goes to '-'."),
    (VERBOSE, "-v", "--verbose", "Name versions; show the traceback of an error."),
)
_PACKAGES = ("vllm", "torch", "numpy", "pydantic", "msgspec", "pyzmq", "hypothesis", "click")


class EntryPointGroup(click.Group):
    """A group whose commands are the entry points :data:`GROUP`.

    1. Each gets ``--quiet`` and ``--verbose``, the exit codes in its help, and errors in one
       line; so do the commands of a group.
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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and what they do; only a command of others is imported for it."""
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
        """Run a command; what it raises becomes its exit code."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            return tell_error(error, ctx.meta.get(VERBOSE, False))

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run the command line; always ends in ``SystemExit``."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.Abort:
            echo("kvview: interrupted", err=True)
            code = ExitCode.INTERRUPTED
        except click.ClickException as error:
            _tell_usage(error)
            code = ExitCode.COULD_NOT_RUN
        sys.exit(code if isinstance(code, int) else ExitCode.CLEAN)

    def _points(self) -> dict[str, EntryPoint]:
        # Own ones last: nobody takes the place of a command of kvview's.
        points = sorted(entry_points(group=GROUP), key=_is_own)
        return {point.name: point for point in points}


def _tell_usage(error: click.ClickException) -> None:
    text = error.format_message()
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    if ctx is not None and text == ctx.get_help():  # of a group without a command
        error.show()
        return
    hint = f" See '{ctx.command_path} --help'." if ctx is not None else ""
    echo(f"kvview: {line_of(text)}{hint}", err=True)


def _package(point: EntryPoint) -> str:
    return point.value if point.dist is None else point.dist.name


def _is_own(point: EntryPoint) -> bool:
    return _package(point) == "kvview"


def _complete(command: click.Command) -> None:
    """Give a command, and those below it, what all have; once."""
    if any(isinstance(option, _OptionOfAll) for option in command.params):
        return
    taken = {name for option in command.params for name in option.opts}
    for key, short, long, text in _FOR_ALL:
        names = [name for name in (short, long) if name not in taken]
        if long in names:
            command.params.append(_OptionOfAll(names, key, text))
    command.epilog = command.epilog or EXIT_CODES
    if isinstance(command, click.Group):
        for below in command.commands.values():
            _complete(below)
    elif command.callback is not None:
        command.callback = _heeding(command.callback)


class _OptionOfAll(click.Option):
    def __init__(self, names: list[str], key: str, text: str) -> None:
        def note(ctx: click.Context, _: click.Parameter, value: bool) -> None:
            if value:  # it may stand before the command, or after it
                ctx.meta[key] = True

        super().__init__(names, is_flag=True, expose_value=False, help=text, callback=note)


def _heeding(callback: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(callback)
    def run(*args: Any, **kwargs: Any) -> Any:
        meta = click.get_current_context().meta
        if meta.get(_QUIET):
            with silence():
                return callback(*args, **kwargs)
        if meta.get(VERBOSE):
            echo(f"kvview: {_versions()}", err=True)
        return callback(*args, **kwargs)

    return run


def _versions() -> str:
    found = [f"kvview {__version__} (contract {CONTRACT_VERSION})"]
    found.append(f"{platform.python_implementation()} {platform.python_version()}")
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


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


_complete(cli)
